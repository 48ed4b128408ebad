"""How an attempt ends for each reason, and after which of them its job waits again."""

from __future__ import annotations

from collections.abc import Sequence

from portal.words.reasons import EndReason
from portal.words.states import AttemptState

RETRIED = frozenset(
    {
        EndReason.NODE_REBOOTED,
        EndReason.NODE_FENCED,
        EndReason.CONTAINER_VANISHED,
        EndReason.GPU_LOST,
        EndReason.GPU_SHARING_LOST,
        EndReason.START_REFUSED,
        EndReason.IMAGE_MISSING,
        EndReason.DISK_FULL,
        EndReason.NODES_APART,
    }
)
"""Ends of the cluster's making: the job waits again until its tries are used up."""

OWN_FAILURES = frozenset(
    {
        EndReason.EXIT_CODE,
        EndReason.OUT_OF_MEMORY,
        EndReason.GPU_SHARE_EXCEEDED,
        EndReason.DISK_LIMIT_EXCEEDED,
    }
)
"""Ends of the command's own making: such a job waits again only if it asked for that."""

END_STATES: dict[EndReason, AttemptState] = {
    EndReason.FINISHED: AttemptState.COMPLETED,
    EndReason.EXIT_CODE: AttemptState.FAILED,
    EndReason.CANCELLED_BY_USER: AttemptState.CANCELLED,
    EndReason.CANCELLED_BY_ADMIN: AttemptState.CANCELLED,
    EndReason.TIME_LIMIT: AttemptState.TIMEOUT,
    EndReason.OUT_OF_MEMORY: AttemptState.OUT_OF_MEMORY,
    EndReason.NODE_REBOOTED: AttemptState.NODE_FAIL,
    EndReason.NODE_FENCED: AttemptState.NODE_FAIL,
    EndReason.CONTAINER_VANISHED: AttemptState.NODE_FAIL,
    EndReason.GPU_LOST: AttemptState.FAILED,
    EndReason.START_REFUSED: AttemptState.FAILED,
    EndReason.IMAGE_MISSING: AttemptState.FAILED,
    EndReason.DISK_FULL: AttemptState.FAILED,
    EndReason.DISK_LIMIT_EXCEEDED: AttemptState.FAILED,
    EndReason.PREEMPTED: AttemptState.PREEMPTED,
    EndReason.RECLAIMED: AttemptState.PREEMPTED,
    EndReason.CONSOLIDATED: AttemptState.PREEMPTED,
    EndReason.SUSPENDED: AttemptState.SUSPENDED,
    EndReason.NEVER_READY: AttemptState.FAILED,
    EndReason.STALE_GANG: AttemptState.FAILED,
    EndReason.DEPENDENCY_FAILED: AttemptState.CANCELLED,
    EndReason.GPU_SHARE_EXCEEDED: AttemptState.FAILED,
    EndReason.GPU_SHARING_LOST: AttemptState.FAILED,
    EndReason.NODES_APART: AttemptState.NODE_FAIL,
    EndReason.OWNER_NOT_PERMITTED: AttemptState.CANCELLED,
}

FIRST_PAUSE_S, LAST_PAUSE_S = 10.0, 300.0


def pause_s(failures: int) -> float:
    """How long what failed so often waits before it is tried again: 10, 20, 40 ... s, at most 5 minutes."""
    return min(FIRST_PAUSE_S * 2.0 ** min(max(0, failures - 1), 16), LAST_PAUSE_S)


UNCHARGED = 10
"""So many attempts that ended because nodes did not reach each other cost a job none of its tries."""


def tries_used(ended: Sequence[tuple[str, str]]) -> int:
    """How many of a job's attempts, by state and reason, count against its ``max_attempts``.

    Not those that gave their GPUs back for others, nor the first that no rank of began, since nodes were apart.
    """
    apart = sum(reason == EndReason.NODES_APART for _, reason in ended)
    left = (AttemptState.PREEMPTED, AttemptState.SUSPENDED)
    uncounted = (EndReason.NODES_APART, EndReason.OWNER_NOT_PERMITTED)
    others = sum(state not in left and reason not in uncounted for state, reason in ended)
    return others + max(0, apart - UNCHARGED)


GIVEN_BACK = frozenset(
    {EndReason.PREEMPTED, EndReason.RECLAIMED, EndReason.CONSOLIDATED, EndReason.OWNER_NOT_PERMITTED}
)

NO_FAULT = GIVEN_BACK | {
    EndReason.NODE_REBOOTED,
    EndReason.NODE_FENCED,
    EndReason.GPU_LOST,
    EndReason.GPU_SHARING_LOST,
    EndReason.NODES_APART,
}
"""Ends of tasks that say nothing of the task: they are not counted among its job's failures."""
