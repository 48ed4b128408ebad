"""Connects to the engine of a node: a local agent over pipes, or a remote one over SSH."""

from __future__ import annotations

import json
import os
from pathlib import Path

from django.conf import settings

from agents.engines.agent_engine import AgentEngine
from agents.engines.interface import AgentError, NodeEngine, OutcomeUnknownError
from agents.ssh import Role, SshError
from portal.database.pool_middleware import release_connection
from portal.domain.states import NodeTransport
from portal.models import ClusterSettings, Node

LOCAL_AGENT_PATH = "agent/agent.pyz"
"""The agent program for this machine, which ``manage.py up`` writes to the data folder."""


class EngineConnectError(Exception):
    """No connection to the node; the message is for users."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def open_engine(node: Node, role: Role = "control") -> NodeEngine:
    """Return an open engine. Raise EngineConnectError; each step has a limit of some seconds."""
    cluster = ClusterSettings.objects.get(id=1).cluster_id
    release_connection()  # do not hold a database connection during remote calls
    try:
        if node.transport == NodeTransport.LOCAL.value:
            program = Path(settings.DATA_DIR) / LOCAL_AGENT_PATH
            engine = AgentEngine.local(program, _write_local_settings(node), cluster=cluster, role=role)
        else:
            engine = AgentEngine.ssh(
                node.host,
                node.port,
                node.ssh_user,
                control_key_path(),
                node.host_key,
                cluster=cluster,
                role=role,
            )
    except SshError as problem:
        raise EngineConnectError(str(problem), problem.code) from problem
    except AgentError as refusal:
        raise EngineConnectError(refusal.message, refusal.code) from refusal
    except OutcomeUnknownError as problem:
        raise EngineConnectError(
            f"The agent on {node.name} did not answer: {problem}", "command_timeouts"
        ) from problem
    except OSError as problem:
        raise EngineConnectError(
            f"The agent of {node.name} cannot be started: {problem}", "agent_missing"
        ) from problem
    engine.on_wait(release_connection)
    return engine


def control_key_path() -> Path:
    """Return the path of the control key, which only worker-nodes has."""
    return Path(settings.KEY_FILES["control"] or settings.KEY_DIR / "control")


def _write_local_settings(node: Node) -> Path:
    """Write the settings file of a local agent from the node's row; return its path."""
    folder = Path(settings.DATA_DIR) / "agent"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = folder / f"{node.public_id}.json"
    text = json.dumps(node.settings, indent=1, sort_keys=True)
    if not path.exists() or path.read_text() != text:
        fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
        fresh.write_text(text)
        fresh.replace(path)
    return path
