"""The signed agent that `up` or `prepare` left in the data folder, and which nodes run it."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from agents.enrol import SignedAgent, loader_version
from portal.errors import Unavailable
from portal.models import Node
from portal.words.states import LinkKind


@dataclass(frozen=True)
class OurAgent:
    """The program that nodes are given, and the SHA-256 by which a hello names it."""

    signed: SignedAgent
    digest: str


def our_agent() -> OurAgent:
    """The agent of this version. Raises Unavailable before the first start of Fairway."""
    folder = Path(settings.DATA_DIR) / "agent"
    try:
        program, signature = (folder / "agent.pyz", folder / "agent.pyz.sig")
        signed = SignedAgent(program.read_bytes(), signature.read_text())
    except FileNotFoundError as missing:
        raise Unavailable(
            "The signed agent is not there yet; start Fairway with `manage.py up`."
        ) from missing
    return OurAgent(signed, hashlib.sha256(signed.program).hexdigest())


def our_digest() -> str | None:
    """The digest alone, read once as long as the file stays; None where there is no agent yet."""
    path = Path(settings.DATA_DIR) / "agent" / "agent.pyz"
    try:
        facts = path.stat()
    except OSError:
        return None
    return _digest(path, facts.st_mtime_ns, facts.st_size)


def runs_ours(node: Node) -> bool:
    """True when the node's agent is exactly ours, as it said last; one that does not name its program is older."""
    return bool(node.hello) and node.hello.get("program") == our_digest()


def newer_for(node: Node) -> bool:
    """True when a node that has been heard runs another agent than ours."""
    return bool(node.hello) and our_digest() is not None and not runs_ours(node)


def old_loader_of(node: Node) -> bool:
    """True when what starts the agent of a node over SSH is older than ours; one that says no version is."""
    told = node.hello.get("loader")  # agents of earlier versions do not tell it
    return node.link == LinkKind.SSH.value and told is not None and told < loader_version()


@functools.lru_cache(maxsize=2)
def _digest(path: Path, mtime_ns: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
