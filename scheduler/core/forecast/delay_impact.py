"""Estimate which pending jobs and reservations a later end of a running job would delay.

The queue is simulated twice, with the job running to either end and all other draws equal, so that the
difference is due to the job. Future submissions are not considered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from scheduler.core.decide import decide
from scheduler.core.forecast.durations import DurationHistory
from scheduler.core.forecast.start_times import QueueForecast
from scheduler.core.model.policy import Policy
from scheduler.core.model.project_tree import ProjectTree
from scheduler.core.model.snapshot import JobId, RunningRow, Snapshot

MIN_DELAY_S = 60.0
"""Smaller delays are ignored."""
MAX_JOBS = 1_000
"""Pending jobs considered, in queue order; bounded because a user waits for the answer."""


@dataclass(frozen=True, slots=True)
class JobDelay:
    """The delay of one pending job; infinite ``delay_s`` means that its start becomes unknown."""

    job: JobId
    delay_s: float


@dataclass(frozen=True, slots=True)
class DelayImpact:
    """The delayed jobs, longest delay first, and the names of delayed reservations.

    ``is_complete`` is False if more jobs are pending than were considered.
    """

    jobs: tuple[JobDelay, ...]
    reservations: tuple[str, ...]
    is_complete: bool = True


def estimate_delay_impact(
    snapshot: Snapshot,
    policy: Policy,
    job: JobId,
    end_s: float,
    extended_end_s: float,
    durations: DurationHistory,
    template_of: Mapping[JobId, str | None] = MappingProxyType({}),
) -> DelayImpact:
    """Return what is delayed if a running job may run until ``extended_end_s`` instead of ``end_s``.

    Raises:
        ValueError: the job is not running, or the extended end is not later.
    """
    row = next((row for row in snapshot.running if row.job == job), None)
    if row is None or extended_end_s <= end_s:
        raise ValueError("the job is not running, or the extended end is not later")
    plan = decide(snapshot, policy)
    before, after = (
        QueueForecast(
            snapshot, plan, row.pool, durations, policy, template_of=template_of, known_ends_s={job: at_s}
        )
        for at_s in (end_s, extended_end_s)
    )
    starts_s = before.median_starts_s(before.queue[:MAX_JOBS])
    then_s = after.median_starts_s(starts_s)
    late = [
        JobDelay(one, by_s)
        for one, start_s in starts_s.items()
        if start_s < math.inf and (by_s := then_s.get(one, math.inf) - start_s) >= MIN_DELAY_S
    ]
    late.sort(key=lambda each: (-each.delay_s, each.job))
    whole = len(before.queue) <= MAX_JOBS
    return DelayImpact(tuple(late), _delayed_reservations(snapshot, row, end_s, extended_end_s), whole)


def _delayed_reservations(
    snapshot: Snapshot, row: RunningRow, end_s: float, extended_end_s: float
) -> tuple[str, ...]:
    """Return the reservations for others on the job's nodes that the added time overlaps."""
    tree = ProjectTree(snapshot.projects)
    line = set(tree.path[tree.leaf_of[row.project]])
    nodes = {task.node for task in row.tasks}
    return tuple(
        sorted(
            each.name
            for each in snapshot.reservations
            if not nodes.isdisjoint(each.nodes)
            and line.isdisjoint(each.projects)
            and each.start_s < extended_end_s
            and each.end_s > end_s
        )
    )
