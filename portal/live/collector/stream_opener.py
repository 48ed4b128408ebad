"""Opens the watch stream of a node: this machine's agent over pipes, others over SSH with the watch key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings

from agents.link import AgentError, Link, OutcomeUnknownError
from agents.local import open_local
from agents.ssh import SshError, SshTarget, open_ssh
from portal.config import data_paths
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
                data_paths.agent_program(settings.DATA_DIR),
                "watch",
                data_paths.write_agent_settings(settings.DATA_DIR, node.public_id, node.settings),
                cluster=node.cluster,
                on_event=on_event,
                hello_timeout_s=HELLO_TIMEOUT_S,
            )
        key = Path(settings.KEY_FILES["watch"] or settings.KEY_DIR / "watch")
        target = SshTarget(host=node.host, user=node.account, host_key=node.host_key, port=node.port)
        return open_ssh(
            target, key, "watch", cluster=node.cluster, on_event=on_event, hello_timeout_s=HELLO_TIMEOUT_S
        )
    except AgentError as refusal:
        raise WatchError(refusal.message) from refusal
    except (SshError, OutcomeUnknownError) as problem:
        raise WatchError(str(problem)) from problem
    except OSError as problem:
        raise WatchError(f"The agent cannot be started: {problem}.") from problem
