"""Opens the runtimes of the node's settings."""

from __future__ import annotations

from typing import Dict, List

from agents.node.runtimes import Runtime
from agents.node.runtimes.docker import DockerRuntime
from agents.node.runtimes.podman import PodmanRuntime
from agents.node.runtimes.process import ProcessRuntime
from agents.node.settings import Settings


def open_runtimes(settings: Settings, agent_command: List[str]) -> Dict[str, Runtime]:
    """Return the runtimes by kind, in settings order."""
    opened: Dict[str, Runtime] = {}
    for each in settings.runtimes:
        if each.kind == "podman":
            opened[each.kind] = PodmanRuntime(settings, each)
        elif each.kind == "docker":
            opened[each.kind] = DockerRuntime(settings, each)
        else:
            opened[each.kind] = ProcessRuntime(settings, agent_command)
    return opened
