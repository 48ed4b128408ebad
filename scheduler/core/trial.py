"""Changes to a scene that can be undone: the only place where tasks change state.

Every action of a decision is a trial on paper: places are taken, tasks leave, and when it does not come out
whole, all of it is undone in reverse.
"""

from __future__ import annotations

from typing import NamedTuple

from scheduler.core.gang import State, Task
from scheduler.core.scene import PoolScene
from scheduler.core.shape import Held


class _Done(NamedTuple):
    task: Task
    state: State
    kept: Held | None
    held: tuple[Held, ...]


class Trial:
    """What was changed since it began, newest last."""

    def __init__(self, scene: PoolScene) -> None:
        self.scene = scene
        self._done: list[_Done] = []

    def mark(self) -> int:
        """A point to come back to."""
        return len(self._done)

    def undo(self, mark: int = 0) -> None:
        """Take back everything since ``mark``."""
        while len(self._done) > mark:
            done = self._done.pop()
            self._move(done.task, done.state, done.held, done.kept)

    def start(self, task: Task, place: Held) -> None:
        """``task`` starts on a place that is free now, and later too."""
        self._do(task, State.STARTS, (place,), None)

    def keep(self, task: Task, place: Held) -> None:
        """A place of ``later`` is kept for ``task``; one that leaves is to stand there afterwards."""
        self._do(task, State.KEPT, task.held, place)

    def evict(self, task: Task) -> None:
        """``task`` leaves; one that was only to start, or to keep a place, waits again."""
        if task.state is State.STARTS or not task.held:
            self._do(task, State.WAITS, (), None)
        else:
            self._do(task, State.LEAVES, task.held, None)

    def stay(self, task: Task) -> None:
        """A task that was to leave stays where it stands."""
        self._do(task, State.RUNS, task.held, None)

    def _do(self, task: Task, state: State, held: tuple[Held, ...], kept: Held | None) -> None:
        self._done.append(_Done(task, task.state, task.kept, task.held))
        self._move(task, state, held, kept)

    def _move(self, task: Task, state: State, held: tuple[Held, ...], kept: Held | None) -> None:
        """Leave the old state and enter the new one, floors and ledger alike."""
        scene = self.scene
        self._count(task, -1)
        task.state, task.held, task.kept = state, held, kept
        self._count(task, +1)
        task.gang.changed()
        scene.changes += 1

    def _count(self, task: Task, sign: int) -> None:
        """Count a task in (+1) or out (-1), in the state it is in."""
        scene, state, gang = self.scene, task.state, task.gang
        if state is State.WAITS:
            return
        if state is State.LEAVES or (state is State.KEPT and task.held):  # it stands there until it is gone
            scene.ledger.add_leaving(gang.leaf, gang.user, task.amounts, gang.preemptible, sign)
        if state is State.LEAVES:
            return
        scene.ledger.add(gang.leaf, gang.user, task.amounts, gang.preemptible, sign)
        task.group.active += sign
        if state is State.KEPT:
            if task.kept is not None:
                scene.change_later(task.kept, -sign)
        elif state is State.STARTS:
            for place in task.held:
                scene.change_now(place, -sign)
        else:
            for place in task.held:
                scene.change_later(place, -sign)
