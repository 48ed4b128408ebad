"""The bundled agent, signed and stored in the data directory by `up` or `prepare`, and which nodes run it."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings
from django.utils.translation import gettext as _

from agents.enrolment import SignedAgent, loader_version
from portal.domain.states import NodeTransport
from portal.errors import ServiceUnavailable
from portal.models import Node


@dataclass(frozen=True)
class BundledAgent:
    """The agent program, and the SHA-256 that its hello reports."""

    signed: SignedAgent
    digest: str


def bundled_agent() -> BundledAgent:
    """Return the agent of this version. Raise ServiceUnavailable before the first start of Fairway."""
    folder = Path(settings.DATA_DIR) / "agent"
    try:
        signed = SignedAgent((folder / "agent.pyz").read_bytes(), (folder / "agent.pyz.sig").read_text())
    except FileNotFoundError as error:
        message = _("The signed agent does not exist yet; start Fairway with `manage.py up`.")
        raise ServiceUnavailable(message) from error
    return BundledAgent(signed, hashlib.sha256(signed.program).hexdigest())


def bundled_agent_digest() -> str | None:
    """Return the agent's SHA-256, cached until the file changes, or None if there is no agent yet."""
    path = Path(settings.DATA_DIR) / "agent" / "agent.pyz"
    try:
        facts = path.stat()
    except OSError:
        return None
    return _digest(path, facts.st_mtime_ns, facts.st_size)


def runs_bundled_agent(node: Node) -> bool:
    """Return True if the node's last hello reported the bundled agent; agents without a digest are older."""
    return bool(node.agent_info) and node.agent_info.get("agent_digest") == bundled_agent_digest()


def has_newer_agent_for(node: Node) -> bool:
    """Return True if the node has connected and runs another agent than the bundled one."""
    return bool(node.agent_info) and bundled_agent_digest() is not None and not runs_bundled_agent(node)


def has_outdated_loader(node: Node) -> bool:
    """Return True if the loader that starts a node's agent over SSH is older than the bundled one."""
    reported = node.agent_info.get("loader_version")  # older agents do not report it
    return node.transport == NodeTransport.SSH.value and reported is not None and reported < loader_version()


@functools.lru_cache(maxsize=2)
def _digest(path: Path, mtime_ns: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
