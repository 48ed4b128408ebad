"""Reads when time limits end running jobs, what may be added to them, and who asked for more time."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

from django.db.models import DurationField, ExpressionWrapper, F, QuerySet, Sum

from portal.access import Requester, visible_extensions
from portal.domain.states import LIVE_ATTEMPT_STATES, AttemptState
from portal.errors import NotFound
from portal.models import Attempt, Job, TimeLimitExtension

TIME_LIMIT = ExpressionWrapper(F("job__time_limit_s") * dt.timedelta(seconds=1), output_field=DurationField())
"""The time limit of an attempt's job as a span."""
MAX_EXTENSIONS_SHOWN = 20
"""At most so many requests of a job are listed, the newest."""


def attempts_with_limit() -> QuerySet[Any]:
    """The attempts that run against a time limit and were not asked to stop, with ``ends_at``."""
    return Attempt.objects.filter(
        state=AttemptState.RUNNING.value,
        stop_requested_at__isnull=True,
        running_at__isnull=False,
        job__time_limit_s__isnull=False,
    ).annotate(ends_at=F("running_at") + TIME_LIMIT)


def ends_at(job: Job, attempt: Attempt | None) -> dt.datetime | None:
    """When its time limit ends a job; None without a limit, and for what does not run."""
    if attempt is None or attempt.running_at is None or not job.time_limit_s:
        return None
    if AttemptState(attempt.state) not in LIVE_ATTEMPT_STATES:
        return None
    return attempt.running_at + dt.timedelta(seconds=job.time_limit_s)


def warning_lead_s(limit_s: int, warning_s: float) -> float:
    """How long before its end a job with this limit is warned: the knob, but at most half of the limit."""
    return min(warning_s, limit_s / 2)


@dataclass(frozen=True)
class ExtensionAllowance:
    """What may be added to a job's limit: by its people, in seconds, of so many in all."""

    remaining_s: int
    max_s: int


def extension_allowance(job: Job, max_s: float) -> ExtensionAllowance:
    """How much its people may still add to the limit of a job; ``most_s`` is the knob ``max_extension_s``."""
    granted = (
        TimeLimitExtension.objects.filter(job=job, state="granted").aggregate(all=Sum("extra_s"))["all"] or 0
    )
    return ExtensionAllowance(max(0, int(max_s) - granted), int(max_s))


def job_extensions(job: Job) -> list[TimeLimitExtension]:
    """The newest requests for more time of a job, newest first."""
    return list(
        TimeLimitExtension.objects.filter(job=job).select_related(
            "attempt", "requested_by", "decided_by", "job__project"
        )[:MAX_EXTENSIONS_SHOWN]
    )


def list_extensions(
    requester: Requester, *, pending_only: bool | None = None
) -> QuerySet[TimeLimitExtension]:
    """The requests that a person may see, newest first; ``waiting``: those that nobody has decided on yet."""
    rows = visible_extensions(requester).select_related(
        "job__project", "job__owner", "attempt", "requested_by", "decided_by"
    )
    if pending_only is not None:
        rows = rows.filter(state="waiting") if pending_only else rows.exclude(state="waiting")
    return rows.order_by("-id")


def get_extension(requester: Requester, public_id: str) -> TimeLimitExtension:
    """The request, when the person may see it; NotThere otherwise."""
    row = list_extensions(requester).filter(public_id=public_id).first()
    if row is None:
        raise NotFound("There is no such request.")
    return row
