"""The final state of an attempt for each end reason, and the reasons after which its job is requeued."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import AttemptState


class FailureClass(StrEnum):
    """A group of end reasons after which a job can be retried."""

    NODE_FAILURE = "node_failure"
    OUT_OF_MEMORY = "out_of_memory"
    COMMAND_FAILURE = "command_failure"
    DISK_LIMIT = "disk_limit"
    TIME_LIMIT = "time_limit"
    STALL = "stall"


FAILURE_CLASSES: dict[EndReason, FailureClass] = {
    EndReason.NODE_REBOOTED: FailureClass.NODE_FAILURE,
    EndReason.NODE_FENCED: FailureClass.NODE_FAILURE,
    EndReason.CONTAINER_LOST: FailureClass.NODE_FAILURE,
    EndReason.GPU_LOST: FailureClass.NODE_FAILURE,
    EndReason.MPS_DAEMON_LOST: FailureClass.NODE_FAILURE,
    EndReason.START_REFUSED: FailureClass.NODE_FAILURE,
    EndReason.IMAGE_MISSING: FailureClass.NODE_FAILURE,
    EndReason.DISK_FULL: FailureClass.NODE_FAILURE,
    EndReason.RENDEZVOUS_UNREACHABLE: FailureClass.NODE_FAILURE,
    EndReason.CLOCK_SKEW: FailureClass.NODE_FAILURE,
    EndReason.CODE_CHANGED: FailureClass.NODE_FAILURE,
    EndReason.OUT_OF_MEMORY: FailureClass.OUT_OF_MEMORY,
    EndReason.GPU_MEMORY_LIMIT_EXCEEDED: FailureClass.OUT_OF_MEMORY,
    EndReason.EXIT_CODE: FailureClass.COMMAND_FAILURE,
    EndReason.DISK_LIMIT_EXCEEDED: FailureClass.DISK_LIMIT,
    EndReason.TIME_LIMIT: FailureClass.TIME_LIMIT,
    EndReason.STALLED: FailureClass.STALL,
}

BACKOFF_REASONS = frozenset(FAILURE_CLASSES) - {
    EndReason.NODE_REBOOTED,
    EndReason.NODE_FENCED,
    EndReason.CONTAINER_LOST,
    EndReason.GPU_LOST,
    EndReason.MPS_DAEMON_LOST,
}
"""Ends that may repeat at once on other nodes, so that the next attempt waits first."""


def is_retried(
    reason: EndReason, exit_code: int | None, classes: Collection[str], exit_codes: Collection[int]
) -> bool:
    """Return True if a job with these failure classes is pending again after such an end.

    ``exit_codes`` limits failures of the command; empty: any code.
    """
    if FAILURE_CLASSES.get(reason) not in classes:
        return False
    return reason is not EndReason.EXIT_CODE or not exit_codes or exit_code in exit_codes


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


def backoff_s(failures: int, base_s: float = 10.0, max_s: float = 300.0) -> float:
    """Return the delay before the next retry: 10, 20, 40 ... s, at most 300, for the default base."""
    return min(base_s * 2.0 ** min(max(0, failures - 1), 16), max_s)


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
    EndReason.CODE_CHANGED,
}
"""Ends that a task did not cause; they do not count as failures of its job."""
