"""Reads who would be asked to leave for a request, by name only for those who may see it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from portal.access import Requester, visible_jobs
from portal.models import Job


@dataclass(frozen=True)
class PreemptionCandidate:
    """A running job that would leave; ``job`` None: the reader may not see it. Milli of a GPU, GPU-seconds.

    ``saved_at`` None: it has not said that it saved its work.
    """

    job: Job | None
    reason: str
    milli: int
    lost_gpu_seconds: float
    checkpoint_at: dt.datetime | None


def preemption_candidates(
    requester: Requester, victims: Sequence[dict[str, Any]]
) -> list[PreemptionCandidate]:
    """The victims of the engine's answer, in its order; a query or three, whatever their number."""
    if not victims:
        return []
    ids = [victim["job"] for victim in victims]
    seen = {
        job.public_id: job
        for job in visible_jobs(requester).filter(public_id__in=ids).select_related("project")
    }
    return [
        PreemptionCandidate(
            seen.get(victim["job"]),
            str(victim["reason"]),
            int(victim["milli"]),
            float(victim["lost_gpu_s"]),
            _from_unix(victim.get("saved_s")),
        )
        for victim in victims
    ]


def _from_unix(seconds: float | None) -> dt.datetime | None:
    return None if seconds is None else dt.datetime.fromtimestamp(seconds, dt.UTC)


def total_lost_gpu_seconds(candidates: Sequence[PreemptionCandidate]) -> float:
    """The work that they would lose together, GPU-seconds."""
    return sum(one.lost_gpu_seconds for one in candidates)
