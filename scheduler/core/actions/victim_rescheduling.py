"""Eviction in fair order: after the victims left, all are placed again in queue order.

A gang ahead of the preemptor gets its slots back first, so nothing is evicted that would return at once. A
task placed on its old node is never evicted, one placed on another node migrates, one without a placement is
evicted. Each gang is placed once: its minimum, or one task beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from scheduler.core.model.snapshot import WHOLE_MILLI, JobId, ProjectId
from scheduler.core.session.gang import Gang, GangTask, GangTaskState, total_demand
from scheduler.core.session.job_queue import gang_sort_key
from scheduler.core.session.pool import PoolState
from scheduler.core.session.statement import Statement
from scheduler.core.shares.ledger import AssumeReleased


class VictimRescheduler:
    """Places one preemptor and the tasks evicted for it again, in an undo log."""

    def __init__(
        self,
        pool_state: PoolState,
        statement: Statement,
        preemptor: Gang,
        preemptor_tasks: Sequence[GangTask],
        evicted: Sequence[GangTask],
        place: Callable[[Gang, Sequence[GangTask]], bool],
    ) -> None:
        """``place`` nominates slots for all tasks of a gang, or for none."""
        self._pool_state = pool_state
        self._statement = statement
        self._preemptor = preemptor
        self._preemptor_tasks = preemptor_tasks
        self._evicted = evicted
        self._left = set(evicted)
        self._place = place

    def place_all(self) -> bool:
        """Place every gang that fits; return False if the preemptor does not (then roll back)."""
        waiting: dict[JobId, Gang] = {task.gang.job: task.gang for task in self._evicted}
        waiting[self._preemptor.job] = self._preemptor
        while waiting:
            gang = self._first(waiting.values())
            del waiting[gang.job]
            tasks = self._next_tasks(gang)
            seated = bool(tasks) and not self._quota_blocked(gang, tasks) and self._place(gang, tasks)
            if gang is self._preemptor and not seated:
                return False
        for task in self._evicted:
            self._restore_on_same_node(task)
        return True

    def _next_tasks(self, gang: Gang) -> Sequence[GangTask]:
        """Return the tasks of a gang to place together."""
        if gang is self._preemptor:
            return self._preemptor_tasks
        return gang.root.next_to_place(self._is_reschedulable)

    def _is_reschedulable(self, task: GangTask) -> bool:
        return task in self._left and task.state in (GangTaskState.RELEASING, GangTaskState.PENDING)

    def _quota_blocked(self, gang: Gang, tasks: Sequence[GangTask]) -> bool:
        return self._pool_state.ledger.is_blocked(
            gang.leaf_project,
            gang.user,
            total_demand(tasks),
            gang.preemptible,
            assume_released=AssumeReleased.EVICTED,
        )

    # -- fair order -----------------------------------------------------------------------------------

    def _first(self, gangs: Iterable[Gang]) -> Gang:
        """Return the next gang in fair order: first of its project, first project at every level."""
        tree = self._pool_state.tree
        heads: dict[ProjectId, Gang] = {}
        below: dict[ProjectId | None, set[ProjectId]] = {}
        for gang in gangs:
            best = heads.get(gang.leaf_project)
            if best is None or (-gang.priority, gang_sort_key(gang)) < (-best.priority, gang_sort_key(best)):
                heads[gang.leaf_project] = gang
            for level in tree.path[gang.leaf_project]:
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
            key = self._pool_state.sibling_key(project, total_demand(self._next_tasks(head)))
            found[key] = head
        return found[min(found)]

    # -- tasks that stay ------------------------------------------------------------------------------

    def _restore_on_same_node(self, task: GangTask) -> None:
        """Restore a task nominated on its own node; whole GPUs are interchangeable, so others swap theirs."""
        place = task.nominated
        if task.state is not GangTaskState.NOMINATED or place is None or not task.held:
            return
        if any(stood.node != place.node for stood in task.held):
            return
        own = {slot for stood in task.held for slot in stood.slots}
        spare = [slot for slot in place.slots if slot not in own]
        missing = own.difference(place.slots)
        if missing and place.milli != WHOLE_MILLI:
            return
        for other in (*self._preemptor_tasks, *self._evicted):
            there = other.nominated
            if (
                other is task
                or other.state is not GangTaskState.NOMINATED
                or there is None
                or there.node != place.node
            ):
                continue
            if taken := missing.intersection(there.slots):
                kept = tuple(slot for slot in there.slots if slot not in taken)
                given = tuple(spare.pop() for _ in taken)
                self._statement.nominate(other, there._replace(slots=tuple(sorted(kept + given))))
                missing -= taken
        self._statement.restore(task)
