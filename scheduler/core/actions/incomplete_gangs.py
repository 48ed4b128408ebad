"""Find stale gangs: fewer live tasks than the gang needs, for longer than the grace period."""

from __future__ import annotations

from scheduler.core.model.policy import Policy
from scheduler.core.session.gang import Gang, GangTaskState
from scheduler.core.session.pool import PoolState


def stale_gangs(pool_state: PoolState, now_s: float, policy: Policy) -> list[Gang]:
    """Return the gangs to evict whole, ordered by job."""
    found = []
    for job in sorted(pool_state.gangs):
        gang = pool_state.gangs[job]
        row = gang.running_row
        if row is None or row.stale_since_s is None or row.stopping:
            continue
        if gang.root.is_satisfied:  # the tasks that this plan starts complete it again
            continue
        grace_s = policy.stale_gang_grace_s if row.stale_gang_grace_s is None else row.stale_gang_grace_s
        if grace_s < 0 or now_s - row.stale_since_s < grace_s:
            continue
        if any(task.state is GangTaskState.RUNNING for task in gang.tasks):
            found.append(gang)
    return found
