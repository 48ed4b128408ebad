"""Writes the audit row of an action, in the transaction of the action."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from django.db import transaction

from portal.models import AuditEntry, User

request_address: ContextVar[str | None] = ContextVar("request_address", default=None)
"""Client address of the present request, set by the middleware; None in the scheduler and in commands."""


_NAMES: Mapping[str, Callable[[Any], str]] = {
    "AgentRollout": lambda row: f"of {row.started_at:%Y-%m-%d %H:%M} UTC",
    "Announcement": lambda row: row.message,
    "DataSetVersion": lambda row: f"{row.data_set.name} {row.label}",
    "FailedCycle": lambda row: f"of {row.first_at:%Y-%m-%d %H:%M} UTC",
    "FailureRule": lambda row: row.title or row.code,
    "Gpu": lambda row: f"GPU {row.index} of {row.node.name}",
    "GpuAlert": lambda row: f"{row.kind} of {row.gpu.node.name}",
    "IdleExemption": lambda row: row.job.name,
    "InvalidRow": lambda row: f"{row.kind} {row.row}, {row.field}",
    "Invitation": lambda row: row.full_name or row.email or f"by {row.created_by.username}",
    "NodeOperation": lambda row: f"{row.kind} of {row.node.name}",
    "NoticeWebhook": lambda row: row.label or row.host,
    "PipelinePlan": lambda row: row.profile.name,
    "Quota": lambda row: f"{row.project.name} in {row.pool.name}",
    "QuotaAddition": lambda row: f"{row.quota.project.name} in {row.quota.pool.name}",
    "RegistryLogin": lambda row: row.host,
    "UserRequest": lambda row: f"{row.kind} for {row.requested_by.username}",
    "WorkspaceShare": lambda row: f"{row.job.name} with {row.user.username}",
}
"""Names of rows without a name of their own, by class."""


def name_of(obj: Any) -> str:
    """Return the name by which people know a row. Raise TypeError for a class without one; add it to _NAMES."""
    kind = obj.__class__.__name__
    if kind in _NAMES:
        return _NAMES[kind](obj)
    name = getattr(obj, "name", None) or getattr(obj, "username", None)
    if name is None:
        raise TypeError(f"an audit row about a {kind} needs its name")
    return str(name)


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
        object_name=name_of(obj)[:200],
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
