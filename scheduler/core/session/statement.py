"""Changes to a pool state that can be rolled back: the only place where tasks change state.

Every action of a decision is tentative: tasks are placed and evicted, and rolled back if the action fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from scheduler.core.model.task_shape import HeldSlots
from scheduler.core.session.gang import GangTask, GangTaskState

if TYPE_CHECKING:
    from scheduler.core.session.pool import PoolState


class _LogEntry(NamedTuple):
    task: GangTask
    state: GangTaskState
    nominated: HeldSlots | None
    held: tuple[HeldSlots, ...]


class Statement:
    """The log of changes since it was created, newest last."""

    def __init__(self, pool_state: PoolState) -> None:
        self.pool_state = pool_state
        self._log: list[_LogEntry] = []

    def checkpoint(self) -> int:
        """Return a position to roll back to."""
        return len(self._log)

    def rollback(self, checkpoint: int = 0) -> None:
        """Undo all changes since ``checkpoint``."""
        while len(self._log) > checkpoint:
            done = self._log.pop()
            self._move(done.task, done.state, done.held, done.nominated)

    def allocate(self, task: GangTask, slots: HeldSlots) -> None:
        """Start ``task`` on slots that are free now and stay free."""
        self._do(task, GangTaskState.ALLOCATED, (slots,), None)

    def nominate(self, task: GangTask, slots: HeldSlots) -> None:
        """Reserve slots of ``idle_and_releasing`` for ``task``; a running task migrates there."""
        self._do(task, GangTaskState.NOMINATED, task.held, slots)

    def evict(self, task: GangTask) -> None:
        """Release the slots of ``task``; one allocated or nominated by this plan is pending again."""
        if task.state is GangTaskState.ALLOCATED or not task.held:
            self._do(task, GangTaskState.PENDING, (), None)
        else:
            self._do(task, GangTaskState.RELEASING, task.held, None)

    def restore(self, task: GangTask) -> None:
        """Cancel the eviction or migration of a running task."""
        self._do(task, GangTaskState.RUNNING, task.held, None)

    def _do(
        self, task: GangTask, state: GangTaskState, held: tuple[HeldSlots, ...], nominated: HeldSlots | None
    ) -> None:
        self._log.append(_LogEntry(task, task.state, task.nominated, task.held))
        self._move(task, state, held, nominated)

    def _move(
        self, task: GangTask, state: GangTaskState, held: tuple[HeldSlots, ...], nominated: HeldSlots | None
    ) -> None:
        """Change the state of a task, with the placers and the ledger."""
        pool_state = self.pool_state
        self._count(task, -1)
        task.state, task.held, task.nominated = state, held, nominated
        self._count(task, +1)
        task.gang.mark_changed()
        pool_state.version += 1

    def _count(self, task: GangTask, sign: int) -> None:
        """Add (+1) or subtract (-1) a task in its current state."""
        pool_state, state, gang = self.pool_state, task.state, task.gang
        if state is GangTaskState.PENDING:
            return
        if state is GangTaskState.RELEASING or (
            state is GangTaskState.NOMINATED and task.held
        ):  # it holds its slots until its container is gone
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
