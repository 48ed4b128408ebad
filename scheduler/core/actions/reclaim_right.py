"""What a job may take from other projects, by the rules of guarantees and fair shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from scheduler.core.model.resources import ResourceVector
from scheduler.core.model.snapshot import JobId, ProjectId
from scheduler.core.session.gang import Gang, GangTask, total_demand
from scheduler.core.session.pool import PoolState
from scheduler.core.shares.reclaim_rules import ReclaimCheck, is_within_guarantee, may_reclaim


class ReclaimRight:
    """What a gang can take from other projects, computed from what all projects hold when it is created."""

    def __init__(
        self, pool_state: PoolState, gang: Gang, asked: ResourceVector, *, is_placed: bool = False
    ) -> None:
        """``is_placed``: the ledger of the pool already counts ``asked`` as held by the gang's project."""
        ledger, leaf = pool_state.ledger, gang.leaf_project
        held, held_non_preemptible = dict(ledger.held), dict(ledger.held_non_preemptible)
        for level in pool_state.tree.path[leaf] if is_placed else ():
            held[level] = held[level].subtract(asked)
            if not gang.preemptible:
                held_non_preemptible[level] = held_non_preemptible[level].subtract(asked)
        self.exists = may_reclaim(
            ledger.entitlements[leaf], held[leaf], held_non_preemptible[leaf], asked, gang.preemptible
        )
        """False if the gang may reclaim from nobody."""
        self._leaf = leaf
        self._new_check = partial(
            ReclaimCheck[ProjectId],
            pool_state.tree.path,
            ledger.entitlements,
            held,
            held_non_preemptible,
            leaf,
            asked,
            gang.preemptible,
        )
        self._first_check = self._new_check()
        within = is_within_guarantee(ledger.entitlements[leaf], held[leaf], asked)
        self.kind = "guaranteed" if within else "reclaim"
        """The protections that hold, as in ``VictimCandidates.in_project``."""

    def may_have_reclaimable(self, leaf: ProjectId) -> bool:
        """Return False if certainly no work of ``leaf`` can be reclaimed."""
        return leaf != self._leaf and self._first_check.may_have_reclaimable(leaf)

    def covers(self, tasks: Sequence[GangTask], released: Sequence[GangTask] = ()) -> bool:
        """Return True if the rules allow the gang to reclaim the resources of all these tasks, one after the other.

        ``released`` are further tasks, whose resources the ledger no longer counts as held.
        """
        reclaim_check = self._new_check()
        if released:
            held = dict(reclaim_check.held)
            for task in released:
                for level in reclaim_check.paths[task.gang.leaf_project]:
                    held[level] = held[level].add(task.amounts)
            reclaim_check.held = held
        for victim, lost in group_by_gang([*tasks, *released]):
            for amounts in _pieces(victim, lost):
                if not reclaim_check.allows(victim.leaf_project):
                    return False
                reclaim_check.add_victim(victim.leaf_project, amounts)
        return reclaim_check.is_balanced()


def group_by_gang(tasks: Iterable[GangTask]) -> list[tuple[Gang, list[GangTask]]]:
    """Return each gang with its tasks among these, in the order in which the gangs first occur."""
    found: dict[JobId, tuple[Gang, list[GangTask]]] = {}
    for task in tasks:
        found.setdefault(task.gang.job, (task.gang, []))[1].append(task)
    return list(found.values())


def _pieces(gang: Gang, tasks: Sequence[GangTask]) -> list[ResourceVector]:
    """Return the demands that the reclaim rules check: each task beyond the minimum, then the rest as one."""
    beyond = max(0, len(tasks) - gang.root.required_members) if not gang.root.children else 0
    pieces = [task.amounts for task in tasks[:beyond]]
    rest = tasks[beyond:]
    return [*pieces, total_demand(rest)] if rest else pieces
