"""Place the tasks of a gang, all or none: group by group, domain by domain, shape by shape.

Every action of a decision is tentative: tasks are placed and evicted in a ``Statement``, an undo log, and rolled
back if the action fails. Nothing else changes the state of a task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from scheduler.core.capacity.gang_hardware import ANY_HARDWARE, GangHardware
from scheduler.core.capacity.node_capacity import Bools
from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.model.snapshot import HeldSlots, PendingRow, TaskShape
from scheduler.core.session.gang import (
    ACTIVE_STATES,
    Gang,
    GangTask,
    GangTaskState,
    TaskGroup,
    build_pending_gang,
)
from scheduler.core.session.pool import PoolState
from scheduler.core.session.topology_domains import DomainCandidate


class Statement:
    """The tasks as they were before each change since it was created, newest last."""

    def __init__(self, pool_state: PoolState) -> None:
        self.pool_state = pool_state
        self._log: list[tuple[GangTask, GangTaskState, tuple[HeldSlots, ...], HeldSlots | None]] = []

    def checkpoint(self) -> int:
        """Return a position to roll back to."""
        return len(self._log)

    def rollback(self, checkpoint: int = 0) -> None:
        """Undo all changes since ``checkpoint``."""
        while len(self._log) > checkpoint:
            self._move(*self._log.pop())

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
        self._log.append((task, task.state, task.held, task.nominated))
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
        # it holds its slots until its container is gone
        if state is GangTaskState.RELEASING or (state is GangTaskState.NOMINATED and task.held):
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


class GangPlacer:
    """Places tasks in one pool within a statement."""

    def __init__(self, statement: Statement, *, nominate: bool, idle_only: bool | None = None) -> None:
        """``nominate``: do not allocate but nominate. ``idle_only``: use only slots that are free now."""
        self._idle_only = not nominate if idle_only is None else idle_only
        self._statement = statement
        self._pool_state = statement.pool_state
        self._nominate = nominate
        self._hardware = ANY_HARDWARE
        """Hardware that tasks with ``same_gpus`` use."""

    def place(self, gang: Gang, tasks: Sequence[GangTask], allowed_nodes: Bools | None = None) -> bool:
        """Place every task on nodes of ``allowed_nodes``; return False and change nothing if that fails.

        Preferred nodes are taken if they can take all tasks.
        """
        mark = self._statement.checkpoint()
        preferred = self._on_preferred_nodes(gang, tasks, allowed_nodes)
        places = [each for each in (preferred, DomainCandidate(allowed_nodes)) if each is not None]
        for hardware in self._hardware_choices(gang, tasks):
            self._hardware = hardware
            for within in places:
                if self._place_group(gang.root, tasks, within) and self._is_on_same_gpus(gang, tasks):
                    return True
                self._statement.rollback(mark)
        return False

    def _hardware_choices(self, gang: Gang, tasks: Sequence[GangTask]) -> Iterator[GangHardware]:
        """Yield the hardware to try for these tasks, best first.

        Tasks join the hardware of the others of their gang. Else the nodes that are best for any hardware come
        first, and then the hardware with the least capacity that holds all tasks.
        """
        placer = self._placer()
        counts = Counter(task.shape for task in tasks)
        choices = placer.hardware.choices(counts)
        if len(choices) == 1:
            yield choices[0]
            return
        if joined := self._joined_hardware(gang, tasks):
            yield joined.pop() if len(joined) == 1 else ANY_HARDWARE
            return
        yield ANY_HARDWARE
        capacity = {each: [placer.fit_count(each.restrict(shape)) for shape in counts] for each in choices}
        for each in sorted(choices, key=lambda hardware: sum(capacity[hardware])):
            if all(fits >= count for fits, count in zip(capacity[each], counts.values(), strict=True)):
                yield each

    def _is_on_same_gpus(self, gang: Gang, tasks: Sequence[GangTask]) -> bool:
        """Return False if tasks that were placed on any hardware use several kinds, but must not."""
        return (
            self._hardware is not ANY_HARDWARE
            or len(self._placer().hardware.choices(task.shape for task in tasks)) == 1
            or len(self._joined_hardware(gang, tasks)) > 1
            or len(self._used_hardware(tasks)) == 1
        )

    def _joined_hardware(self, gang: Gang, tasks: Sequence[GangTask]) -> set[GangHardware]:
        """Return the hardware of the gang's tasks other than ``tasks``."""
        mine = set(tasks)
        return self._used_hardware(task for task in gang.tasks if task not in mine)

    def _used_hardware(self, tasks: Iterable[GangTask]) -> set[GangHardware]:
        """Return the hardware that active tasks which need the same GPUs use, or will."""
        active = [task for task in tasks if task.state in ACTIVE_STATES and task.shape.same_gpus]
        return self._placer().hardware.used_by(
            place for task in active for place in ((task.nominated,) if task.nominated else task.held)
        )

    def _on_preferred_nodes(
        self, gang: Gang, tasks: Sequence[GangTask], allowed_nodes: Bools | None
    ) -> DomainCandidate | None:
        """Return the preferred node of each task; None if there is none, or one is not in this pool."""
        names = gang.pending_row.preferred_nodes if gang.pending_row is not None else ()
        if not names:
            return None
        index = {node.name: i for i, node in enumerate(self._placer().nodes)}
        wanted = [index.get(names[task.rank]) if task.rank < len(names) else None for task in tasks]
        chosen = [i for i in wanted if i is not None]
        if len(chosen) < len(tasks):
            return None
        nodes = np.zeros(len(index), dtype=bool)
        nodes[chosen] = True
        by_rank = {task.rank: self._placer().nodes[i].id for task, i in zip(tasks, chosen, strict=True)}
        if any(task.shape.node_affinity not in (None, by_rank[task.rank]) for task in tasks):
            return None
        return DomainCandidate(
            nodes if allowed_nodes is None else nodes & allowed_nodes, node_of_rank=by_rank
        )

    def _placer(self) -> NodePlacer:
        return self._pool_state.available if self._idle_only else self._pool_state.idle_and_releasing

    def _place_group(self, group: TaskGroup, tasks: Sequence[GangTask], within: DomainCandidate) -> bool:
        """Place these tasks of a group in the first domain of its topology that holds them all."""
        if group.topology_constraint is None:
            return self._place_members(group, tasks, within)
        standing = [task for task in group.all_tasks() if task.state in ACTIVE_STATES]
        for choice in self._pool_state.domains.candidates(
            group.topology_constraint, self._placer(), self._by_shape(tasks), standing, within.nodes
        ):
            mark = self._statement.checkpoint()
            preferred_domains = choice.preferred_domains or within.preferred_domains
            if self._place_members(
                group, tasks, DomainCandidate(choice.nodes, preferred_domains, within.node_of_rank)
            ):
                return True
            self._statement.rollback(mark)
        return False

    def _place_members(self, group: TaskGroup, tasks: Sequence[GangTask], within: DomainCandidate) -> bool:
        if group.children:
            parts = [set(child.all_tasks()) for child in group.children]
            return all(
                self._place_group(child, mine, within)
                for child, part in zip(group.children, parts, strict=True)
                if (mine := [task for task in tasks if task in part])
            )
        return all(self._place_by_domain(shape, run, within) for shape, run in self._by_shape(tasks))

    def _place_by_domain(self, shape: TaskShape, tasks: Sequence[GangTask], within: DomainCandidate) -> bool:
        """Place tasks of one shape, filling one preferred domain after the other."""
        if within.node_of_rank:
            return all(
                self._place_alike(
                    shape._replace(node_affinity=within.node_of_rank[task.rank]), [task], within.nodes
                )
                for task in tasks
            )
        preferred_domains = within.preferred_domains
        if self._nominate and self._pool_state.policy.semantics.nominates_idle_nodes_first:
            preferred_domains += (self._pool_state.idle.capacity(shape) > 0,)
        for part in preferred_domains:
            if not tasks:
                break
            nodes = part if within.nodes is None else part & within.nodes
            here = min(len(tasks), int(self._placer().capacity(shape)[nodes].sum()))
            if here and self._place_alike(shape, tasks[:here], nodes):
                tasks = tasks[here:]
        fast = self._pool_state.fast_network_nodes
        if fast is not None and len(tasks) > 1:
            nodes = fast if within.nodes is None else fast & within.nodes
            if self._place_alike(shape, tasks, nodes):
                return True
        return not tasks or self._place_alike(shape, tasks, within.nodes)

    def _place_alike(self, shape: TaskShape, tasks: Sequence[GangTask], allowed_nodes: Bools | None) -> bool:
        placer = self._placer()
        if allowed_nodes is not None:
            closed = np.flatnonzero(~allowed_nodes)
            shape = shape._replace(
                avoid_nodes=tuple(sorted({*shape.avoid_nodes, *(placer.nodes[i].id for i in closed)}))
            )
        gang = tasks[0].gang
        speeds = (
            gang.pending_row.layout_speeds
            if gang.pending_row is not None and len(tasks) == len(gang.tasks)
            else ()
        )
        found = placer.place_gang(
            shape, len(tasks), None if self._idle_only else self._pool_state.idle, speeds
        )
        if found is None:
            return False
        placer.release(found)
        found.sort(key=lambda place: placer.domain_position(place.node))
        assign = self._statement.nominate if self._nominate else self._statement.allocate
        for task, place in zip(tasks, found, strict=True):
            assign(task, place)
        return True

    def _by_shape(self, tasks: Iterable[GangTask]) -> list[tuple[TaskShape, list[GangTask]]]:
        """Group tasks by shape on the chosen hardware, in order of first occurrence."""
        runs: dict[TaskShape, list[GangTask]] = {}
        for task in tasks:
            runs.setdefault(task.shape, []).append(task)
        return [(self._hardware.restrict(shape), run) for shape, run in runs.items()]


def can_be_placed(job: PendingRow, pool_state: PoolState) -> bool:
    """Return True if the tasks of a pending job can be placed together now; change nothing."""
    gang = build_pending_gang(job, pool_state.tree.leaf_of[job.project], pool_state.smallest_gpu_mib)
    statement = Statement(pool_state)
    placed = GangPlacer(statement, nominate=False).place(gang, gang.next_tasks)
    statement.rollback()
    return placed
