"""Where a job stands in time among its equals: its submit, moved later by what it asks for.

Within a project, priority and person, jobs go by ``submitted + A x GPUs + P x predicted``: with A
(``size_penalty_s_per_gpu``) a job of one GPU more stands as if submitted A seconds later, with P
(``predicted_duration_weight``) as if submitted later by P times the time it is expected to run. Nobody is starved by it:
the shift is fixed, so every job is passed only by those submitted within its shift.
"""

from __future__ import annotations

from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import WHOLE_MILLI, PendingRow, RunningRow


def effective_submit_s(row: PendingRow, policy: Policy) -> float:
    """The time by which ``row`` is ordered, in seconds since the epoch; smaller goes first."""
    shift_s = policy.size_penalty_s_per_gpu * row.total_milli / WHOLE_MILLI
    if row.predicted_duration_s is not None:
        shift_s += policy.predicted_duration_weight * row.predicted_duration_s
    return row.submitted_s + shift_s


def ends_soon(row: RunningRow, now_s: float, policy: Policy) -> bool:
    """True when a job is expected to end so soon that it is left to: it is not asked to leave."""
    return (
        row.predicted_end_s is not None and 0.0 <= row.predicted_end_s - now_s < policy.near_end_protection_s
    )
