"""Leases as rows with epochs: the right to schedule (``leader``) or to send commands to a node.

Times are the database's. A new holder gets an epoch above all earlier ones, so one number fences commits and
commands: those with a lower epoch are refused. Epochs come only from the database, never from a node.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from django.db import connection, transaction

from portal.models import Lease

LEADER = "leader"
LEADER_TTL_S = 8.0
NODE_TTL_S = 15.0


class LeaseLostError(Exception):
    """Another holder has the lease; this process must stop writing."""


@dataclass(frozen=True)
class HeldLease:
    """A lease that this process held when it last asked the database."""

    name: str
    holder: str
    epoch: int


def new_holder() -> str:
    """Return a holder name that is unique across processes and restarts."""
    return f"{socket.gethostname()[:60]}:{os.getpid()}:{secrets.token_hex(4)}"


def node_lease(node: str) -> str:
    """Return the name of the lease for commands to a node (public id)."""
    return f"node:{node}"


def acquire(name: str, holder: str, ttl_s: float) -> HeldLease | None:
    """Acquire or renew a lease; return None while another holder has it.

    A lease that ends later than any can was granted before the clock was set back. Its holder, which may have
    ended, gets the usual time from now on.
    """
    renewed = renew([name], holder, ttl_s)
    if renewed:
        return renewed[0]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [Lease.EPOCH_LOCK])
        cursor.execute(
            "UPDATE portal_lease SET expires_at = clock_timestamp() + make_interval(secs => %(ttl)s)"
            " WHERE name = %(name)s AND expires_at > clock_timestamp() + make_interval(secs => %(ttl)s)",
            {"name": name, "ttl": ttl_s},
        )
        cursor.execute(
            """
            INSERT INTO portal_lease AS lease (name, holder, epoch, expires_at)
            VALUES (%(name)s, %(holder)s, (SELECT coalesce(max(epoch), 0) + 1 FROM portal_lease),
                    clock_timestamp() + make_interval(secs => %(ttl)s))
            ON CONFLICT (name) DO UPDATE
               SET holder = excluded.holder, epoch = excluded.epoch, expires_at = excluded.expires_at
             WHERE lease.expires_at < clock_timestamp()
            RETURNING epoch
            """,
            {"name": name, "holder": holder, "ttl": ttl_s},
        )
        row = cursor.fetchone()
    return HeldLease(name, holder, row[0]) if row else None


def renew(names: Sequence[str], holder: str, ttl_s: float) -> list[HeldLease]:
    """Extend and return those of the leases that this holder still has.

    An expired lease that no one else acquired is still held.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE portal_lease SET expires_at = clock_timestamp() + make_interval(secs => %s)"
            " WHERE name = ANY(%s) AND holder = %s RETURNING name, epoch",
            [ttl_s, list(names), holder],
        )
        return [HeldLease(name, holder, epoch) for name, epoch in cursor.fetchall()]


def release(names: Sequence[str], holder: str) -> None:
    """Expire leases of this holder at once, so that the next holder need not wait. Epochs are kept."""
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE portal_lease SET expires_at = to_timestamp(0) WHERE name = ANY(%s) AND holder = %s",
            [list(names), holder],
        )


def check(lease: HeldLease) -> None:
    """Raise LeaseLostError unless the lease is held; it cannot change before this transaction ends (I8)."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT holder, epoch FROM portal_lease WHERE name = %s FOR SHARE", [lease.name])
        row = cursor.fetchone()
    if row != (lease.holder, lease.epoch):
        raise LeaseLostError(f"The lease {lease.name} is now held by {row[0] if row else 'nobody'}.")


def command_epoch(lease: HeldLease) -> int:
    """Return the epoch for commands to the node of this lease: the higher of the leader's and the lease's.

    Raise LeaseLostError when the lease is not held any more.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT name, holder, epoch FROM portal_lease WHERE name = ANY(%s)", [[LEADER, lease.name]]
        )
        rows = {name: (holder, epoch) for name, holder, epoch in cursor.fetchall()}
    if rows.get(lease.name) != (lease.holder, lease.epoch):
        raise LeaseLostError(f"The lease {lease.name} is now held by another worker.")
    return max(int(epoch) for _, epoch in rows.values())
