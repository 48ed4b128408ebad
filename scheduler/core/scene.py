"""One pool as a decision works on it: its nodes, its ledger, its fair shares, its people."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

from scheduler.core.check import held_by
from scheduler.core.cluster import WHOLE_MILLI, PendingRow, PoolRow, ProjectId, Snapshot, UserId
from scheduler.core.fairshare import Claim, Share, divide_tree
from scheduler.core.ledger import PoolLedger
from scheduler.core.placement import Floor, Shape
from scheduler.core.plan import ShareReceipt
from scheduler.core.policy import Policy
from scheduler.core.tree import Tree
from scheduler.core.usage import PeopleOfProject, project_usage


class PoolScene:
    """Everything about one pool that changes while a plan is made."""

    def __init__(self, snapshot: Snapshot, policy: Policy, tree: Tree, pool: PoolRow) -> None:
        self.pool = pool
        self.tree = tree
        self._snapshot = snapshot
        self._policy = policy
        self._nodes = [node for node in snapshot.nodes if node.pool == pool.id]
        self.strategy = pool.placement or policy.placement
        self.floor = Floor(self._nodes, self.strategy)
        self.running = sorted((r for r in snapshot.running if r.pool == pool.id), key=lambda r: r.job)
        self.quotas = tree.quotas(snapshot.quotas, pool.id)
        self.ledger = PoolLedger(self.quotas, tree.path)
        for row in self.running:
            self.ledger.add(tree.leaf_of[row.project], held_by(row), row.preemptible)
        self.capacity_milli = self._capacity_milli()
        self.usage = project_usage(
            snapshot,
            pool.id,
            {p: tree.path[tree.leaf_of[p]] for p in tree.leaf_of},
            self.capacity_milli,
            policy,
        )
        self.shares: dict[ProjectId, Share] = {}
        self.fair_share_milli: dict[ProjectId, float] = {}
        self.requested_milli: dict[ProjectId, int] = {}
        self._people: dict[ProjectId, PeopleOfProject] = {}

    @cached_property
    def empty_floor(self) -> Floor:
        """The same nodes with nothing on them and all of them ready: what could ever fit."""
        return Floor(self._nodes, self.strategy, empty=True)

    def _capacity_milli(self) -> int:
        """What there is to divide: healthy GPUs of nodes that take work, and what is held elsewhere."""
        total = 0
        for node in self._nodes:
            ready = node.schedulable and node.reachable
            total += sum(WHOLE_MILLI if ready and gpu.healthy else gpu.used_milli for gpu in node.gpus)
        return total

    def divide(self, waiting: Iterable[PendingRow]) -> None:
        """Make the fair shares from what is held and what ``waiting`` asks for."""
        own = dict.fromkeys(self.tree.parent, 0)
        for job in waiting:
            own[self.tree.leaf_of[job.project]] += job.total_milli
        requested = dict.fromkeys(own, 0)
        for project in sorted(own, key=lambda p: -len(self.tree.path[p])):
            if not self.tree.children[project]:
                requested[project] = own[project] + self.ledger.held_milli[project]
            limit = self.quotas[project].limit_milli
            if limit is not None:
                requested[project] = min(limit, requested[project])
            parent = self.tree.parent[project]
            if parent is not None:
                requested[parent] += requested[project]
        self.requested_milli = requested
        self.shares = divide_tree(
            self.capacity_milli,
            [self._claim(project) for project in sorted(requested)],
            self.tree.parent.__getitem__,
            self._policy.usage_weight,
            WHOLE_MILLI,
        )
        self.fair_share_milli = {project: share.amount for project, share in self.shares.items()}

    def _claim(self, project: ProjectId) -> Claim[ProjectId]:
        quota = self.quotas[project]
        return Claim(
            project,
            quota.guaranteed_milli,
            math.inf if quota.limit_milli is None else quota.limit_milli,
            quota.weight,
            quota.priority,
            self.requested_milli[project],
            self.usage.get(project, 0.0),
            self.tree.created_s[project],
        )

    def people_of(self, leaf: ProjectId) -> PeopleOfProject:
        """The people of a leaf project, ranked by their past use in this pool."""
        if not self._people:
            seconds: dict[ProjectId, dict[UserId, list[float]]] = {}
            for row in self._snapshot.usage:
                if row.pool == self.pool.id and row.user is not None:
                    people = seconds.setdefault(self.tree.leaf_of[row.project], {})
                    people.setdefault(row.user, []).append(row.gpu_seconds)
            for each in self.tree.parent:
                totals = {user: math.fsum(rows) for user, rows in seconds.get(each, {}).items()}
                self._people[each] = PeopleOfProject(totals, self._policy.entry_charge_s)
        return self._people[leaf]

    def receipts(self) -> list[ShareReceipt]:
        """How each project's share came about; inner leaves are part of their project."""
        return [
            ShareReceipt(
                project,
                self.pool.id,
                self.quotas[project].guaranteed_milli,
                self.quotas[project].limit_milli,
                self.ledger.held_milli[project],
                self.requested_milli[project],
                share.amount,
                tuple(share.steps),
            )
            for project, share in sorted(self.shares.items())
            if not self.tree.is_inner(project)
        ]

    def could_ever_fit(self, job: PendingRow) -> bool:
        """True when the whole gang fits on this pool's nodes with nothing else on them."""
        shape = Shape.of(job)._replace(avoid_nodes=())
        return int(self.empty_floor.capacity(shape).sum()) >= job.tasks

    def fits_now(self, job: PendingRow) -> bool:
        """True when limits, guarantee and free places let the gang start now."""
        leaf = self.tree.leaf_of[job.project]
        if self.ledger.limit_in_the_way(leaf, job.total_milli):
            return False
        if not job.preemptible and self.ledger.guarantee_in_the_way(leaf, job.total_milli):
            return False
        return int(self.floor.capacity(Shape.of(job)).sum()) >= job.tasks
