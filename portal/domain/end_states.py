"""The final state of an attempt for each end reason, and the reasons after which its job is requeued."""

from __future__ import annotations

from collections.abc import Sequence

from portal.domain.reasons import EndReason
from portal.domain.states import AttemptState

RETRYABLE_REASONS = frozenset(
    {
        EndReason.NODE_REBOOTED,
        EndReason.NODE_FENCED,
        EndReason.CONTAINER_LOST,
        EndReason.GPU_LOST,
        EndReason.MPS_DAEMON_LOST,
        EndReason.START_REFUSED,
        EndReason.IMAGE_MISSING,
        EndReason.DISK_FULL,
        EndReason.RENDEZVOUS_UNREACHABLE,
        EndReason.CLOCK_SKEW,
    }
)
"""Failures of the cluster: the job is requeued until its attempts are used up."""

APPLICATION_FAILURES = frozenset(
    {
        EndReason.EXIT_CODE,
        EndReason.OUT_OF_MEMORY,
        EndReason.GPU_MEMORY_LIMIT_EXCEEDED,
        EndReason.DISK_LIMIT_EXCEEDED,
    }
)
"""Failures of the program: the job is requeued only if it requested that."""

END_STATES: dict[EndReason, AttemptState] = dict.fromkeys(EndReason, AttemptState.FAILED) | {
    EndReason.COMPLETED: AttemptState.COMPLETED,
    EndReason.CANCELLED_BY_USER: AttemptState.CANCELLED,
    EndReason.CANCELLED_BY_ADMIN: AttemptState.CANCELLED,
    EndReason.TIME_LIMIT: AttemptState.TIMEOUT,
    EndReason.OUT_OF_MEMORY: AttemptState.OUT_OF_MEMORY,
    EndReason.NODE_REBOOTED: AttemptState.NODE_FAIL,
    EndReason.NODE_FENCED: AttemptState.NODE_FAIL,
    EndReason.CONTAINER_LOST: AttemptState.NODE_FAIL,
    EndReason.PREEMPTED: AttemptState.PREEMPTED,
    EndReason.RECLAIMED: AttemptState.PREEMPTED,
    EndReason.MIGRATED: AttemptState.PREEMPTED,
    EndReason.SUSPENDED: AttemptState.SUSPENDED,
    EndReason.DEPENDENCY_FAILED: AttemptState.CANCELLED,
    EndReason.RENDEZVOUS_UNREACHABLE: AttemptState.NODE_FAIL,
    EndReason.CLOCK_SKEW: AttemptState.NODE_FAIL,
    EndReason.OWNER_NOT_PERMITTED: AttemptState.CANCELLED,
    EndReason.PRUNED: AttemptState.CANCELLED,
}

MIN_BACKOFF_S, MAX_BACKOFF_S = 10.0, 300.0


def backoff_s(failures: int) -> float:
    """Return the delay before the next retry: 10, 20, 40 ... s, at most 300."""
    return min(MIN_BACKOFF_S * 2.0 ** min(max(0, failures - 1), 16), MAX_BACKOFF_S)


FREE_RENDEZVOUS_FAILURES = 10
"""Attempts that may end with RENDEZVOUS_UNREACHABLE before they count against ``max_attempts``."""


def counted_attempts(ended: Sequence[tuple[str, str]]) -> int:
    """Return how many ended attempts, given as (state, reason), count against the job's ``max_attempts``.

    Preempted and suspended attempts do not count, nor do the first ``FREE_RENDEZVOUS_FAILURES`` without a
    rendezvous.
    """
    apart = sum(reason == EndReason.RENDEZVOUS_UNREACHABLE for _, reason in ended)
    left = (AttemptState.PREEMPTED, AttemptState.SUSPENDED)
    uncounted = (EndReason.RENDEZVOUS_UNREACHABLE, EndReason.OWNER_NOT_PERMITTED)
    others = sum(state not in left and reason not in uncounted for state, reason in ended)
    return others + max(0, apart - FREE_RENDEZVOUS_FAILURES)


PREEMPTION_REASONS = frozenset(
    {EndReason.PREEMPTED, EndReason.RECLAIMED, EndReason.MIGRATED, EndReason.OWNER_NOT_PERMITTED}
)

NOT_TASK_FAILURES = PREEMPTION_REASONS | {
    EndReason.NODE_REBOOTED,
    EndReason.NODE_FENCED,
    EndReason.GPU_LOST,
    EndReason.MPS_DAEMON_LOST,
    EndReason.RENDEZVOUS_UNREACHABLE,
    EndReason.CLOCK_SKEW,
}
"""Ends that a task did not cause; they do not count as failures of its job."""
