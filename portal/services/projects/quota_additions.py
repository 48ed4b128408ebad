"""Temporary additions to quotas. The scheduler reads them by time, so that they begin and end by themselves."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db import transaction
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import require_admin
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, InvalidRequest
from portal.live_events import publish_on_commit
from portal.models import NodePool, Project, Quota, QuotaAddition, User, UserRequest
from portal.outbox import trigger_cycle
from portal.services.audit import record_action
from portal.services.projects.projects import MAX_MILLI, QuotaValues, do_change_quota, notify_of_quota

MAX_ADDITION = dt.timedelta(days=366)
BATCH_SIZE = 500
"""Maximum number of ends that one pass records."""


def do_add_quota(
    actor: User,
    project: Project,
    pool: NodePool,
    *,
    extra_milli: int,
    ends_at: dt.datetime,
    starts_at: dt.datetime | None = None,
    reason: str = "",
    request: UserRequest | None = None,
) -> QuotaAddition:
    """Add GPUs to a quota between two times; without ``starts_at`` from now on.

    Raise Conflict if the project has subprojects and no quota in the pool: the guarantee of such a project is
    the sum of theirs until its own quota is set.
    """
    require_admin(actor, "change quotas")
    check_addition(extra_milli, starts_at, ends_at)
    with transaction.atomic():
        if not Quota.objects.filter(project=project, pool=pool).exists():
            if project.children.exists():
                raise Conflict(
                    _("{name} has subprojects and no quota in {pool_name}; set its quota first.").format(
                        name=project.name, pool_name=pool.name
                    ),
                    code="no_quota",
                )
            do_change_quota(actor, project, pool, QuotaValues(), version=0, reason=reason)
        quota = Quota.objects.select_for_update(no_key=True).get(project=project, pool=pool)
        row = QuotaAddition.objects.create(
            quota=quota,
            extra_milli=extra_milli,
            starts_at=starts_at or timezone.now(),
            ends_at=ends_at,
            reason=reason[:500],
            created_by=actor,
            request=request,
        )
        _record(actor, "quota.addition", row, reason)
    return row


def do_end_quota_addition(actor: User, addition: QuotaAddition, *, reason: str = "") -> QuotaAddition:
    """End an addition now, or cancel it before its start. Raise Conflict if it has ended."""
    require_admin(actor, "change quotas")
    with transaction.atomic():
        Quota.objects.select_for_update(no_key=True).get(pk=addition.quota_id)
        rows = QuotaAddition.objects.filter(pk=addition.pk, ended_at__isnull=True, ends_at__gt=Now())
        if not rows.update(ended_at=Now(), ended_by=actor):
            raise Conflict(_("It has already ended."), code="addition_ended")
        addition.refresh_from_db()
        _record(actor, "quota.addition_end", addition, reason)
    return addition


def record_ended_additions() -> int:
    """Record additions that have reached their end, with audit row and event; return how many."""
    due = QuotaAddition.objects.filter(ended_at__isnull=True, ends_at__lte=Now())
    return sum(_record_end(pk) for pk in due.order_by("ends_at").values_list("pk", flat=True)[:BATCH_SIZE])


def _record_end(pk: int) -> bool:
    with transaction.atomic():
        row = QuotaAddition.objects.select_for_update(no_key=True, of=("self",)).filter(
            pk=pk, ended_at__isnull=True
        ).select_related("quota__project", "quota__pool").first()  # fmt: skip
        if row is None:
            return False
        row.ended_at = row.ends_at
        row.save(update_fields=["ended_at"])
        _record(None, "quota.addition_end", row, stored_text("It has reached its end."))
    return True


def check_addition(extra_milli: int, starts_at: dt.datetime | None, ends_at: dt.datetime | None) -> None:
    """Raise InvalidRequest by field for an impossible amount or period."""
    wrong: dict[str, str] = {}
    now = timezone.now()
    if not 1 <= extra_milli <= MAX_MILLI:
        wrong["extra_milli"] = _("Must be more than 0 and at most 10,000 GPUs.")
    if starts_at is not None and ends_at is None:
        wrong["ends_at"] = _("Quota with a start needs an end.")
    if ends_at is not None:
        first = max(starts_at or now, now)
        if ends_at <= first:
            wrong["ends_at"] = _("Must be in the future and after the start.")
        elif ends_at > now + MAX_ADDITION:
            wrong["ends_at"] = _("Must be within a year.")
    if wrong:
        raise InvalidRequest(fields=wrong)


def _record(actor: User | None, action: str, row: QuotaAddition, reason: str) -> None:
    """Write the audit row of the quota and publish the change."""
    quota = row.quota
    values: dict[str, Any] = {
        "project": quota.project.name,
        "pool": quota.pool.name,
        "extra_milli": row.extra_milli,
        "starts_at": row.starts_at.isoformat(),
        "ends_at": row.ends_at.isoformat(),
    }
    ended = row.ended_at is not None
    record_action(
        actor, action, quota, before=values if ended else None, after=None if ended else values, reason=reason
    )
    amount = f"{row.extra_milli / 1000:g} GPUs"
    message = stored_text(
        f"The additional {amount} ended." if ended else f"{amount} more from {{start}} until {{end}}."
    )
    notify_of_quota(actor, quota, f"{message} {reason}".strip(), {"start": row.starts_at, "end": row.ends_at})
    data = {"kind": "quota", "project": quota.project.public_id, "pool": quota.pool.public_id}
    publish_on_commit("cluster", data)
    trigger_cycle("quota")
