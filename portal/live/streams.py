"""Opens the watch stream of a node: this machine's agent over pipes, others over SSH with the watch key."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings

from agents.link import Link, LinkUnknown, Refused
from agents.local import open_local
from agents.ssh import SshError, SshTarget, open_ssh
from portal.live.directory import WatchedNode
from portal.words.states import LinkKind

HELLO_WITHIN_S = 10.0


class CannotWatch(Exception):
    """No stream; the message is a sentence for people."""


def open_watch(node: WatchedNode, on_event: Callable[[dict[str, Any]], None]) -> Link:
    """An open link in the role ``watch``. Every step has a limit of some seconds. Raises CannotWatch."""
    try:
        if node.link == LinkKind.LOCAL.value:
            return open_local(
                Path(settings.DATA_DIR) / "agent" / "agent.pyz",
                "watch",
                _settings_file(node),
                cluster=node.cluster,
                on_event=on_event,
                hello_within_s=HELLO_WITHIN_S,
            )
        key = Path(settings.KEY_FILES["watch"] or settings.KEY_DIR / "watch")
        target = SshTarget(host=node.host, account=node.account, host_key=node.host_key, port=node.port)
        return open_ssh(
            target, key, "watch", cluster=node.cluster, on_event=on_event, hello_within_s=HELLO_WITHIN_S
        )
    except SshError as problem:
        raise CannotWatch(str(problem)) from problem
    except Refused as refusal:
        raise CannotWatch(refusal.message) from refusal
    except LinkUnknown as problem:
        raise CannotWatch(problem.why) from problem
    except OSError as problem:
        raise CannotWatch(f"The agent cannot be started: {problem}.") from problem


def _settings_file(node: WatchedNode) -> Path:
    """The settings file of a local agent, made from the node's row."""
    folder = Path(settings.DATA_DIR) / "agent"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = folder / f"{node.public_id}.json"
    if not path.exists() or path.read_text() != node.settings:
        fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
        fresh.write_text(node.settings)
        fresh.replace(path)
    return path
