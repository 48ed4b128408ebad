"""One pool as a decision works on it: its nodes, its ledger, its fair shares, its people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

from scheduler.core.check import held_by
from scheduler.core.cluster import WHOLE_MILLI, Ask, PendingRow, PoolRow, ProjectId, Snapshot, UserId
from scheduler.core.fairshare import Claim, Share, divide_tree
from scheduler.core.fragmentation import asked_in
from scheduler.core.ledger import Gone, PoolLedger
from scheduler.core.placement import Floor, Held, Shape
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
        self.floor = Floor(self._nodes, self.strategy, asked=self._asked(), topologies=snapshot.topologies)
        self.running = sorted((r for r in snapshot.running if r.pool == pool.id), key=lambda r: r.job)
        self.quotas = tree.quotas(snapshot.quotas, pool.id)
        self.ledger = PoolLedger(self.quotas, tree.path)
        for row in self.running:
            leaf, milli = tree.leaf_of[row.project], held_by(row)
            self.ledger.add(leaf, milli, row.preemptible)
            if row.stopping:
                self.ledger.leave(leaf, milli, row.preemptible, asked=row.stopping_for is not None)
        self._now: Floor | None = None
        self._later: Floor | None = None
        if any(row.stopping for row in self.running):
            self.later()
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

    def _asked(self) -> Counter[Ask] | None:
        """What tasks ask here, where the strategy looks at it."""
        if self.strategy != "fragmentation":
            return None
        return asked_in(self.pool.id, self._snapshot.running, self._snapshot.pending)

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
                requested[project] = own[project] + self._allocated_milli(project)
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
                self._allocated_milli(project),
                self.requested_milli[project],
                share.amount,
                tuple(share.steps),
            )
            for project, share in sorted(self.shares.items())
            if not self.tree.is_inner(project)
        ]

    def within_share(self, leaf: ProjectId, milli: int) -> bool:
        """True when the project and all above it stay within their fair shares with ``milli`` more."""
        held, share = self.ledger.held_milli, self.fair_share_milli
        return all(held[level] + milli <= share[level] + 1e-6 for level in self.tree.path[leaf])

    def could_ever_fit(self, job: PendingRow) -> bool:
        """True when the whole gang fits on this pool's fit nodes with nothing else on them."""
        shape = Shape.at_best(job)
        return int(self.empty_floor.capacity(shape).sum()) >= job.tasks

    def fits_now(self, job: PendingRow) -> bool:
        """True when limits, guarantee and free places let the gang start now."""
        leaf = self.tree.leaf_of[job.project]
        if self.ledger.closed_to(leaf, job.total_milli, job.preemptible):
            return False
        return int(self.floor.capacity(Shape.of(job)).sum()) >= job.tasks

    # -- now and later --------------------------------------------------------------------------------
    # ``later`` is what is free once everybody who was asked to leave has left. A waiting job that fits only
    # then keeps its place there, and ``floor`` is what is free both now and later: nobody smaller takes it.

    def later(self) -> Floor:
        """The floor once everybody who is leaving has left."""
        if self._later is None:
            self._now = self.floor.copy()
            self._later = self.floor.copy()
            for row in self.running:
                if row.stopping:
                    self._later.give_back(self._later.held_by(row.tasks))
        return self._later

    def fits_places_now(self, shape: Shape, tasks: int) -> bool:
        """True when a gang finds free places, limits aside."""
        return int(self.floor.capacity(shape).sum()) >= tasks

    def fits_places_later(self, shape: Shape, tasks: int) -> bool:
        """True when a gang finds places once those who are leaving have left; false when nobody is."""
        return self.somebody_leaves and int(self.later().capacity(shape).sum()) >= tasks

    @property
    def somebody_leaves(self) -> bool:
        """True when ``later`` differs from now."""
        return self._later is not None

    def start(self, job: PendingRow) -> list[Held] | None:
        """Take places that are free now for the whole gang and count it, or None and nothing changed."""
        held = self.floor.place_gang(Shape.of(job), job.tasks)
        if held is not None:
            if self._later is not None and self._now is not None:
                for one in held:
                    self._later.change(one, -1)
                    self._now.change(one, -1)
            self.ledger.add(self.tree.leaf_of[job.project], job.total_milli, job.preemptible)
        return held

    def fits_later(self, job: PendingRow) -> bool:
        """True when the gang could start once everybody who is leaving has left."""
        leaf = self.tree.leaf_of[job.project]
        if self.ledger.closed_to(leaf, job.total_milli, job.preemptible, gone=Gone.EVERYBODY):
            return False
        return int(self.later().capacity(Shape.of(job)).sum()) >= job.tasks

    def keep(self, job: PendingRow) -> list[Held]:
        """Keep places of ``later`` for the gang, which ``fits_later``; nobody else gets what is free of them."""
        held = self.later().place_gang(Shape.of(job), job.tasks, rather_not=self._now)
        if held is None:
            raise LookupError(f"{job.job} does not fit later")
        self._settle(held)
        self.ledger.add(self.tree.leaf_of[job.project], job.total_milli, job.preemptible)
        return held

    def keep_there(self, job: PendingRow, held: Sequence[Held]) -> None:
        """Keep exactly the places that ``let_go`` gave up."""
        for one in held:
            self.later().change(one, -1)
        self._settle(held)
        self.ledger.add(self.tree.leaf_of[job.project], job.total_milli, job.preemptible)

    def let_go(self, job: PendingRow, held: Sequence[Held]) -> None:
        """Give up the place that a job keeps."""
        self.later().give_back(held)
        self._settle(held)
        self.ledger.add(self.tree.leaf_of[job.project], -job.total_milli, job.preemptible)

    def take_back(self, held: Sequence[Held]) -> None:
        """Free the places of a start that will not be; ``later`` and the ledger know already."""
        self.later()
        if self._now is not None:
            self._now.give_back(held)
        self._settle(held)

    def _settle(self, held: Sequence[Held]) -> None:
        """Make the floor of the touched nodes anew."""
        if self._now is not None and self._later is not None:
            self.floor.set_to_least(self._now, self._later, (one.node for one in held))

    def _allocated_milli(self, project: ProjectId) -> int:
        return self.ledger.held_milli[project] + self.ledger.leaving_milli[project]
