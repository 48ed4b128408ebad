"""Reads when time limits end running jobs, what may be added to them, and who asked for more time."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

from django.db.models import DurationField, ExpressionWrapper, F, QuerySet, Sum

from portal.access import Person, visible_extensions
from portal.errors import NotThere
from portal.models import Attempt, Extension, Job
from portal.words.states import ATTEMPT_LIVE, AttemptState

LIMIT = ExpressionWrapper(F("job__time_limit_s") * dt.timedelta(seconds=1), output_field=DurationField())
"""The time limit of an attempt's job as a span."""
SHOWN = 20
"""At most so many requests of a job are listed, the newest."""


def limited() -> QuerySet[Any]:
    """The attempts that run against a time limit and were not asked to stop, with ``ends_at``."""
    return Attempt.objects.filter(
        state=AttemptState.RUNNING.value,
        stop_wanted_at__isnull=True,
        running_at__isnull=False,
        job__time_limit_s__isnull=False,
    ).annotate(ends_at=F("running_at") + LIMIT)


def ends_at(job: Job, attempt: Attempt | None) -> dt.datetime | None:
    """When its time limit ends a job; None without a limit, and for what does not run."""
    if attempt is None or attempt.running_at is None or not job.time_limit_s:
        return None
    if AttemptState(attempt.state) not in ATTEMPT_LIVE:
        return None
    return attempt.running_at + dt.timedelta(seconds=job.time_limit_s)


def warned_for_s(limit_s: int, warn_before_s: float) -> float:
    """How long before its end a job with this limit is warned: the knob, but at most half of the limit."""
    return min(warn_before_s, limit_s / 2)


@dataclass(frozen=True)
class Room:
    """What may be added to a job's limit: by its people, in seconds, of so many in all."""

    left_s: int
    most_s: int


def room_of(job: Job, most_s: float) -> Room:
    """How much its people may still add to the limit of a job; ``most_s`` is the knob ``extend_most_s``."""
    granted = Extension.objects.filter(job=job, state="granted").aggregate(all=Sum("more_s"))["all"] or 0
    return Room(max(0, int(most_s) - granted), int(most_s))


def extensions_of(job: Job) -> list[Extension]:
    """The newest requests for more time of a job, newest first."""
    return list(
        Extension.objects.filter(job=job).select_related("attempt", "asked_by", "decided_by", "job__project")[
            :SHOWN
        ]
    )


def extensions_for(person: Person, *, waiting: bool | None = None) -> QuerySet[Extension]:
    """The requests that a person may see, newest first; ``waiting``: those that nobody has decided on yet."""
    rows = visible_extensions(person).select_related(
        "job__project", "job__owner", "attempt", "asked_by", "decided_by"
    )
    if waiting is not None:
        rows = rows.filter(state="waiting") if waiting else rows.exclude(state="waiting")
    return rows.order_by("-id")


def extension_for(person: Person, public_id: str) -> Extension:
    """The request, when the person may see it; NotThere otherwise."""
    row = extensions_for(person).filter(public_id=public_id).first()
    if row is None:
        raise NotThere("There is no such request.")
    return row
