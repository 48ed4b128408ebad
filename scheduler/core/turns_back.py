"""Room by fair turns: once victims have left, everybody is seated anew in the order of the queue.

KAI-Scheduler makes room so. Whoever would come before the taker anyhow takes its place back first, so nothing is
taken that would be taken back at once; who finds its own node again never left; who finds another moves; who
finds none is gone. Each job has one turn: what makes it whole, or one task beyond that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from scheduler.core.cluster import WHOLE_MILLI, JobId, ProjectId
from scheduler.core.gang import Gang, State, Task, total
from scheduler.core.ledger import Gone
from scheduler.core.scene import PoolScene
from scheduler.core.trial import Trial
from scheduler.core.turns import turn_key


class TurnsBack:
    """One taker and those who left for it, on paper."""

    def __init__(
        self,
        scene: PoolScene,
        trial: Trial,
        taker: Gang,
        wanted: Sequence[Task],
        gone: Sequence[Task],
        place: Callable[[Gang, Sequence[Task]], bool],
    ) -> None:
        """``place`` gives tasks of a gang places once others have left, all or none."""
        self._scene = scene
        self._trial = trial
        self._taker = taker
        self._wanted = wanted
        self._gone = gone
        self._left = set(gone)
        self._place = place

    def seat(self) -> bool:
        """Seat everybody who finds a place; False when the taker does not (undo the trial then)."""
        waiting: dict[JobId, Gang] = {task.gang.job: task.gang for task in self._gone}
        waiting[self._taker.job] = self._taker
        while waiting:
            gang = self._first(waiting.values())
            del waiting[gang.job]
            tasks = self._next(gang)
            seated = bool(tasks) and not self._closed(gang, tasks) and self._place(gang, tasks)
            if gang is self._taker and not seated:
                return False
        for task in self._gone:
            self._stay(task)
        return True

    def _next(self, gang: Gang) -> Sequence[Task]:
        """What a gang would be given at its turn."""
        if gang is self._taker:
            return self._wanted
        return gang.root.to_place(self._comes_back)

    def _comes_back(self, task: Task) -> bool:
        return task in self._left and task.state in (State.LEAVES, State.WAITS)

    def _closed(self, gang: Gang, tasks: Sequence[Task]) -> bool:
        return self._scene.ledger.closed_to(
            gang.leaf, gang.user, total(tasks), gang.preemptible, gone=Gone.ASKED
        )

    # -- whose turn -----------------------------------------------------------------------------------

    def _first(self, gangs: Iterable[Gang]) -> Gang:
        """The gang whose turn it is: the first of its project, in the first project at every level."""
        tree = self._scene.tree
        heads: dict[ProjectId, Gang] = {}
        below: dict[ProjectId | None, set[ProjectId]] = {}
        for gang in gangs:
            best = heads.get(gang.leaf)
            if best is None or (-gang.priority, turn_key(gang)) < (-best.priority, turn_key(best)):
                heads[gang.leaf] = gang
            for level in tree.path[gang.leaf]:
                below.setdefault(tree.parent[level], set()).add(level)
        return self._head(None, heads, below)

    def _head(
        self,
        parent: ProjectId | None,
        heads: dict[ProjectId, Gang],
        below: dict[ProjectId | None, set[ProjectId]],
    ) -> Gang:
        found = {}
        for project in sorted(below[parent]):
            head = heads[project] if project in heads else self._head(project, heads, below)
            key = self._scene.sibling_key(project, total(self._next(head)))
            found[key] = head
        return found[min(found)]

    # -- who never left -------------------------------------------------------------------------------

    def _stay(self, task: Task) -> None:
        """Let a task stay that is to stand on its own node again; whole GPUs are as good as one another."""
        place = task.kept
        if task.state is not State.KEPT or place is None or not task.held:
            return
        if any(stood.node != place.node for stood in task.held):
            return
        own = {slot for stood in task.held for slot in stood.slots}
        spare = [slot for slot in place.slots if slot not in own]
        missing = own.difference(place.slots)
        if missing and place.milli != WHOLE_MILLI:
            return
        for other in (*self._wanted, *self._gone):
            there = other.kept
            if other is task or other.state is not State.KEPT or there is None or there.node != place.node:
                continue
            if taken := missing.intersection(there.slots):
                kept = tuple(slot for slot in there.slots if slot not in taken)
                given = tuple(spare.pop() for _ in taken)
                self._trial.keep(other, there._replace(slots=tuple(sorted(kept + given))))
                missing -= taken
        self._trial.stay(task)
