"""The queue age of a job: its submit time, shifted later by the size of its request.

Within a project, priority and user, jobs are ordered by ``submitted + A x GPUs + P x predicted duration``,
with A = ``size_penalty_s_per_gpu`` (seconds per GPU) and P = ``predicted_duration_weight``. The shift is
constant, so a job is passed only by jobs submitted within its shift, and none starves.
"""

from __future__ import annotations

from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import WHOLE_MILLI, PendingRow, RunningRow


def effective_submit_s(row: PendingRow, policy: Policy) -> float:
    """Return the time that orders ``row`` in the queue, in seconds since the epoch; smaller goes first."""
    shift_s = policy.size_penalty_s_per_gpu * row.total_milli / WHOLE_MILLI
    if row.predicted_duration_s is not None:
        shift_s += policy.predicted_duration_weight * row.predicted_duration_s
    return row.submitted_s + shift_s


def ends_soon(row: RunningRow, now_s: float, policy: Policy) -> bool:
    """Return True if the predicted end is so near that the job is not evicted."""
    return (
        row.predicted_end_s is not None and 0.0 <= row.predicted_end_s - now_s < policy.near_end_protection_s
    )
