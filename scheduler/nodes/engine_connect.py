"""Opens the engine of a node: the agent of this machine over pipes, or another machine's over SSH."""

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


class EngineConnectError(Exception):
    """No connection to the node; the message is a message for people."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def open_engine(node: Node, role: Role = "control") -> NodeEngine:
    """An open engine. Raises CannotOpen; every step on the way has a limit of some seconds."""
    cluster = ClusterSettings.objects.get(id=1).cluster_id
    release_connection()  # nobody holds a connection to the database while a node takes its time
    try:
        if node.transport == NodeTransport.LOCAL.value:
            engine = AgentEngine.local(
                agent_program_path(), _write_local_settings(node), cluster=cluster, role=role
            )
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
    """The private key that only worker-nodes holds."""
    return Path(settings.KEY_FILES["control"] or settings.KEY_DIR / "control")


def agent_program_path() -> Path:
    """The agent for this machine, as `up` left it in the data folder."""
    return Path(settings.DATA_DIR) / LOCAL_AGENT_PATH


def _write_local_settings(node: Node) -> Path:
    """The settings file of a local agent, made from the node's row."""
    folder = Path(settings.DATA_DIR) / "agent"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = folder / f"{node.public_id}.json"
    text = json.dumps(node.settings, indent=1, sort_keys=True)
    if not path.exists() or path.read_text() != text:
        fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
        fresh.write_text(text)
        fresh.replace(path)
    return path
