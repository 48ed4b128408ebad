"""Writes the audit row of an action, in the transaction of the action."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from django.db import transaction

from portal.models import AuditEntry, User

request_address: ContextVar[str | None] = ContextVar("request_address", default=None)
"""Client address of the present request, set by the middleware; None in the scheduler and in commands."""


def record_action(
    actor: User | None,
    action: str,
    obj: Any,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    reason: str = "",
) -> AuditEntry:
    """Write an audit row about ``obj`` (a model row with a public id). Must run inside a transaction."""
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("an action and its audit row must be in one transaction")
    return AuditEntry.objects.create(
        actor=actor,
        actor_name=actor.username if actor else "fairway",
        action=action,
        object_kind=obj.__class__.__name__.lower(),  # also for a lazy request.user
        object_id=str(getattr(obj, "public_id", obj.pk)),
        object_name=str(getattr(obj, "name", getattr(obj, "username", "")))[:200],
        before=before,
        after=after,
        reason=reason[:500],
        address=request_address.get(),
    )


def record_change(
    actor: User | None,
    action: str,
    obj: Any,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    reason: str,
) -> AuditEntry:
    """As ``record_action``, with only the keys whose value changed; null for an absent value."""
    moved = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
    was, now = ({key: side.get(key) for key in moved} for side in (before, after))
    return record_action(actor, action, obj, before=was, after=now, reason=reason)
