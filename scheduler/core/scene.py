"""One pool as a decision works on it: its nodes now and later, its ledger, its fair shares, its gangs.

``now`` is what is free this moment; ``later`` is what is free once everybody who is leaving has left, less the
places that are kept. ``floor`` is what is free on both: whoever starts takes nothing that is kept for another.
Until somebody leaves or keeps a place the three are one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from operator import attrgetter

from scheduler.core.asked import Asked
from scheduler.core.cluster import (
    WHOLE_MILLI,
    Ask,
    JobId,
    Near,
    NodeId,
    NodeRow,
    PendingRow,
    PoolRow,
    ProjectId,
    Snapshot,
    UserId,
)
from scheduler.core.domains import Domains
from scheduler.core.fairshare import Claim, Share, divide_tree
from scheduler.core.gang import Gang, State, Wanted, gang_of_pending, gang_of_running, shape_of, total
from scheduler.core.ledger import PoolLedger
from scheduler.core.memory import Memory
from scheduler.core.order_rules import SiblingKey, sibling_key
from scheduler.core.placement import Floor
from scheduler.core.plan import ShareReceipt
from scheduler.core.policy import Policy
from scheduler.core.resources import NOTHING, Amounts
from scheduler.core.shape import Held, Shape
from scheduler.core.tree import Tree
from scheduler.core.usage import PeopleOfProject, project_usage


class PoolScene:
    """Everything about one pool that changes while a plan is made."""

    def __init__(
        self, snapshot: Snapshot, policy: Policy, tree: Tree, pool: PoolRow, memory: Memory | None = None
    ) -> None:
        self.pool = pool
        self.tree = tree
        self._snapshot = snapshot
        self.policy = policy = policy.in_pool(pool.knobs)
        self._nodes = [node for node in snapshot.nodes if node.pool == pool.id]
        self._resting = {
            node
            for row in snapshot.reservations
            if not row.projects and row.from_s <= snapshot.now_s < row.to_s
            for node in row.nodes
        }
        self.strategy = pool.placement or policy.placement
        self._memory = memory
        self._floor = self._known_floor() or Floor(
            self._nodes, self.strategy, asked=self._asked(), topologies=snapshot.topologies
        )
        if memory is not None:
            memory.floors[pool.id] = self._floor
        self.running = sorted((r for r in snapshot.running if r.pool == pool.id), key=attrgetter("job"))
        self._floor.let_share(None if policy.share_gpus == "anybody" else self.running)
        self._now = self._later = self._floor
        self._torn: set[int] = set()  # nodes on which ``floor`` is older than the other two
        self.changes = 0  # counts every change, so that others know what they know is old
        self.quotas = tree.quotas(snapshot.quotas, pool.id)
        self.ledger = PoolLedger(self.quotas, tree.path)
        self.smallest_gpu_mib = min((gpu.memory_mib for node in self._nodes for gpu in node.gpus), default=1)
        self.gangs: dict[JobId, Gang] = {}
        self._seat_running()
        self.capacity_milli = self._capacity_milli()
        ready = [node for node in self._nodes if self._takes_work(node)]
        self.capacity = Amounts(
            self.capacity_milli, sum(node.cpu_milli for node in ready), sum(node.memory_mib for node in ready)
        )
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
        self._keys: dict[tuple[ProjectId, Amounts], SiblingKey[ProjectId]] = {}
        self._keyed_at = 0  # the changes that these keys know of
        self._roomy: dict[tuple[Near | None, Shape], int] = {}
        self._roomy_at = 0  # and these

    def _asked(self) -> Counter[Ask] | None:
        """What tasks ask here, where the strategy looks at it."""
        if self.strategy != "fragmentation":
            return None
        if self._memory is not None:
            return self._memory.asked.in_pool(self.pool.id)
        asked = Asked()
        asked.change((*self._snapshot.running, *self._snapshot.pending))
        return asked.in_pool(self.pool.id)

    def _known_floor(self) -> Floor | None:
        """The floor of the last decision brought up to date, if it is of these nodes."""
        known = self._memory.floors.get(self.pool.id) if self._memory is not None else None
        if known is None or (known.strategy, known.topologies) != (self.strategy, self._snapshot.topologies):
            return None
        if not known.refresh(self._nodes, self._asked()):
            return None
        return known

    def _seat_running(self) -> None:
        """Take running jobs in: what they hold is counted, what those who leave hold is free later."""
        memory = self._memory
        known = [None] * len(self.running) if memory is None else memory.running(self.running, self._floor)
        standing: dict[tuple[ProjectId, UserId, bool], Amounts] = {}
        for row, gang in zip(self.running, known, strict=True):
            if gang is None:
                held = [tuple(self._floor.held_by((task,))) for task in row.tasks]
                gang = gang_of_running(row, self.tree.leaf_of[row.project], held)
            self.gangs[row.job] = gang
            for task in gang.tasks:
                if task.state is State.RUNS:
                    whose = (gang.leaf, gang.user, gang.preemptible)
                    standing[whose] = standing.get(whose, NOTHING).plus(task.amounts)
                else:
                    asked = row.stopping_for is not None
                    self.ledger.add_leaving(gang.leaf, gang.user, task.amounts, gang.preemptible, asked=asked)
                    for place in task.held:
                        self.change_later(place, +1)
        for (leaf, user, preemptible), amounts in standing.items():
            self.ledger.add(leaf, user, amounts, preemptible)
        if memory is not None:
            memory.keep_running(self.gangs.values())

    # -- now and later --------------------------------------------------------------------------------

    @property
    def split(self) -> bool:
        """True when ``later`` differs from now: somebody leaves."""
        return self._later is not self._floor

    @property
    def floor(self) -> Floor:
        """What is free now and later."""
        if self._torn:
            self._floor.set_to_least(self._now, self._later, self._torn)
            self._torn.clear()
        return self._floor

    @property
    def later(self) -> Floor:
        """What is free once everybody who is leaving has left."""
        if not self.split:
            self._now = self._floor.copy()
            self._later = self._floor.copy()
        return self._later

    @property
    def now(self) -> Floor:
        """What is free this moment, kept or not."""
        return self._now

    def change_now(self, place: Held, sign: int) -> None:
        """Take (-1) or give back (+1) a place for good."""
        if self.split:
            self._now.change(place, sign)
            self._later.change(place, sign)
            self._torn.add(place.node)
        else:
            self._floor.change(place, sign)

    def change_later(self, place: Held, sign: int) -> None:
        """Take or give back a place of ``later`` only."""
        self.later.change(place, sign)
        self._torn.add(place.node)

    @cached_property
    def empty_floor(self) -> Floor:
        """The same nodes with nothing on them and all of them ready: what could ever fit."""
        return Floor(self._nodes, self.strategy, empty=True)

    @cached_property
    def domains(self) -> Domains:
        """Who stands near whom here."""
        return Domains(self._snapshot.topologies, self._floor.nodes)

    def _takes_work(self, node: NodeRow) -> bool:
        """False for a node that is out of service, also by a reservation for nobody."""
        return node.schedulable and node.reachable and node.id not in self._resting

    def _capacity_milli(self) -> int:
        """What there is to divide: healthy GPUs of nodes that take work, and what is held elsewhere."""
        total = 0
        for node in self._nodes:
            ready = self._takes_work(node)
            total += sum(WHOLE_MILLI if ready and gpu.healthy else gpu.used_milli for gpu in node.gpus)
        return total

    def divide(self, waiting: Iterable[Sequence[Gang]]) -> None:
        """Make the fair shares from what is held and what ``waiting`` asks for, gangs of a kind together."""
        asked = dict.fromkeys(self.tree.parent, NOTHING)
        alike: Counter[tuple[ProjectId, Amounts]] = Counter()
        people: list[tuple[ProjectId, dict[UserId, float]]] = [(level, {}) for level in self.ledger.people]
        for group in waiting:
            gang, count = group[0], len(group)
            amounts = gang.waiting
            alike[gang.leaf, amounts] += count
            for level, mine in people:
                if level in self.tree.path[gang.leaf]:
                    mine[gang.user] = mine.get(gang.user, 0.0) + count * amounts.gpu_milli
        for (leaf, amounts), count in alike.items():
            asked[leaf] = asked[leaf].plus(amounts.times(count))
        most = {level: self.ledger.people[level].may_hold(mine) for level, mine in people}
        shares = [self._divide_one(resource, asked, {} if resource else most) for resource in (0, 1, 2)]
        self.shares = shares[0]
        self.fair_share_milli = {project: share.amount for project, share in self.shares.items()}
        self._keys.clear()
        self.ledger.divide(
            {
                p: Amounts(*(each[p].amount if each else math.inf for each in shares))
                for p in self.tree.parent
            },
            self.tree.created_s,
        )

    def _divide_one(
        self, resource: int, asked: dict[ProjectId, Amounts], most: dict[ProjectId, float]
    ) -> dict[ProjectId, Share]:
        """The shares of one resource; none where no quota bounds it. ``most`` is what people may hold together."""
        if resource and not any((q.cpu, q.memory)[resource - 1] for q in self.quotas.values()):
            return {}
        ledger = self.ledger
        requested = dict.fromkeys(asked, 0.0)
        for project in sorted(asked, key=lambda p: -len(self.tree.path[p])):
            if not self.tree.children[project]:
                held = ledger.held[project][resource] + ledger.leaving[project][resource]
                requested[project] = asked[project][resource] + held
            limit = min(ledger.limit[project][resource], most.get(project, math.inf))
            requested[project] = min(limit, requested[project])
            parent = self.tree.parent[project]
            if parent is not None:
                requested[parent] += requested[project]
        if resource == 0:
            self.requested_milli = {project: int(amount) for project, amount in requested.items()}
        return divide_tree(
            self.capacity[resource],
            [self._claim(project, resource, requested[project]) for project in sorted(requested)],
            self.tree.parent.__getitem__,
            0.0 if resource else self.policy.usage_weight,
            1 if resource else WHOLE_MILLI,
            whole_remainder=self.policy.whole_remainder,
        )

    def _claim(self, project: ProjectId, resource: int, requested: float) -> Claim[ProjectId]:
        quota = self.quotas[project]
        bounds = (None, quota.cpu, quota.memory)[resource]
        return Claim(
            project,
            self.ledger.guaranteed[project][resource],
            self.ledger.limit[project][resource],
            bounds.weight if bounds else 1.0 if resource else quota.weight,
            quota.priority,
            requested,
            0.0 if resource else self.usage.get(project, 0.0),
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
                self._people[each] = PeopleOfProject(totals, self.policy.entry_charge_s)
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

    def could_ever_fit(self, job: PendingRow) -> bool:
        """True when the gang fits on this pool's fit nodes with nothing else on them, each task by itself."""
        floor = self.empty_floor
        if job.groups:
            gang = gang_of_pending(job, self.tree.leaf_of[job.project], self.smallest_gpu_mib)
            asked = Counter(task.shape._replace(avoid_nodes=avoid_at_best(job)) for task in gang.to_place())
            return all(floor.room(shape) >= count for shape, count in asked.items())
        if not job.asks:
            return self.domains.most_together(job.near, floor, self.shape_at_best(job)) >= job.least
        shapes = {
            shape_of(ask, job.project, avoid_at_best(job), job.node_affinity, self.smallest_gpu_mib)[0]
            for ask in job.asks
        }
        return all(floor.room(shape) >= 1 for shape in shapes)

    def would_fit_empty(self, job: PendingRow) -> bool:
        """True when the gang would fit on the nodes open to it if nothing else stood there; groups count as one."""
        return self.domains.most_together(job.near, self.empty_floor, self.shape(job)) >= job.least

    def shape_at_best(self, job: PendingRow) -> Shape:
        """A job's shape here, on a cluster where nothing is avoided that could ever run it."""
        return self.shape(job)._replace(avoid_nodes=avoid_at_best(job))

    def shape(self, job: PendingRow) -> Shape:
        """What one task of the job asks in this pool."""
        return self._shape_and_amounts(job)[0]

    def _shape_and_amounts(self, job: PendingRow) -> tuple[Shape, Amounts]:
        """Of one task of a job whose tasks are alike."""
        avoid = tuple(sorted(job.avoid_nodes))
        return shape_of(job.ask, job.project, avoid, job.node_affinity, self.smallest_gpu_mib)

    def amounts(self, job: PendingRow) -> Amounts:
        """What of the job must start together counts for in this pool's ledger."""
        if not (job.asks or job.groups):
            return self._shape_and_amounts(job)[1].times(job.least)
        gang = gang_of_pending(job, self.tree.leaf_of[job.project], self.smallest_gpu_mib)
        return total(gang.tasks)

    def fits_now(self, job: PendingRow) -> bool:
        """True when limits, guarantee and free places let the gang start now."""
        if not (job.asks or job.groups):
            return self.alike_fit_now(job, self.wanted(job))
        leaf = self.tree.leaf_of[job.project]
        gang = gang_of_pending(job, leaf, self.smallest_gpu_mib)
        wanted = gang.to_place()
        if not wanted or self.ledger.closed_to(leaf, job.user, total(wanted), job.preemptible):
            return False
        return self.floor.room(wanted[0].shape) >= len(wanted)

    def gang_fits_now(self, gang: Gang) -> bool:
        """``fits_now`` of a waiting gang, with what is known of its tasks already."""
        if gang.row is None:
            return False
        if gang.plain and gang.row.share_mib is None:
            task, row = gang.tasks[0], gang.row
            wanted = Wanted(task.shape, task.amounts, len(gang.to_place()), row.near, row.preemptible)
            return self.alike_fit_now(row, wanted)
        return self.fits_now(gang.row)

    def wanted(self, job: PendingRow) -> Wanted:
        """What a job whose tasks are alike wants here: as many as it needs."""
        return Wanted(*self._shape_and_amounts(job), job.least, job.near, job.preemptible)

    def alike_fit_now(self, job: PendingRow, wanted: Wanted) -> bool:
        """True when limits, guarantee and free places let the project and person of ``job`` start so much now."""
        if self._together(wanted.near, wanted.shape) < wanted.tasks:
            return False
        leaf, amounts = self.tree.leaf_of[job.project], wanted.each.times(wanted.tasks)
        return not self.ledger.closed_to(leaf, job.user, amounts, wanted.preemptible)

    def _together(self, near: Near | None, shape: Shape) -> int:
        """How many tasks fit now as near together as they must stand; worked out once until something changes."""
        if self._roomy_at != self.changes:
            self._roomy_at = self.changes
            self._roomy.clear()
        known = self._roomy.get((near, shape))
        if known is None:
            known = self._roomy[near, shape] = self.domains.most_together(near, self.floor, shape)
        return known

    def person_passes(self, gang: Gang) -> bool:
        """True when the gang's person would hold more than one may, and some of it only comes by this plan.

        What somebody held already, before the number was lowered, is nobody's reason to leave.
        """
        over = self.ledger.levels_over(gang.leaf, gang.user)
        return bool(over) and any(
            each.user == gang.user
            and not set(over).isdisjoint(self.tree.path[each.leaf])
            and any(task.state is State.STARTS or (task.kept and not task.held) for task in each.tasks)
            for each in (gang, *self.gangs.values())  # one that is only being seated stands in no list yet
        )

    def sibling_key(self, project: ProjectId, asked: Amounts) -> SiblingKey[ProjectId]:
        """Where ``project`` stands among its siblings now, when its next job asks for so much."""
        if self._keyed_at != self.changes:
            self._keyed_at = self.changes
            self._keys.clear()
        known = self._keys.get((project, asked))
        if known is None:
            owed, held = self.ledger.owed[project], self.ledger.held[project]
            involved_only = self.policy.involved_only
            known = sibling_key(project, owed, held, asked, self.capacity, involved_only=involved_only)
            self._keys[project, asked] = known
        return known

    def within_share(self, leaf: ProjectId, amounts: Amounts) -> bool:
        """True when the project and all above it stay within their fair shares with so much more."""
        ledger = self.ledger
        return all(
            ledger.held[level].plus(amounts).fits_in(ledger.owed[level].fair_share)
            for level in self.tree.path[leaf]
        )

    def _allocated_milli(self, project: ProjectId) -> int:
        return int(self.ledger.held[project].gpu_milli + self.ledger.leaving[project].gpu_milli)


def counting_people(scenes: Iterable[PoolScene]) -> frozenset[ProjectId]:
    """The leaf projects in which it matters, in some pool, who asks: a quota bounds what one person holds."""
    return frozenset(
        leaf
        for scene in scenes
        if scene.ledger.people
        for leaf in scene.tree.path
        if scene.ledger.counts_people(leaf)
    )


def avoid_at_best(job: PendingRow) -> tuple[NodeId, ...]:
    """The nodes that can never run it."""
    return tuple(sorted(job.unfit_nodes))
