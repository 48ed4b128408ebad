"""Reservations while a plan is made: gangs that waited too long, and who may pass them.

A gang of several tasks that waits longer than ``reserve_after_s`` gets the earliest places that ends of running jobs
(time limits, predictions) promise, the first few in turn. A later job starts beside such a place, or on it if it ends
before. Where no end is known, nothing is reserved: a promise without a time would only keep GPUs idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.core.backfill import Ending, Reservation, Reservations, expected_end_s
from scheduler.core.cluster import JobId
from scheduler.core.gang import Gang, State
from scheduler.core.ledger import Gone
from scheduler.core.scene import PoolScene
from scheduler.core.shape import Bools
from scheduler.core.turns import TurnQueue

MOST_RESERVED = 4
"""Gangs of a pool with a reservation at a time; more would close the pool to everybody else."""


class Reserving:
    """The reservations of one pool in one decision."""

    def __init__(
        self, scene: PoolScene, ready: Iterable[Sequence[Gang]], now_s: float, most_steps: int
    ) -> None:
        self._now_s = now_s
        self.steps_used = 0
        self._made: Reservations | None = None
        after_s = scene.policy.reserve_after_s
        gangs = (gang for group in ready if len(group[0].tasks) > 1 for gang in group)
        late = [gang for gang in gangs if self._waits_too_long(gang, after_s)]
        if late:
            self._reserve(scene, late, most_steps)

    def _waits_too_long(self, gang: Gang, after_s: float) -> bool:
        return (
            gang.plain
            and self._now_s - gang.submitted_s >= after_s
            and len(gang.to_place()) > 1
            and not any(task.state is State.KEPT for task in gang.tasks)
        )

    def _reserve(self, scene: PoolScene, late: list[Gang], most_steps: int) -> None:
        endings = []
        for gang in scene.gangs.values():
            if (row := gang.running) is not None:
                ends_s = expected_end_s(self._now_s, row.started_s, row.time_limit_s, row.predicted_end_s)
                held = [place for task in gang.tasks if task.state is State.RUNS for place in task.held]
                endings.append(Ending(gang.job, ends_s, held))
        made = Reservations(scene.floor, endings, self._now_s, most_steps)
        queue = TurnQueue(scene, late)
        while len(made.made) < MOST_RESERVED and (turn := queue.pop()) is not None:
            tasks = turn.to_place()
            near = turn.root.near
            if scene.domains.most_together(near, scene.floor, tasks[0].shape) >= len(tasks):
                continue  # it only has to wait for its turn
            if not scene.ledger.closed_to(
                turn.leaf, turn.user, turn.asked, turn.preemptible, gone=Gone.EVERYBODY
            ):
                made.reserve(turn.job, tasks[0].shape, len(tasks), scene.domains.required(near))
        self.steps_used = made.steps_used
        self._made = made if made.made else None

    @property
    def none(self) -> bool:
        """True when nothing is reserved here."""
        return self._made is None

    def of(self, job: JobId) -> Reservation | None:
        """The reservation of a job."""
        made = self._made.made if self._made else ()
        return next((each for each in made if each.job == job), None)

    def first_after(self, gang: Gang) -> Reservation | None:
        """The first reservation of another that begins before ``gang`` would have ended."""
        if self._made is None:
            return None
        ends_s = self._ends_s(gang)
        others = (each for each in self._made.made if each.job != gang.job)
        return next((each for each in others if ends_s is None or ends_s > each.start_s), None)

    def open_to(self, gang: Gang) -> Bools | None:
        """The nodes where ``gang`` delays no reservation of another; None is all of them."""
        if self._made is None or self.first_after(gang) is None:
            return None
        return self._made.open_nodes(self._ends_s(gang), gang.job)

    def _ends_s(self, gang: Gang) -> float | None:
        """When a gang that starts now is gone; None is unknown."""
        if gang.row is None:
            return None
        lasts = [s for s in (gang.row.predicted_s, gang.row.time_limit_s) if s is not None]
        return self._now_s + min(lasts) if lasts else None
