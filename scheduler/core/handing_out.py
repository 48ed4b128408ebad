"""Handing out: places that are kept or free go to those whose turn it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.core.cluster import PoolId, RunningTask
from scheduler.core.gang import Gang, State, Task, total
from scheduler.core.ledger import Gone
from scheduler.core.reserving import Reserving
from scheduler.core.scene import PoolScene
from scheduler.core.seats import Seats
from scheduler.core.shape import Held
from scheduler.core.table import Table
from scheduler.core.trial import Trial
from scheduler.core.turns import TurnQueue


class HandingOut:
    """The action *allocate*, and what belongs to it: kept places and reservations."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def honour_kept(self) -> None:
        """Keep the places that an earlier plan kept; who can have all of them now starts there."""
        waiting = [(self._table.gangs[row.job], row.kept) for row in self._table.pending if row.kept]
        for pool, scene in self._table.scenes.items():
            gangs = [(gang, row.kept) for gang in scene.gangs.values() if (row := gang.running) and row.kept]
            gangs += [each for each in waiting if pool in each[0].possible]
            for gang, kept in sorted(gangs, key=lambda each: (each[0].submitted_s, each[0].job)):
                self._honour(scene, gang, kept)

    def _honour(self, scene: PoolScene, gang: Gang, kept: tuple[RunningTask, ...]) -> None:
        """Keep exactly these places if they are still to be had."""
        tasks = {task.rank: task for task in gang.tasks if task.state in (State.WAITS, State.LEAVES)}
        places: list[tuple[Task, Held]] = []
        for i, stand in enumerate(kept):
            task = tasks.get(i if stand.rank is None else stand.rank)
            place = None if task is None else scene.floor.place_of(stand, task.shape.tenant)
            if task is None or place is None or not scene.floor.open_to(task.shape)[place.node]:
                return
            if not (scene.later if scene.split else scene.floor).is_welcome(task.shape, place):
                return
            places.append((task, place))
        amounts = total(task for task, _ in places)
        if scene.ledger.closed_to(gang.leaf, gang.user, amounts, gang.preemptible, gone=Gone.EVERYBODY):
            return
        scene.gangs[gang.job] = gang
        trial = Trial(scene)
        if not gang.running and not scene.ledger.closed_to(gang.leaf, gang.user, amounts, gang.preemptible):
            for task, place in places:
                trial.start(task, place)
            if not _overfull(scene, places):
                gang.fixed = True
                return
            trial.undo()
        for task, place in places:
            trial.keep(task, place)
        if scene.later.overfull(place for _, place in places):
            trial.undo()
        else:
            self._table.promised.add(gang.job)

    def start_kept(self) -> None:
        """A gang that keeps places starts at once where free ones are found that nobody else keeps."""
        for pool, scene in self._table.scenes.items():
            for job in sorted(job for job, gang in scene.gangs.items() if gang.touched):
                gang = scene.gangs[job]
                tasks = [task for task in gang.tasks if task.state is State.KEPT]
                if not tasks or any(task.held for task in tasks):
                    continue
                if scene.now.room(tasks[0].shape) < (len(tasks) if gang.plain else 1):
                    continue
                trial = Trial(scene)
                for task in tasks:
                    trial.evict(task)
                closed = scene.ledger.closed_to(gang.leaf, gang.user, total(tasks), gang.preemptible)
                if not closed and Seats(trial, self._table.domains[pool], later=False).place(gang, tasks):
                    gang.fixed = bool(gang.row and gang.row.kept)  # promised by an earlier plan
                else:
                    trial.undo()

    def reserve(self) -> None:
        """Reserve the earliest places for gangs that have waited too long."""
        for pool, scene in self._table.scenes.items():
            left = self._table.policy.cycle_budget_steps - self._table.steps_used
            self._table.reserving[pool] = Reserving(
                scene, self._table.first_in[pool], self._table.snapshot.now_s, left
            )
            self._table.steps_used += self._table.reserving[pool].steps_used

    def allocate(self) -> None:
        """Hand out free places: first everybody in the pool of first choice, then the next choices."""
        for choice, pools in enumerate(self._table.choices):
            for pool, alike in pools.items():
                if alike:
                    self._hand_out(pool, alike, choice)

    def _hand_out(self, pool: PoolId, alike: Mapping[int, Sequence[Sequence[Gang]]], choice: int) -> None:
        """Hand out the places of one pool in fair order, to kinds of gangs by what fits them.

        A job that finds places only once others have left keeps them when it has no further pool to try.
        """
        scene = self._table.scenes[pool]
        full: set[int] = set()
        closed: set[int] = set()  # kinds that a bound stops, whoever leaves: it grows no wider meanwhile
        held_back: set[tuple[object, ...]] = set()  # by reservations: equal ones that last as long are, too

        def no_place(gang: Gang) -> bool:
            if gang.key in full or gang.kind in closed:
                return True
            return bool(held_back and (gang.key, _lasts_s(gang)) in held_back)

        jobs: list[Gang] = []
        for key, groups in alike.items():
            hopeful = self._hopeful(scene, groups, choice)
            if hopeful is None:
                full.add(key)
            else:
                jobs += hopeful
        queue = TurnQueue(scene, jobs, no_place)
        while (turn := queue.pop()) is not None:
            tasks = turn.to_place()
            milli = total(tasks).gpu_milli
            if not self._table.step(turn):
                continue
            last = len(turn.possible) == choice + 1
            if self._start(scene, turn) or (last and self._keep(scene, turn)):
                self._table.not_reached.discard(turn.job)
                scene.gangs[turn.job] = turn
                self._table.pool_of[turn.job] = pool
                queue.started(turn, milli)
                if turn.to_place():
                    queue.put_back(turn)
            elif self._fits_nowhere(scene, turn, last):
                full.add(turn.key)
            elif self._closed(scene, turn):
                closed.add(turn.kind)
            elif turn.plain and self._table.reserving[pool].first_after(turn) is not None:
                held_back.add((turn.key, _lasts_s(turn)))
        self._table.rooms[pool].forget()

    def _hopeful(self, scene: PoolScene, groups: Sequence[Sequence[Gang]], choice: int) -> list[Gang] | None:
        """Of kinds that fit alike, the gangs that may find places; None when the first, and so none, does."""
        found: list[Gang] = []
        tried = False
        for group in groups:
            first = group[0] if self._comes(group[0]) else next(filter(self._comes, group), None)
            if first is None:
                continue
            if not tried and self._fits_nowhere(scene, first, len(first.possible) == choice + 1):
                return None
            tried = True
            if not self._closed(scene, first):
                found += [gang for gang in group if self._comes(gang)]
        return found

    def _comes(self, gang: Gang) -> bool:
        """True for a gang with tasks to place; one that keeps places for which others leave does not grow."""
        if not gang.to_place():
            return False
        promised = gang.touched and gang.job in self._table.promised
        return not (promised and any(task.state is State.KEPT for task in gang.tasks))

    @staticmethod
    def _closed(scene: PoolScene, gang: Gang) -> bool:
        """True when a bound stops a gang even once all who leave are gone."""
        return scene.ledger.closed_to(gang.leaf, gang.user, gang.asked, gang.preemptible, gone=Gone.EVERYBODY)

    def _fits_nowhere(self, scene: PoolScene, gang: Gang, last: bool) -> bool:
        """True when places alone are what is missing: then an equal gang of anybody finds none either."""
        if not gang.plain:
            return False
        tasks = gang.to_place()
        if scene.floor.room(tasks[0].shape) >= len(tasks):
            return False
        return not (last and scene.split and scene.later.room(tasks[0].shape) >= len(tasks))

    def _start(self, scene: PoolScene, gang: Gang) -> bool:
        """Start what comes next of a gang on free places, or change nothing."""
        tasks = gang.to_place()
        gone = Gone.NOBODY if self._table.policy.leaving_counts else Gone.EVERYBODY
        if scene.ledger.closed_to(gang.leaf, gang.user, total(tasks), gang.preemptible, gone=gone):
            return False
        if any(task.state is State.KEPT for task in gang.tasks):
            return False
        open_nodes = self._table.reserving[scene.pool.id].open_to(gang)
        return Seats(Trial(scene), self._table.domains[scene.pool.id], later=False).place(
            gang, tasks, open_nodes
        )

    def _keep(self, scene: PoolScene, gang: Gang) -> bool:
        """Keep places where others are leaving, or change nothing."""
        tasks = gang.to_place()
        if not scene.split:
            return False
        if self._closed(scene, gang):
            return False
        if gang.plain and scene.floor.room(tasks[0].shape) >= len(tasks):
            return False  # places that are free now are not kept idle for a job that a bound holds back
        return Seats(Trial(scene), self._table.domains[scene.pool.id], later=True).place(gang, tasks)


def _lasts_s(gang: Gang) -> tuple[float | None, float | None]:
    return (gang.row.predicted_s, gang.row.time_limit_s) if gang.row else (None, None)


def _overfull(scene: PoolScene, places: list[tuple[Task, Held]]) -> bool:
    """True when more is taken of these places than there is, now or later."""
    held = [place for _, place in places]
    return scene.now.overfull(held) or scene.later.overfull(held)
