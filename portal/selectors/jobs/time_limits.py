"""Reads when time limits end running jobs, how far they may be extended, and extension requests."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db.models import DurationField, ExpressionWrapper, F, QuerySet, Sum

from portal.domain.requests.user_requests import RequestState
from portal.domain.states import LIVE_ATTEMPT_STATES, AttemptState
from portal.models import Attempt, Job, UserRequest

TIME_LIMIT = ExpressionWrapper(F("job__time_limit_s") * dt.timedelta(seconds=1), output_field=DurationField())
"""The time limit of an attempt's job as a duration."""
MAX_EXTENSIONS_SHOWN = 20
"""Maximum number of requests of a job that are listed, newest first."""


def attempts_with_limit() -> QuerySet[Any]:
    """Return the attempts that run with a time limit and are not stopping, with ``ends_at``."""
    return Attempt.objects.filter(
        state=AttemptState.RUNNING.value,
        stop_requested_at__isnull=True,
        running_at__isnull=False,
        job__time_limit_s__isnull=False,
    ).annotate(ends_at=F("running_at") + TIME_LIMIT)


def ends_at(job: Job, attempt: Attempt | None) -> dt.datetime | None:
    """Return when the time limit ends a job, or None without a limit or a running attempt."""
    if attempt is None or attempt.running_at is None or not job.time_limit_s:
        return None
    if AttemptState(attempt.state) not in LIVE_ATTEMPT_STATES:
        return None
    return attempt.running_at + dt.timedelta(seconds=job.time_limit_s)


def warning_lead_s(limit_s: int, warning_s: float) -> float:
    """Return how long before its end a job is warned: the setting, but at most half of its limit."""
    return min(warning_s, limit_s / 2)


def extension_allowance_s(job: Job, max_s: float) -> int:
    """Return how far users may still extend a job's limit; ``max_s`` is the setting ``max_extension_s``."""
    granted = UserRequest.objects.filter(job=job, state=RequestState.APPROVED.value).aggregate(
        all=Sum("extra_s")
    )
    return max(0, int(max_s) - (granted["all"] or 0))


def job_extensions(job: Job) -> list[UserRequest]:
    """Return the newest extension requests of a job, newest first."""
    return list(
        UserRequest.objects.filter(job=job).select_related(
            "attempt", "requested_by", "decided_by", "job__project"
        )[:MAX_EXTENSIONS_SHOWN]
    )
