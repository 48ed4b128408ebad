"""The allocate action: nominated and free GPUs go to pending gangs in fair order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.core.actions.backfill import BackfillReservations, late_gangs
from scheduler.core.actions.scheduling_session import SchedulingSession
from scheduler.core.model.snapshot import HeldSlots, PoolId, RunningTask
from scheduler.core.session.gang import ACTIVE_STATES, Gang, GangTask, GangTaskState, total_demand
from scheduler.core.session.gang_placement import GangPlacer, Statement
from scheduler.core.session.job_queue import JobQueue
from scheduler.core.session.pool import PoolState
from scheduler.core.shares.quota_ledger import AssumeReleased


class AllocateAction:
    """The action *allocate*, with the nominations of earlier plans and backfill reservations."""

    def __init__(self, session: SchedulingSession) -> None:
        self._session = session

    def restore_nominations(self) -> None:
        """Restore the nominations of earlier plans; a gang whose nominated slots are free starts there."""
        waiting = [
            (self._session.gangs[row.job], row.nominated_tasks)
            for row in self._session.pending
            if row.nominated_tasks
        ]
        for pool, pool_state in self._session.pool_states.items():
            gangs = [
                (gang, row.nominated_tasks)
                for gang in pool_state.gangs.values()
                if (row := gang.running_row) and row.nominated_tasks
            ]
            gangs += [each for each in waiting if pool in each[0].feasible_pools]
            for gang, kept in sorted(gangs, key=lambda each: (each[0].submitted_s, each[0].job)):
                self._restore(pool_state, gang, kept)

    def _restore(self, pool_state: PoolState, gang: Gang, nominated_tasks: tuple[RunningTask, ...]) -> None:
        """Allocate or nominate exactly these slots if they are still available; else change nothing."""
        tasks = {
            task.rank: task
            for task in gang.tasks
            if task.state in (GangTaskState.PENDING, GangTaskState.RELEASING)
        }
        places: list[tuple[GangTask, HeldSlots]] = []
        for i, stand in enumerate(nominated_tasks):
            task = tasks.get(i if stand.rank is None else stand.rank)
            place = None if task is None else pool_state.available.find_slots(stand, task.shape.tenant)
            if (
                task is None
                or place is None
                or not pool_state.available.eligible_nodes(task.shape)[place.node]
            ):
                return
            if not (
                pool_state.idle_and_releasing if pool_state.has_releasing else pool_state.available
            ).is_sharing_allowed(task.shape, place):
                return
            places.append((task, place))
        amounts = total_demand(task for task, _ in places)
        if pool_state.is_quota_blocked(gang, amounts, AssumeReleased.ALL):
            return
        self._session.join_pool(gang, pool_state.pool.id)
        statement = Statement(pool_state)
        if not gang.running_row and not pool_state.is_quota_blocked(gang, amounts):
            for task, place in places:
                statement.allocate(task, place)
            held = [place for _, place in places]
            if not (
                pool_state.idle.is_overcommitted(held) or pool_state.idle_and_releasing.is_overcommitted(held)
            ):
                gang.pinned = True
                return
            statement.rollback()
        for task, place in places:
            statement.nominate(task, place)
        if pool_state.idle_and_releasing.is_overcommitted(place for _, place in places):
            statement.rollback()
        else:
            self._session.nominated_jobs.add(gang.job)

    def start_nominated(self) -> None:
        """Start nominated gangs for which enough GPUs are free that are not nominated for others."""
        for pool_state in self._session.pool_states.values():
            for job in sorted(job for job, gang in pool_state.gangs.items() if gang.dirty):
                gang = pool_state.gangs[job]
                tasks = [task for task in gang.tasks if task.state is GangTaskState.NOMINATED]
                if not tasks or any(task.held for task in tasks):
                    continue
                if pool_state.idle.fit_count(tasks[0].shape) < (len(tasks) if gang.homogeneous else 1):
                    continue
                statement = Statement(pool_state)
                for task in tasks:
                    statement.evict(task)
                closed = pool_state.is_quota_blocked(gang, total_demand(tasks))
                if not closed and (
                    GangPlacer(statement, nominate=False).place(gang, tasks)
                    or self._start_in_exchange(statement, gang, tasks)
                ):
                    # nominated by an earlier plan
                    gang.pinned = bool(gang.pending_row and gang.pending_row.nominated_tasks)
                else:
                    statement.rollback()

    @staticmethod
    def _start_in_exchange(statement: Statement, gang: Gang, tasks: Sequence[GangTask]) -> bool:
        """Start tasks also on free slots that are nominated for ranks of elastic gangs, if these fit elsewhere."""
        growing = [
            (each, ranks)
            for _, each in sorted(statement.pool_state.gangs.items())
            if each is not gang and each.dirty and each.root.is_satisfied
            if (ranks := [t for t in each.tasks if t.state is GangTaskState.NOMINATED and not t.held])
            if len(ranks) < sum(task.state in ACTIVE_STATES for task in each.tasks)
        ]
        mark = statement.checkpoint()
        for _, ranks in growing:
            for task in ranks:
                statement.evict(task)
        if growing and GangPlacer(statement, nominate=False).place(gang, tasks):
            nominate = GangPlacer(statement, nominate=True)
            if all(nominate.place(each, [task]) for each, ranks in growing for task in ranks):
                return True
        statement.rollback(mark)
        return False

    def reserve(self) -> None:
        """Reserve the earliest possible slots for gangs that have waited too long."""
        for pool, pool_state in self._session.pool_states.items():
            left = self._session.policy.max_steps_per_cycle - self._session.steps_used
            now_s = self._session.snapshot.now_s
            late = late_gangs(pool_state, self._session.by_first_pool[pool], now_s)
            self._session.backfill_reservations[pool] = BackfillReservations(
                pool_state, iter(JobQueue(pool_state, late).pop, None), now_s, left
            )
            self._session.steps_used += self._session.backfill_reservations[pool].steps_used

    def allocate(self) -> set[PoolId]:
        """Allocate free GPUs, first to all gangs in their first feasible pool; return the pools with gangs."""
        visited: set[PoolId] = set()
        self._session.index_ready()
        for choice, pools in enumerate(self._session.by_pool_rank):
            for pool, alike in pools.items():
                if alike:
                    self._allocate_pool(pool, alike, choice)
                    visited.add(pool)
        return visited

    def _allocate_pool(
        self, pool: PoolId, gangs_by_shape: Mapping[int, Sequence[Sequence[Gang]]], pool_rank: int
    ) -> None:
        """Allocate the GPUs of one pool in fair order.

        A gang that fits only after releases is nominated there if this is its last feasible pool.
        """
        pool_state = self._session.pool_states[pool]
        full: set[int] = set()
        closed: set[int] = set()  # classes blocked by a limit even if all releasing jobs were gone
        held_back: set[tuple[object, ...]] = set()  # blocked by reservations, as are equal gangs

        def no_place(gang: Gang) -> bool:
            if gang.shape_id in full or gang.class_id in closed:
                return True
            return bool(held_back and (gang.shape_id, _duration_bounds_s(gang)) in held_back)

        jobs: list[Gang] = []
        for key, groups in gangs_by_shape.items():
            feasible = self._feasible(pool_state, groups, pool_rank)
            if feasible is None:
                full.add(key)
            else:
                jobs += feasible
        queue = JobQueue(pool_state, jobs, no_place)
        while (gang := queue.pop()) is not None:
            tasks = gang.next_tasks
            milli = total_demand(tasks).gpu_milli
            if not self._session.count_step(gang):
                continue
            last = len(gang.feasible_pools) == pool_rank + 1
            if self._start(pool_state, gang) or (last and self._nominate(pool_state, gang)):
                self._session.placed(gang, pool)
                queue.started(gang, milli)
                if gang.next_tasks:
                    queue.requeue(gang)
            elif self._fits_nowhere(pool_state, gang, last):
                full.add(gang.shape_id)
            elif self._quota_blocked(pool_state, gang):
                closed.add(gang.class_id)
            elif (
                gang.homogeneous
                and self._session.backfill_reservations[pool].first_blocking(gang) is not None
            ):
                held_back.add((gang.shape_id, _duration_bounds_s(gang)))

    def _feasible(
        self, pool_state: PoolState, groups: Sequence[Sequence[Gang]], pool_rank: int
    ) -> list[Gang] | None:
        """Return the gangs of one shape that may fit; None if the first does not, since then none does."""
        found: list[Gang] = []
        tried = False
        for group in groups:
            first = next((gang for gang in group if self._has_pending(pool_state, gang)), None)
            if first is None:
                continue
            if not tried and self._fits_nowhere(
                pool_state, first, len(first.feasible_pools) == pool_rank + 1
            ):
                return None
            tried = True
            if not self._quota_blocked(pool_state, first):
                found += [gang for gang in group if self._has_pending(pool_state, gang)]
        return found

    def _has_pending(self, pool_state: PoolState, gang: Gang) -> bool:
        """Return True if the gang has tasks to place here; one that waits for nominated slots does not grow."""
        if not gang.next_tasks or self._session.is_elsewhere(gang, pool_state.pool.id):
            return False
        promised = gang.dirty and gang.job in self._session.nominated_jobs
        return not (promised and any(task.state is GangTaskState.NOMINATED for task in gang.tasks))

    @staticmethod
    def _quota_blocked(pool_state: PoolState, gang: Gang) -> bool:
        """Return True if a limit blocks the gang even once all releasing jobs are gone."""
        return pool_state.is_quota_blocked(gang, gang.next_demand, AssumeReleased.ALL)

    def _fits_nowhere(self, pool_state: PoolState, gang: Gang, last: bool) -> bool:
        """Return True if only space is missing: then no other gang of this shape fits either."""
        if not gang.homogeneous:
            return False
        tasks = gang.next_tasks
        if pool_state.available.fit_count(tasks[0].shape) >= len(tasks):
            return False
        return not (
            last
            and pool_state.has_releasing
            and pool_state.idle_and_releasing.fit_count(tasks[0].shape) >= len(tasks)
        )

    def _start(self, pool_state: PoolState, gang: Gang) -> bool:
        """Start the next tasks of the gang on free slots, or change nothing."""
        tasks = gang.next_tasks
        if pool_state.is_quota_blocked(gang, total_demand(tasks)):
            return False
        if any(task.state is GangTaskState.NOMINATED for task in gang.tasks):
            return False
        open_nodes = self._session.backfill_reservations[pool_state.pool.id].allowed_nodes(gang)
        return GangPlacer(Statement(pool_state), nominate=False).place(gang, tasks, open_nodes)

    def _nominate(self, pool_state: PoolState, gang: Gang) -> bool:
        """Nominate slots that are being released, or change nothing."""
        tasks = gang.next_tasks
        if not pool_state.has_releasing:
            return False
        if self._quota_blocked(pool_state, gang):
            return False
        if gang.homogeneous and pool_state.available.fit_count(tasks[0].shape) >= len(tasks):
            return False  # a job that a limit blocks must not keep free GPUs idle
        return GangPlacer(Statement(pool_state), nominate=True).place(gang, tasks)


def _duration_bounds_s(gang: Gang) -> tuple[float | None, float | None]:
    return (
        (gang.pending_row.predicted_duration_s, gang.pending_row.time_limit_s)
        if gang.pending_row
        else (None, None)
    )
