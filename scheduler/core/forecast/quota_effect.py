"""Effect of changed quotas on the present queue: starts, evictions, and what each project holds.

Two snapshots that differ only in quotas are compared, each with its plan and a simulation of its queue, so that
differences are due to the quotas. Later submissions and later changes of quotas are not considered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.forecast.durations import DurationHistory
from scheduler.core.forecast.queue_simulation import SIMULATION_RUNS
from scheduler.core.forecast.start_times import QueueForecast, has_forecast
from scheduler.core.model.apply_plan import apply_plan
from scheduler.core.model.plan import Eviction, Plan
from scheduler.core.model.policy import Policy
from scheduler.core.model.project_tree import ProjectTree
from scheduler.core.model.snapshot import JobId, PoolId, ProjectId, QuotaRow, Snapshot

MAX_SIMULATED_JOBS = 1_000
"""Pending jobs considered in each pool, in queue order; bounded because a user waits for the answer."""
MAX_STEPS = 6_000
"""Steps of each run of the simulation."""
MIN_SHIFT_S = 60.0
"""Smaller changes of a start are ignored."""


@dataclass(frozen=True, slots=True)
class StartShift:
    """Median waits of a pending job before and after, in seconds.

    0 starts now, infinite finds no start, and None is further away than the simulation reaches.
    """

    job: JobId
    before_s: float | None
    after_s: float | None

    @property
    def shift_s(self) -> float:
        """How much later it starts; negative is earlier."""
        before_s, after_s = (math.inf if s is None else s for s in (self.before_s, self.after_s))
        return 0.0 if before_s == after_s else after_s - before_s


@dataclass(frozen=True, slots=True)
class ProjectHolding:
    """GPU milli of a project with its descendants once the plan is carried out, and what it may hold."""

    used_milli: int
    guaranteed_milli: int
    fair_share_milli: float

    @property
    def borrowed_milli(self) -> int:
        return max(0, self.used_milli - self.guaranteed_milli)


@dataclass(frozen=True, slots=True)
class QuotaEffect:
    """The difference that changed quotas make.

    ``evictions`` are those that the present quotas do not cause. ``holdings`` lists the projects, by pool, whose
    numbers differ. ``is_complete`` is False if more jobs are pending than were simulated.
    """

    shifts: tuple[StartShift, ...]
    evictions: tuple[Eviction, ...]
    holdings: Mapping[tuple[ProjectId, PoolId], tuple[ProjectHolding, ProjectHolding]]
    is_complete: bool


def replace_quotas(snapshot: Snapshot, quotas: Sequence[QuotaRow]) -> Snapshot:
    """Return the snapshot with these quotas in place of those of the same project and pool."""
    changed = {(row.project, row.pool) for row in quotas}
    kept = (row for row in snapshot.quotas if (row.project, row.pool) not in changed)
    return replace(snapshot, quotas=(*kept, *quotas))


def estimate_quota_effect(
    before: tuple[Snapshot, Plan],
    after: tuple[Snapshot, Plan],
    pools: Sequence[PoolId],
    policy: Policy,
    durations: DurationHistory,
    template_of: Mapping[JobId, str | None] = MappingProxyType({}),
    runs: int = SIMULATION_RUNS,
) -> QuotaEffect:
    """Return what differs in ``pools`` between a snapshot and the one with changed quotas, each with its plan."""
    sides = []
    for snapshot, plan in (before, after):
        forecasts = [
            QueueForecast(snapshot, plan, pool, durations, policy, template_of=template_of, runs=runs)
            for pool in pools
        ]
        waits_s = _waits_s(snapshot, plan, forecasts)
        sides.append((plan, waits_s, _holdings(snapshot, plan, pools), forecasts))
    (plan, before_s, holdings, forecasts), (changed_plan, after_s, changed_holdings, _) = sides
    shifts = (StartShift(job, before_s[job], after_s[job]) for job in before_s.keys() & after_s.keys())
    evicted = {eviction.job for eviction in plan.evictions}
    return QuotaEffect(
        tuple(
            sorted(
                (each for each in shifts if abs(each.shift_s) >= MIN_SHIFT_S),
                key=lambda each: (-abs(each.shift_s), each.job),
            )
        ),
        tuple(each for each in changed_plan.evictions if each.job not in evicted),
        {
            key: (holdings[key], changed_holdings[key])
            for key in holdings
            if holdings[key] != changed_holdings[key]
        },
        all(len(each.queue) <= MAX_SIMULATED_JOBS for each in forecasts),
    )


def _waits_s(snapshot: Snapshot, plan: Plan, forecasts: Iterable[QueueForecast]) -> dict[JobId, float | None]:
    """Return the wait of each job that starts, can never start, or is simulated; None: beyond the simulation."""
    rows = {row.job: row for row in snapshot.pending if row.total_milli and not row.ranks}
    waits_s: dict[JobId, float | None] = {start.job: 0.0 for start in plan.starts if start.job in rows}
    predictable = set()
    for verdict in plan.verdicts:
        if verdict.job in rows and has_forecast(rows[verdict.job], verdict):
            predictable.add(verdict.job)
        elif verdict.code is VerdictCode.UNSATISFIABLE and verdict.job in rows:
            waits_s[verdict.job] = math.inf
    for forecast in forecasts:
        queue = [job for job in forecast.queue[:MAX_SIMULATED_JOBS] if job in predictable]
        waits_s |= dict.fromkeys(queue) | forecast.median_starts_s(queue, MAX_STEPS)
    return waits_s


def _holdings(
    snapshot: Snapshot, plan: Plan, pools: Sequence[PoolId]
) -> dict[tuple[ProjectId, PoolId], ProjectHolding]:
    """Return what each project holds after the starts and evictions of the plan."""
    tree = ProjectTree(snapshot.projects)
    used: Counter[tuple[ProjectId, PoolId]] = Counter()

    def add(project: ProjectId, pool: PoolId, milli: int) -> None:
        for above in tree.path[project]:
            used[above, pool] += milli

    after = apply_plan(snapshot, plan)
    project_of = {row.job: row.project for row in after.pending}
    project_of |= {row.job: row.project for row in after.running}
    for row in after.running:
        if not row.stopping:
            add(row.project, row.pool, sum(g.milli for t in row.tasks if not t.stopping for g in t.gpus))
    for start in plan.nominations:
        add(project_of[start.job], start.pool, sum(gpu.milli for task in start.tasks for gpu in task.gpus))
    shares = {(each.project, each.pool): each.fair_share_milli for each in plan.share_breakdowns}
    found = {}
    for pool in pools:
        quotas = tree.quotas_in_pool(snapshot.quotas, pool)
        for project in snapshot.projects:
            key = project.id, pool
            found[key] = ProjectHolding(used[key], quotas[project.id].guaranteed_milli, shares.get(key, 0.0))
    return found
