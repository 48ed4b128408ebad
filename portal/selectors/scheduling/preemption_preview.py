"""Reads which jobs would be preempted for a request; jobs that the user may not see are not named."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from portal.access import Requester, visible_jobs
from portal.models import Job


@dataclass(frozen=True)
class PreemptionCandidate:
    """A running job that would be preempted, with GPU milli and GPU-seconds lost.

    ``job`` is None if the reader may not see it. ``checkpoint_at`` is None if it has reported no checkpoint.
    """

    job: Job | None
    reason: str
    milli: int
    lost_gpu_seconds: float
    checkpoint_at: dt.datetime | None


def preemption_candidates(
    requester: Requester, victims: Sequence[dict[str, Any]]
) -> list[PreemptionCandidate]:
    """Return the victims of the scheduler's answer, in its order, in at most three queries."""
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
            float(victim["lost_gpu_seconds"]),
            _from_unix(victim.get("saved_s")),
        )
        for victim in victims
    ]


def _from_unix(seconds: float | None) -> dt.datetime | None:
    return None if seconds is None else dt.datetime.fromtimestamp(seconds, dt.UTC)


def total_lost_gpu_seconds(candidates: Sequence[PreemptionCandidate]) -> float:
    return sum(one.lost_gpu_seconds for one in candidates)
