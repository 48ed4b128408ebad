"""The phases of a job's attempts, from their rows."""

from __future__ import annotations

from django.utils import timezone

from portal.domain.jobs.phases import PhaseSpan, PhaseTimes, phase_spans
from portal.domain.states import JobKind
from portal.models import Attempt, Job


def run_time_s(attempt: Attempt) -> float | None:
    """Return how long the programs of an attempt ran, until now if they still do; None if they never did.

    Time in the queue, pulls and starts do not count.
    """
    if attempt.running_at is None:
        return None
    return max(0.0, ((attempt.ended_at or timezone.now()) - attempt.running_at).total_seconds())


def attempt_phases(attempt: Attempt) -> list[PhaseSpan]:
    """Return the phases of an attempt; its job must be joined."""
    job = attempt.job
    return phase_spans(
        PhaseTimes(
            queued_at=attempt.queued_at or attempt.created_at,
            placed_at=attempt.created_at,
            sent_at=attempt.start_sent_at,
            pull_started_at=attempt.image_pull_started_at,
            pulled_at=attempt.image_pulled_at,
            running_at=attempt.running_at,
            code_ready_at=attempt.code_ready_at,
            ready_at=attempt.ready_at,
            ended_at=attempt.ended_at,
            has_code=bool(job.code_repository),
            has_server=job.kind != JobKind.TRAINING.value,
        )
    )


def pending_phases(job: Job) -> list[PhaseSpan]:
    """Return the phases of a job that waits, or that ended without an attempt."""
    ended_at = job.ended_at
    has_code, has_server = bool(job.code_repository), job.kind != JobKind.TRAINING.value
    return phase_spans(
        PhaseTimes(job.pending_since, ended_at=ended_at, has_code=has_code, has_server=has_server)
    )
