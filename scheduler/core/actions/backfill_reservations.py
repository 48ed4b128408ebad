"""Backfill reservations of one decision: gangs that waited too long, and which later jobs may pass them.

A gang of several tasks that waits longer than ``backfill_reserve_after_s`` gets the earliest slots that the
known ends of running jobs (time limits, predictions) free, for the first few gangs in fair order. A later job
starts on other slots, or on reserved ones if it ends before. Without known ends nothing is reserved: a
reservation without a start time would only keep GPUs idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.core.actions.backfill import GangReservation, JobEnd, ReservationPlanner, expected_end_s
from scheduler.core.model.snapshot import JobId
from scheduler.core.model.task_shape import Bools
from scheduler.core.session.gang import Gang, GangTaskState
from scheduler.core.session.job_queue import JobQueue
from scheduler.core.session.pool import PoolState
from scheduler.core.shares.ledger import AssumeReleased

MAX_RESERVED_GANGS = 4
"""Reservations in one pool at a time; more would block the pool for all others."""


class BackfillReservations:
    def __init__(
        self, pool_state: PoolState, ready: Iterable[Sequence[Gang]], now_s: float, max_steps: int
    ) -> None:
        self._now_s = now_s
        self.steps_used = 0
        self._planner: ReservationPlanner | None = None
        after_s = pool_state.policy.backfill_reserve_after_s
        gangs = (gang for group in ready if len(group[0].tasks) > 1 for gang in group)
        late = [gang for gang in gangs if self._waits_too_long(gang, after_s)]
        if late:
            self._reserve(pool_state, late, max_steps)

    def _waits_too_long(self, gang: Gang, after_s: float) -> bool:
        return (
            gang.homogeneous
            and self._now_s - gang.submitted_s >= after_s
            and len(gang.next_to_place()) > 1
            and not any(task.state is GangTaskState.NOMINATED for task in gang.tasks)
        )

    def _reserve(self, pool_state: PoolState, late: list[Gang], max_steps: int) -> None:
        endings = []
        for gang in pool_state.gangs.values():
            if (row := gang.running_row) is not None:
                ends_s = expected_end_s(self._now_s, row.started_s, row.time_limit_s, row.predicted_end_s)
                held = [
                    place for task in gang.tasks if task.state is GangTaskState.RUNNING for place in task.held
                ]
                endings.append(JobEnd(gang.job, ends_s, held))
        made = ReservationPlanner(pool_state.available, endings, self._now_s, max_steps)
        queue = JobQueue(pool_state, late)
        while len(made.reservations) < MAX_RESERVED_GANGS and (turn := queue.pop()) is not None:
            tasks = turn.next_to_place()
            near = turn.root.topology_constraint
            if pool_state.domains.max_tasks_together(near, pool_state.available, tasks[0].shape) >= len(
                tasks
            ):
                continue  # it fits on free slots when its turn comes
            if not pool_state.ledger.is_blocked(
                turn.leaf_project,
                turn.user,
                turn.next_demand,
                turn.preemptible,
                assume_released=AssumeReleased.ALL,
            ):
                made.reserve(turn.job, tasks[0].shape, len(tasks), pool_state.domains.required_domains(near))
        self.steps_used = made.steps_used
        self._planner = made if made.reservations else None

    @property
    def is_empty(self) -> bool:
        return self._planner is None

    def for_job(self, job: JobId) -> GangReservation | None:
        made = self._planner.reservations if self._planner else ()
        return next((each for each in made if each.job == job), None)

    def first_blocking(self, gang: Gang) -> GangReservation | None:
        """Return the first reservation of another gang that starts before ``gang`` would end."""
        if self._planner is None:
            return None
        ends_s = self._expected_end_s(gang)
        others = (each for each in self._planner.reservations if each.job != gang.job)
        return next((each for each in others if ends_s is None or ends_s > each.start_s), None)

    def allowed_nodes(self, gang: Gang) -> Bools | None:
        """Return the nodes where ``gang`` delays no other reservation; None is all nodes."""
        if self._planner is None or self.first_blocking(gang) is None:
            return None
        return self._planner.unreserved_nodes(self._expected_end_s(gang), gang.job)

    def _expected_end_s(self, gang: Gang) -> float | None:
        """Return the expected end of ``gang`` if it started now; None is unknown."""
        if gang.pending_row is None:
            return None
        lasts = [
            s for s in (gang.pending_row.predicted_duration_s, gang.pending_row.time_limit_s) if s is not None
        ]
        return self._now_s + min(lasts) if lasts else None
