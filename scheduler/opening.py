"""Opens the engine of a node: the agent of this machine over pipes, or another machine's over SSH."""

from __future__ import annotations

import json
import os
from pathlib import Path

from django.conf import settings

from agents.engines.contract import Engine, Refused, Unknown
from agents.engines.ssh import NodeEngine
from agents.ssh import Role, SshError
from portal.database.turns import give_back
from portal.models import ClusterSettings, Node
from portal.words.states import LinkKind

AGENT = "agent/agent.pyz"


class CannotOpen(Exception):
    """No connection to the node; the message is a sentence for people."""

    def __init__(self, sentence: str, code: str) -> None:
        super().__init__(sentence)
        self.code = code


def open_engine(node: Node, role: Role = "control") -> Engine:
    """An open engine. Raises CannotOpen; every step on the way has a limit of some seconds."""
    cluster = ClusterSettings.objects.get(id=1).cluster_id
    give_back()  # nobody holds a connection to the database while a node takes its time
    try:
        if node.link == LinkKind.LOCAL.value:
            engine = NodeEngine.local(agent_program(), _local_settings(node), cluster=cluster, role=role)
        else:
            engine = NodeEngine.ssh(
                node.host,
                node.port,
                node.account,
                control_key(),
                node.host_key,
                cluster=cluster,
                role=role,
            )
    except SshError as problem:
        raise CannotOpen(str(problem), problem.code) from problem
    except Refused as refusal:
        raise CannotOpen(refusal.message, refusal.code) from refusal
    except Unknown as problem:
        raise CannotOpen(f"The agent on {node.name} did not answer: {problem}", "no_answer") from problem
    except OSError as problem:
        raise CannotOpen(
            f"The agent of {node.name} cannot be started: {problem}", "agent_missing"
        ) from problem
    engine.before_waiting(give_back)
    return engine


def control_key() -> Path:
    """The private key that only worker-nodes holds."""
    return Path(settings.KEY_FILES["control"] or settings.KEY_DIR / "control")


def agent_program() -> Path:
    """The agent for this machine, as `up` left it in the data folder."""
    return Path(settings.DATA_DIR) / AGENT


def _local_settings(node: Node) -> Path:
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
