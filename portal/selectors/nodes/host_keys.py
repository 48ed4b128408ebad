"""Where SSH reaches a node and with which confirmed host key, and the confirmations of new keys."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from agents.keys import fingerprint
from agents.ssh import SshTarget
from portal.models import HostKeyChange, Node, User

CHANGES_SHOWN = 50


@dataclass(frozen=True)
class HostKeyChangeView:
    """A confirmation as pages and REST show it."""

    old_type: str
    old_fingerprint: str
    new_type: str
    new_fingerprint: str
    actor: User | None
    reason: str
    changed_at: dt.datetime


def ssh_target(node: Node) -> SshTarget:
    """Return the address, the account and the confirmed host key of a node over SSH."""
    return SshTarget(node.host, node.ssh_user, node.host_key, node.port)


def list_host_key_changes(node: Node) -> list[HostKeyChangeView]:
    """Return the latest confirmations of new host keys, newest first."""
    rows = node.host_key_changes.select_related("actor")[:CHANGES_SHOWN]
    return [_view(row) for row in rows]


def _view(row: HostKeyChange) -> HostKeyChangeView:
    return HostKeyChangeView(
        row.old_key.split()[0],
        fingerprint(row.old_key),
        row.new_key.split()[0],
        fingerprint(row.new_key),
        row.actor,
        row.reason,
        row.changed_at,
    )
