"""Reads who would be asked to leave for a request, by name only for those who may see it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from portal.access import Person, visible_jobs
from portal.models import Job


@dataclass(frozen=True)
class Leaving:
    """A running job that would leave; ``job`` None: the reader may not see it. Milli of a GPU, GPU-seconds.

    ``saved_at`` None: it has not said that it saved its work.
    """

    job: Job | None
    reason: str
    milli: int
    lost_gpu_s: float
    saved_at: dt.datetime | None


def leaving_of(person: Person, victims: Sequence[dict[str, Any]]) -> list[Leaving]:
    """The victims of the engine's answer, in its order; a query or three, whatever their number."""
    if not victims:
        return []
    ids = [victim["job"] for victim in victims]
    seen = {
        job.public_id: job for job in visible_jobs(person).filter(public_id__in=ids).select_related("project")
    }
    return [
        Leaving(
            seen.get(victim["job"]),
            str(victim["reason"]),
            int(victim["milli"]),
            float(victim["lost_gpu_s"]),
            _at(victim.get("saved_s")),
        )
        for victim in victims
    ]


def _at(seconds: float | None) -> dt.datetime | None:
    return None if seconds is None else dt.datetime.fromtimestamp(seconds, dt.UTC)


def lost_gpu_s(leaving: Sequence[Leaving]) -> float:
    """The work that they would lose together, GPU-seconds."""
    return sum(one.lost_gpu_s for one in leaving)
