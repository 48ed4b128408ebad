"""Connects to the engine of a node: a local agent over pipes, or a remote one over SSH."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from django.conf import settings

from agents.engines.node_engine import NodeEngine
from agents.engines.replies import AgentError, OutcomeUnknownError
from agents.ssh import Role, SshError, SshTarget
from portal.config import data_paths
from portal.database.pool_middleware import release_connection
from portal.domain.states import NodeTransport
from portal.domain.stored_texts import stored_text
from portal.models import ClusterSettings, Node
from portal.selectors.nodes.host_keys import ssh_target
from portal.services.nodes.agent_settings import agent_settings_text, write_agent_settings


class EngineConnectError(Exception):
    """No connection to the node; the message is for users."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class ConnectionSettings(NamedTuple):
    """What an actor knows of its node; a changed target needs another connection."""

    name: str
    target: SshTarget


SETTINGS_COLUMNS = ("name", "host", "port", "ssh_user", "host_key")


def connection_settings(node: Node) -> ConnectionSettings:
    return ConnectionSettings(node.name, ssh_target(node))


def open_engine(node: Node, role: Role = "control") -> NodeEngine:
    """Return an open engine. Raise EngineConnectError; each step has a limit of some seconds."""
    cluster = ClusterSettings.objects.get(id=1).cluster_id
    release_connection()  # do not hold a database connection during remote calls
    try:
        if node.transport == NodeTransport.LOCAL.value:
            text = agent_settings_text(node.settings)
            engine = NodeEngine.local(
                data_paths.agent_program(settings.DATA_DIR),
                write_agent_settings(settings.DATA_DIR, node.public_id, text),
                cluster=cluster,
                role=role,
            )
        else:
            engine = NodeEngine.ssh(ssh_target(node), control_key_path(), cluster=cluster, role=role)
    except SshError as error:
        raise EngineConnectError(str(error), error.code) from error
    except AgentError as error:
        raise EngineConnectError(error.message, error.code) from error
    except OutcomeUnknownError as error:
        raise EngineConnectError(
            stored_text(f"The agent on {node.name} did not answer: {error}"), "command_timeouts"
        ) from error
    except OSError as error:
        raise EngineConnectError(
            stored_text(f"The agent of {node.name} cannot be started: {error}"), "agent_missing"
        ) from error
    engine.on_wait(release_connection)
    return engine


def control_key_path() -> Path:
    """Return the path of the control key, which only worker-nodes has."""
    return Path(settings.KEY_FILES["control"] or settings.KEY_DIR / "control")
