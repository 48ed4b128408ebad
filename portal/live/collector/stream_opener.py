"""Opens the watch stream of a node: this machine's agent over pipes, others over SSH with the watch key."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings

from agents.link import AgentError, Link, OutcomeUnknownError
from agents.local import open_local
from agents.ssh import SshError, SshTarget, open_ssh
from portal.domain.states import NodeTransport
from portal.live.collector.collector_state import StreamedNode

HELLO_TIMEOUT_S = 10.0


class WatchError(Exception):
    """The stream cannot be opened; the message is for people."""


def open_stream(node: StreamedNode, on_event: Callable[[dict[str, Any]], None]) -> Link:
    """Return an open link in the role ``watch``. Every step has a time limit of seconds. Raise WatchError."""
    try:
        if node.link == NodeTransport.LOCAL.value:
            return open_local(
                Path(settings.DATA_DIR) / "agent" / "agent.pyz",
                "watch",
                _settings_file(node),
                cluster=node.cluster,
                on_event=on_event,
                hello_timeout_s=HELLO_TIMEOUT_S,
            )
        key = Path(settings.KEY_FILES["watch"] or settings.KEY_DIR / "watch")
        target = SshTarget(host=node.host, user=node.account, host_key=node.host_key, port=node.port)
        return open_ssh(
            target, key, "watch", cluster=node.cluster, on_event=on_event, hello_timeout_s=HELLO_TIMEOUT_S
        )
    except SshError as problem:
        raise WatchError(str(problem)) from problem
    except AgentError as refusal:
        raise WatchError(refusal.message) from refusal
    except OutcomeUnknownError as problem:
        raise WatchError(problem.reason) from problem
    except OSError as problem:
        raise WatchError(f"The agent cannot be started: {problem}.") from problem


def _settings_file(node: StreamedNode) -> Path:
    """Write the settings file of a local agent from the node's row and return its path."""
    folder = Path(settings.DATA_DIR) / "agent"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = folder / f"{node.public_id}.json"
    if not path.exists() or path.read_text() != node.settings:
        fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
        fresh.write_text(node.settings)
        fresh.replace(path)
    return path
