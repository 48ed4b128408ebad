"""A plan that stands: what a second decision would still change belongs into the first.

A decision goes through the queue once. Where running jobs leave, places are kept for those who wait for them,
and what was kept early can look different once everybody else has found a place. So the photograph *after* the
plan is decided upon again, and what comes out of that joins the plan, until nothing does (the fixed point: a
cluster that nobody touches stays as it is).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from scheduler.core.carry import after_commit
from scheduler.core.cluster import Snapshot
from scheduler.core.plan import Plan

MOST_ROUNDS = 5
"""The second round nearly always finds nothing; what is left after the last one is for the next cycle."""


def settle(snapshot: Snapshot, plan: Plan, decide_once: Callable[[Snapshot], Plan]) -> Plan:
    """``plan`` with what ``decide_once`` finds on the photograph after it."""
    leaving = any(row.stopping for row in snapshot.running)
    if not (leaving or plan.evictions or any(row.promised_nodes for row in snapshot.pending)):
        return plan  # where nothing is kept for anybody, one walk through the queue is enough
    for _ in range(MOST_ROUNDS):
        if plan.truncated or not (plan.starts or plan.evictions):
            return plan
        again = decide_once(after_commit(snapshot, plan))
        if not (again.starts or again.evictions):
            return plan
        started = {start.job for start in plan.starts}
        if again.truncated or any(eviction.job in started for eviction in again.evictions):
            return plan
        plan = _joined(plan, again)
    return plan


def _joined(plan: Plan, again: Plan) -> Plan:
    """Both; nobody leaves for a job that found another place since."""
    found = {start.job for start in again.starts}
    needed = [each for each in plan.evictions if each.for_job not in found]
    return replace(
        plan,
        starts=tuple(sorted((*plan.starts, *again.starts), key=lambda start: start.job)),
        evictions=tuple(sorted((*needed, *again.evictions), key=lambda eviction: eviction.job)),
        verdicts=again.verdicts,
        steps_used=plan.steps_used + again.steps_used,
    )
