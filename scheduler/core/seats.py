"""Finding places for the tasks of a gang, all or none: group by group, domain by domain, shape by shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from scheduler.core.domains import Domains
from scheduler.core.gang import ACTIVE, Gang, Group, Task
from scheduler.core.placement import Floor
from scheduler.core.shape import Bools, Held, Shape
from scheduler.core.trial import Trial


class Seats:
    """Places tasks on one floor of a scene within a trial."""

    def __init__(self, trial: Trial, domains: Domains, *, later: bool, free_now: bool | None = None) -> None:
        """``later``: places are kept, else taken. ``free_now``: only places that are free now already."""
        self._free_now = not later if free_now is None else free_now
        self._trial = trial
        self._scene = trial.scene
        self._domains = domains
        self._later = later

    def place(self, gang: Gang, tasks: Sequence[Task], only: Bools | None = None) -> bool:
        """Give each of ``tasks`` a place, on nodes of ``only``; False and nothing changed when that cannot be."""
        mark = self._trial.mark()
        if self._group(gang.root, set(tasks), tasks, only, ()):
            return True
        self._trial.undo(mark)
        return False

    def _floor(self) -> Floor:
        return self._scene.floor if self._free_now else self._scene.later

    def _group(
        self,
        group: Group,
        wanted: set[Task],
        tasks: Sequence[Task],
        only: Bools | None,
        parts: tuple[Bools, ...],
    ) -> bool:
        """Place the wanted tasks of a group, in the first domain of its topology that holds them all."""
        if group.near is None:
            return self._members(group, wanted, tasks, only, parts)
        standing = [task for task in group.all_tasks() if task.state in ACTIVE]
        shapes = _runs([task for task in tasks if task in wanted])
        for choice in self._domains.choices(group.near, self._floor(), shapes, standing, only):
            mark = self._trial.mark()
            if self._members(group, wanted, tasks, choice.nodes, choice.parts or parts):
                return True
            self._trial.undo(mark)
        return False

    def _members(
        self,
        group: Group,
        wanted: set[Task],
        tasks: Sequence[Task],
        only: Bools | None,
        parts: tuple[Bools, ...],
    ) -> bool:
        for child in group.children:
            mine = {task for task in child.all_tasks() if task in wanted}
            if mine and not self._group(child, mine, [t for t in tasks if t in mine], only, parts):
                return False
        if group.children:
            return True
        return all(
            self._spread(shape, run, only, parts) for shape, run in _runs([t for t in tasks if t in wanted])
        )

    def _spread(
        self, shape: Shape, tasks: Sequence[Task], only: Bools | None, parts: tuple[Bools, ...]
    ) -> bool:
        """Place tasks of one shape, filling one part after the other."""
        for part in parts:
            if not tasks:
                break
            nodes = part if only is None else part & only
            here = min(len(tasks), int(self._floor().capacity(shape)[nodes].sum()))
            if here and self._ready_first(shape, tasks[:here], nodes):
                tasks = tasks[here:]
        return not tasks or self._ready_first(shape, tasks, only)

    def _ready_first(self, shape: Shape, tasks: Sequence[Task], only: Bools | None) -> bool:
        """Place tasks of one shape; KAI-Scheduler prefers nodes where they would fit already now."""
        if not self._later or not self._scene.policy.by_turns:
            return self._equal(shape, tasks, only)
        ready = self._scene.now.capacity(shape) > 0
        if only is not None:
            ready = ready & only
        here = min(len(tasks), int(self._floor().capacity(shape)[ready].sum()))
        if here and not self._equal(shape, tasks[:here], ready):
            return False
        return here == len(tasks) or self._equal(shape, tasks[here:], only)

    def _equal(self, shape: Shape, tasks: Sequence[Task], only: Bools | None) -> bool:
        """Place tasks of one shape."""
        floor = self._floor()
        if only is not None:
            closed = np.flatnonzero(~only)
            shape = shape._replace(
                avoid_nodes=tuple(sorted({*shape.avoid_nodes, *(floor.nodes[i].id for i in closed)}))
            )
        gang = tasks[0].gang
        speeds = gang.row.speeds if gang.row is not None and len(tasks) == len(gang.tasks) else ()
        found = floor.place_gang(shape, len(tasks), None if self._free_now else self._scene.now, speeds)
        if found is None:
            return False
        floor.give_back(found)
        for task, place in zip(tasks, found, strict=True):
            self._take(task, place)
        return True

    def _take(self, task: Task, place: Held) -> None:
        if self._later:
            self._trial.keep(task, place)
        else:
            self._trial.start(task, place)


def _runs(tasks: Iterable[Task]) -> list[tuple[Shape, list[Task]]]:
    """Tasks by shape, in the order in which shapes first come."""
    runs: dict[Shape, list[Task]] = {}
    for task in tasks:
        runs.setdefault(task.shape, []).append(task)
    return list(runs.items())
