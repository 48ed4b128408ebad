"""Changes to a pool_state that can be undone: the only place where tasks change state.

Every action of a decision is a trial on paper: places are taken, tasks leave, and when it does not come out
whole, all of it is undone in reverse.
"""

from __future__ import annotations

from typing import NamedTuple

from scheduler.core.model.task_shape import HeldSlots
from scheduler.core.session.gang import GangTask, GangTaskState
from scheduler.core.session.pool import PoolState


class _LogEntry(NamedTuple):
    task: GangTask
    state: GangTaskState
    nominated: HeldSlots | None
    held: tuple[HeldSlots, ...]


class Statement:
    """What was changed since it began, newest last."""

    def __init__(self, pool_state: PoolState) -> None:
        self.pool_state = pool_state
        self._log: list[_LogEntry] = []

    def checkpoint(self) -> int:
        """A point to come back to."""
        return len(self._log)

    def rollback(self, checkpoint: int = 0) -> None:
        """Take back everything since ``mark``."""
        while len(self._log) > checkpoint:
            done = self._log.pop()
            self._move(done.task, done.state, done.held, done.nominated)

    def allocate(self, task: GangTask, slots: HeldSlots) -> None:
        """``task`` starts on a place that is free now, and later too."""
        self._do(task, GangTaskState.ALLOCATED, (slots,), None)

    def nominate(self, task: GangTask, slots: HeldSlots) -> None:
        """A place of ``later`` is kept for ``task``; one that leaves is to stand there afterwards."""
        self._do(task, GangTaskState.NOMINATED, task.held, slots)

    def evict(self, task: GangTask) -> None:
        """``task`` leaves; one that was only to start, or to keep a place, waits again."""
        if task.state is GangTaskState.ALLOCATED or not task.held:
            self._do(task, GangTaskState.PENDING, (), None)
        else:
            self._do(task, GangTaskState.RELEASING, task.held, None)

    def restore(self, task: GangTask) -> None:
        """A task that was to leave stays where it stands."""
        self._do(task, GangTaskState.RUNNING, task.held, None)

    def _do(
        self, task: GangTask, state: GangTaskState, held: tuple[HeldSlots, ...], nominated: HeldSlots | None
    ) -> None:
        self._log.append(_LogEntry(task, task.state, task.nominated, task.held))
        self._move(task, state, held, nominated)

    def _move(
        self, task: GangTask, state: GangTaskState, held: tuple[HeldSlots, ...], nominated: HeldSlots | None
    ) -> None:
        """Leave the old state and enter the new one, floors and ledger alike."""
        pool_state = self.pool_state
        self._count(task, -1)
        task.state, task.held, task.nominated = state, held, nominated
        self._count(task, +1)
        task.gang.mark_changed()
        pool_state.version += 1

    def _count(self, task: GangTask, sign: int) -> None:
        """Count a task in (+1) or out (-1), in the state it is in."""
        pool_state, state, gang = self.pool_state, task.state, task.gang
        if state is GangTaskState.PENDING:
            return
        if state is GangTaskState.RELEASING or (
            state is GangTaskState.NOMINATED and task.held
        ):  # it stands there until it is gone
            pool_state.ledger.add_releasing(
                gang.leaf_project, gang.user, task.amounts, gang.preemptible, sign
            )
        if state is GangTaskState.RELEASING:
            return
        pool_state.ledger.add(gang.leaf_project, gang.user, task.amounts, gang.preemptible, sign)
        task.group.active_count += sign
        if state is GangTaskState.NOMINATED:
            if task.nominated is not None:
                pool_state.adjust_releasing(task.nominated, -sign)
        elif state is GangTaskState.ALLOCATED:
            for place in task.held:
                pool_state.adjust_idle(place, -sign)
        else:
            for place in task.held:
                pool_state.adjust_releasing(place, -sign)
