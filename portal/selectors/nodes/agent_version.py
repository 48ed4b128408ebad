"""The signed agent that `up` or `prepare` left in the data folder, and which nodes run it."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from agents.enrolment import SignedAgent, loader_version
from portal.domain.states import NodeTransport
from portal.errors import ServiceUnavailable
from portal.models import Node


@dataclass(frozen=True)
class BundledAgent:
    """The program that nodes are given, and the SHA-256 by which a hello names it."""

    signed: SignedAgent
    digest: str


def bundled_agent() -> BundledAgent:
    """The agent of this version. Raises Unavailable before the first start of Fairway."""
    folder = Path(settings.DATA_DIR) / "agent"
    try:
        program, signature = (folder / "agent.pyz", folder / "agent.pyz.sig")
        signed = SignedAgent(program.read_bytes(), signature.read_text())
    except FileNotFoundError as missing:
        raise ServiceUnavailable(
            "The signed agent is not there yet; start Fairway with `manage.py up`."
        ) from missing
    return BundledAgent(signed, hashlib.sha256(signed.program).hexdigest())


def bundled_agent_digest() -> str | None:
    """The digest alone, read once as long as the file stays; None where there is no agent yet."""
    path = Path(settings.DATA_DIR) / "agent" / "agent.pyz"
    try:
        facts = path.stat()
    except OSError:
        return None
    return _digest(path, facts.st_mtime_ns, facts.st_size)


def runs_bundled_agent(node: Node) -> bool:
    """True when the node's agent is exactly ours, as it said last; one that does not name its program is older."""
    return bool(node.agent_info) and node.agent_info.get("program") == bundled_agent_digest()


def has_newer_agent_for(node: Node) -> bool:
    """True when a node that has been heard runs another agent than ours."""
    return bool(node.agent_info) and bundled_agent_digest() is not None and not runs_bundled_agent(node)


def has_outdated_loader(node: Node) -> bool:
    """True when what starts the agent of a node over SSH is older than ours; one that says no version is."""
    told = node.agent_info.get("loader")  # agents of earlier versions do not tell it
    return node.transport == NodeTransport.SSH.value and told is not None and told < loader_version()


@functools.lru_cache(maxsize=2)
def _digest(path: Path, mtime_ns: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
