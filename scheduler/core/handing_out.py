"""Handing out: places that are kept or free go to those whose turn it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.core.cluster import PoolId, RunningTask
from scheduler.core.gang import Gang, GangTaskState, GangTask, total_demand
from scheduler.core.ledger import AssumeReleased
from scheduler.core.reserving import BackfillReservations
from scheduler.core.scene import PoolState
from scheduler.core.seats import GangPlacer
from scheduler.core.shape import HeldSlots
from scheduler.core.table import SchedulingSession
from scheduler.core.trial import Statement
from scheduler.core.turns import JobQueue


class AllocateAction:
    """The action *allocate*, and what belongs to it: kept places and reservations."""

    def __init__(self, table: SchedulingSession) -> None:
        self._table = table

    def restore_nominations(self) -> None:
        """Keep the places that an earlier plan kept; who can have all of them now starts there."""
        waiting = [(self._table.gangs[row.job], row.nominated_tasks) for row in self._table.pending if row.nominated_tasks]
        for pool, scene in self._table.pool_states.items():
            gangs = [(gang, row.nominated_tasks) for gang in scene.gangs.values() if (row := gang.running_row) and row.nominated_tasks]
            gangs += [each for each in waiting if pool in each[0].feasible_pools]
            for gang, kept in sorted(gangs, key=lambda each: (each[0].submitted_s, each[0].job)):
                self._restore(scene, gang, kept)

    def _restore(self, scene: PoolState, gang: Gang, nominated_tasks: tuple[RunningTask, ...]) -> None:
        """Keep exactly these places if they are still to be had."""
        tasks = {task.rank: task for task in gang.tasks if task.state in (GangTaskState.PENDING, GangTaskState.RELEASING)}
        places: list[tuple[GangTask, HeldSlots]] = []
        for i, stand in enumerate(nominated_tasks):
            task = tasks.get(i if stand.rank is None else stand.rank)
            place = None if task is None else scene.available.find_slots(stand, task.shape.tenant)
            if task is None or place is None or not scene.available.eligible_nodes(task.shape)[place.node]:
                return
            if not (scene.idle_and_releasing if scene.has_releasing else scene.available).is_sharing_allowed(task.shape, place):
                return
            places.append((task, place))
        amounts = total_demand(task for task, _ in places)
        if scene.ledger.is_blocked(gang.leaf_project, gang.user, amounts, gang.preemptible, assume_released=AssumeReleased.ALL):
            return
        scene.gangs[gang.job] = gang
        trial = Statement(scene)
        if not gang.running_row and not scene.ledger.is_blocked(gang.leaf_project, gang.user, amounts, gang.preemptible):
            for task, place in places:
                trial.allocate(task, place)
            if not _is_overcommitted(scene, places):
                gang.pinned = True
                return
            trial.rollback()
        for task, place in places:
            trial.nominate(task, place)
        if scene.idle_and_releasing.is_overcommitted(place for _, place in places):
            trial.rollback()
        else:
            self._table.nominated_jobs.add(gang.job)

    def start_nominated(self) -> None:
        """A gang that keeps places starts at once where free ones are found that nobody else keeps."""
        for pool, scene in self._table.pool_states.items():
            for job in sorted(job for job, gang in scene.gangs.items() if gang.dirty):
                gang = scene.gangs[job]
                tasks = [task for task in gang.tasks if task.state is GangTaskState.NOMINATED]
                if not tasks or any(task.held for task in tasks):
                    continue
                if scene.idle.fit_count(tasks[0].shape) < (len(tasks) if gang.homogeneous else 1):
                    continue
                trial = Statement(scene)
                for task in tasks:
                    trial.evict(task)
                closed = scene.ledger.is_blocked(gang.leaf_project, gang.user, total_demand(tasks), gang.preemptible)
                if not closed and GangPlacer(trial, self._table.domains[pool], nominate=False).place(gang, tasks):
                    gang.pinned = bool(gang.pending_row and gang.pending_row.nominated_tasks)  # promised by an earlier plan
                else:
                    trial.rollback()

    def reserve(self) -> None:
        """Reserve the earliest places for gangs that have waited too long."""
        for pool, scene in self._table.pool_states.items():
            left = self._table.policy.cycle_budget_steps - self._table.steps_used
            self._table.backfill_reservations[pool] = BackfillReservations(
                scene, self._table.by_first_pool[pool], self._table.snapshot.now_s, left
            )
            self._table.steps_used += self._table.backfill_reservations[pool].steps_used

    def allocate(self) -> None:
        """Hand out free places: first everybody in the pool of first choice, then the next choices."""
        for choice, pools in enumerate(self._table.by_pool_rank):
            for pool, alike in pools.items():
                if alike:
                    self._allocate_pool(pool, alike, choice)

    def _allocate_pool(self, pool: PoolId, gangs_by_shape: Mapping[int, Sequence[Sequence[Gang]]], pool_rank: int) -> None:
        """Hand out the places of one pool in fair order, to kinds of gangs by what fits them.

        A job that finds places only once others have left keeps them when it has no further pool to try.
        """
        scene = self._table.pool_states[pool]
        full: set[int] = set()
        closed: set[int] = set()  # kinds that a bound stops, whoever leaves: it grows no wider meanwhile
        held_back: set[tuple[object, ...]] = set()  # by reservations: equal ones that last as long are, too

        def no_place(gang: Gang) -> bool:
            if gang.shape_id in full or gang.class_id in closed:
                return True
            return bool(held_back and (gang.shape_id, _duration_bounds_s(gang)) in held_back)

        jobs: list[Gang] = []
        for key, groups in gangs_by_shape.items():
            hopeful = self._feasible(scene, groups, pool_rank)
            if hopeful is None:
                full.add(key)
            else:
                jobs += hopeful
        queue = JobQueue(scene, jobs, no_place)
        while (turn := queue.pop()) is not None:
            tasks = turn.next_to_place()
            milli = total_demand(tasks).gpu_milli
            if not self._table.count_step(turn):
                continue
            last = len(turn.feasible_pools) == pool_rank + 1
            if self._start(scene, turn) or (last and self._nominate(scene, turn)):
                self._table.unprocessed.discard(turn.job)
                scene.gangs[turn.job] = turn
                self._table.pool_of[turn.job] = pool
                queue.started(turn, milli)
                if turn.next_to_place():
                    queue.requeue(turn)
            elif self._fits_nowhere(scene, turn, last):
                full.add(turn.shape_id)
            elif self._quota_blocked(scene, turn):
                closed.add(turn.class_id)
            elif turn.homogeneous and self._table.backfill_reservations[pool].first_blocking(turn) is not None:
                held_back.add((turn.shape_id, _duration_bounds_s(turn)))
        self._table.planners[pool].invalidate()

    def _feasible(self, scene: PoolState, groups: Sequence[Sequence[Gang]], pool_rank: int) -> list[Gang] | None:
        """Of kinds that fit alike, the gangs that may find places; None when the first, and so none, does."""
        found: list[Gang] = []
        tried = False
        for group in groups:
            first = group[0] if self._has_pending(group[0]) else next(filter(self._has_pending, group), None)
            if first is None:
                continue
            if not tried and self._fits_nowhere(scene, first, len(first.feasible_pools) == pool_rank + 1):
                return None
            tried = True
            if not self._quota_blocked(scene, first):
                found += [gang for gang in group if self._has_pending(gang)]
        return found

    def _has_pending(self, gang: Gang) -> bool:
        """True for a gang with tasks to place; one that keeps places for which others leave does not grow."""
        if not gang.next_to_place():
            return False
        promised = gang.dirty and gang.job in self._table.nominated_jobs
        return not (promised and any(task.state is GangTaskState.NOMINATED for task in gang.tasks))

    @staticmethod
    def _quota_blocked(scene: PoolState, gang: Gang) -> bool:
        """True when a bound stops a gang even once all who leave are gone."""
        return scene.ledger.is_blocked(gang.leaf_project, gang.user, gang.next_demand, gang.preemptible, assume_released=AssumeReleased.ALL)

    def _fits_nowhere(self, scene: PoolState, gang: Gang, last: bool) -> bool:
        """True when places alone are what is missing: then an equal gang of anybody finds none either."""
        if not gang.homogeneous:
            return False
        tasks = gang.next_to_place()
        if scene.available.fit_count(tasks[0].shape) >= len(tasks):
            return False
        return not (last and scene.has_releasing and scene.idle_and_releasing.fit_count(tasks[0].shape) >= len(tasks))

    def _start(self, scene: PoolState, gang: Gang) -> bool:
        """Start what comes next of a gang on free places, or change nothing."""
        tasks = gang.next_to_place()
        gone = AssumeReleased.NONE if self._table.policy.leaving_counts else AssumeReleased.ALL
        if scene.ledger.is_blocked(gang.leaf_project, gang.user, total_demand(tasks), gang.preemptible, assume_released=gone):
            return False
        if any(task.state is GangTaskState.NOMINATED for task in gang.tasks):
            return False
        open_nodes = self._table.backfill_reservations[scene.pool.id].allowed_nodes(gang)
        return GangPlacer(Statement(scene), self._table.domains[scene.pool.id], nominate=False).place(
            gang, tasks, open_nodes
        )

    def _nominate(self, scene: PoolState, gang: Gang) -> bool:
        """Keep places where others are leaving, or change nothing."""
        tasks = gang.next_to_place()
        if not scene.has_releasing:
            return False
        if self._quota_blocked(scene, gang):
            return False
        if gang.homogeneous and scene.available.fit_count(tasks[0].shape) >= len(tasks):
            return False  # places that are free now are not kept idle for a job that a bound holds back
        return GangPlacer(Statement(scene), self._table.domains[scene.pool.id], nominate=True).place(gang, tasks)


def _duration_bounds_s(gang: Gang) -> tuple[float | None, float | None]:
    return (gang.pending_row.predicted_duration_s, gang.pending_row.time_limit_s) if gang.pending_row else (None, None)


def _is_overcommitted(scene: PoolState, places: list[tuple[GangTask, HeldSlots]]) -> bool:
    """True when more is taken of these places than there is, now or later."""
    held = [place for _, place in places]
    return scene.idle.is_overcommitted(held) or scene.idle_and_releasing.is_overcommitted(held)
