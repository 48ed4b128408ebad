"""The state of one pool within a decision: free capacity, ledger, fair shares and gangs.

``idle`` is the capacity free now. ``idle_and_releasing`` is the capacity free once all releasing tasks are
gone, less nominated slots. ``available`` is free in both: a start takes nothing that is nominated for another
job. While nothing is releasing or nominated, the three are one object.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from scheduler.core.capacity.node_capacity import Bools
from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.model.plan import FairShareBreakdown
from scheduler.core.model.policy import Policy
from scheduler.core.model.project_tree import ProjectTree
from scheduler.core.model.resources import ZERO, ResourceVector
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    HeldSlots,
    JobId,
    NodeId,
    NodeRow,
    PendingRow,
    PoolRow,
    ProjectId,
    Snapshot,
    TaskShape,
    TopologyConstraint,
    UserId,
)
from scheduler.core.session.cache import DecisionCache
from scheduler.core.session.gang import (
    BatchRequest,
    Gang,
    GangTaskState,
    build_pending_gang,
    build_running_gang,
    build_task_shape,
    total_demand,
)
from scheduler.core.session.topology_domains import TopologyDomains
from scheduler.core.shares.fairshare import Claim, FairShare, ProjectUsers, divide_tree, project_usage
from scheduler.core.shares.quota_ledger import AssumeReleased, ExceededQuota, PoolLedger
from scheduler.core.shares.sibling_order import SiblingKey, sibling_key

_NO_AMOUNTS: dict[str, Any] = {"gpus": 0, "cpu_milli": 0, "memory_mib": 0}


def _is_at_least(shape: TaskShape, other: TaskShape) -> bool:
    """Return True if a task of ``shape`` needs no less of any amount than one of ``other``."""
    mine, least = shape.request, other.request
    return (
        mine.total_milli >= least.total_milli
        and mine.gpus >= least.gpus
        and mine.cpu_milli >= least.cpu_milli
        and mine.memory_mib >= least.memory_mib
    )


class PoolState:
    """The state of one pool that changes during a decision."""

    def __init__(
        self,
        snapshot: Snapshot,
        policy: Policy,
        tree: ProjectTree,
        pool: PoolRow,
        cache: DecisionCache,
    ) -> None:
        self.pool = pool
        self.tree = tree
        self._snapshot = snapshot
        self.policy = policy = policy.for_pool(pool.settings)
        self._nodes = [node for node in snapshot.nodes if node.pool == pool.id]
        self._in_maintenance = {
            node
            for row in snapshot.reservations
            if not row.projects and row.start_s <= snapshot.now_s < row.end_s
            for node in row.nodes
        }
        self.strategy = pool.placement or policy.placement
        self._cache = cache
        self._available = cache.placers[pool.id] = self._current_placer()
        self.running = sorted((r for r in snapshot.running if r.pool == pool.id), key=attrgetter("job"))
        self._available.load_tenants(None if policy.gpu_sharing_scope == "any" else self.running)
        self.idle = self._idle_and_releasing = self._available
        """Capacity that is free now, nominated or not."""
        self._outdated_nodes: set[int] = set()  # where ``available`` is out of date
        self.version = 0  # incremented by every change, to invalidate caches
        self.quotas = tree.quotas_in_pool(snapshot.quotas, pool.id)
        self.ledger = PoolLedger(self.quotas, tree.path)
        self.smallest_gpu_mib = min((gpu.memory_mib for node in self._nodes for gpu in node.gpus), default=1)
        self.gangs: dict[JobId, Gang] = {}
        self._load_running()
        self.capacity_milli = self._capacity_milli()
        ready = [node for node in self._nodes if self._accepts_jobs(node)]
        self.capacity = ResourceVector(
            self.capacity_milli, sum(node.cpu_milli for node in ready), sum(node.memory_mib for node in ready)
        )
        ancestors = {project: tree.path[leaf] for project, leaf in tree.leaf_of.items()}
        self.usage = project_usage(snapshot, pool.id, ancestors, self.capacity_milli, policy)
        self.shares: dict[ProjectId, FairShare] = {}
        self.fair_share_milli: dict[ProjectId, float] = {}
        self.requested_milli: dict[ProjectId, int] = {}
        self._users: dict[ProjectId, ProjectUsers] = {}
        self._sibling_keys: dict[tuple[ProjectId, ResourceVector], SiblingKey[ProjectId]] = {}
        self._max_together: dict[tuple[TopologyConstraint | None, TaskShape], int] = {}
        self._cached_version = 0  # the version that both are valid for

    @cached_property
    def fast_network_nodes(self) -> Bools | None:
        """The nodes that gangs prefer, by index; None if no network of the pool is slow."""
        fast = np.array([not node.slow_network for node in self._available.nodes], dtype=bool)
        return None if fast.all() else fast

    def _current_placer(self) -> NodePlacer:
        """Return the placer of the last decision, brought up to date, if its nodes are the same; else a new one."""
        known, topologies = self._cache.placers.get(self.pool.id), self._snapshot.topologies
        demand = self._cache.demand.in_pool(self.pool.id) if self.strategy == "fragmentation" else None
        if (
            known is not None
            and (known.strategy, known.topologies) == (self.strategy, topologies)
            and known.refresh(self._nodes, demand)
        ):
            return known
        return NodePlacer(self._nodes, self.strategy, demand=demand, topologies=topologies)

    def _load_running(self) -> None:
        """Load running jobs: add what they hold to the ledger, and what stopping ones will release."""
        known = self._cache.running_gangs(self.running, self._available)
        standing: dict[tuple[ProjectId, UserId, bool], ResourceVector] = {}
        for row, gang in zip(self.running, known, strict=True):
            if gang is None:
                held = [tuple(self._available.slots_held_by((task,))) for task in row.tasks]
                gang = build_running_gang(row, self.tree.leaf_of[row.project], held)
            self.gangs[row.job] = gang
            for task in gang.tasks:
                if task.state is GangTaskState.RUNNING:
                    owner = (gang.leaf_project, gang.user, gang.preemptible)
                    standing[owner] = standing.get(owner, ZERO).add(task.amounts)
                else:
                    asked = row.preempted_for is not None
                    self.ledger.add_releasing(
                        gang.leaf_project, gang.user, task.amounts, gang.preemptible, evicted=asked
                    )
                    for place in task.held:
                        self.adjust_releasing(place, +1)
        for (leaf, user, preemptible), amounts in standing.items():
            self.ledger.add(leaf, user, amounts, preemptible)
        self._cache.store_running(self.gangs.values())

    # -- capacity now and later -----------------------------------------------------------------------

    @property
    def has_releasing(self) -> bool:
        """True if anything is releasing or nominated, so that ``idle_and_releasing`` is a separate object."""
        return self._idle_and_releasing is not self._available

    @property
    def available(self) -> NodePlacer:
        """Capacity that is free both now and after all releases."""
        if self._outdated_nodes:
            self._available.set_to_min_of(self.idle, self._idle_and_releasing, self._outdated_nodes)
            self._outdated_nodes.clear()
        return self._available

    @property
    def idle_and_releasing(self) -> NodePlacer:
        """Capacity that is free once all releasing tasks are gone, less nominated slots."""
        if not self.has_releasing:
            self.idle = self._available.copy()
            self._idle_and_releasing = self._available.copy()
        return self._idle_and_releasing

    def adjust_idle(self, place: HeldSlots, sign: int) -> None:
        """Take (-1) or release (+1) slots, now and later."""
        if self.has_releasing:
            self.idle.adjust(place, sign)
            self._idle_and_releasing.adjust(place, sign)
            self._outdated_nodes.add(place.node)
        else:
            self._available.adjust(place, sign)

    def adjust_idle_only(self, place: HeldSlots, sign: int) -> None:
        """Take (-1) or release (+1) slots now, but not in ``idle_and_releasing``."""
        self.adjust_idle(place, sign)
        self.adjust_releasing(place, -sign)

    def adjust_releasing(self, place: HeldSlots, sign: int) -> None:
        """Take (-1) or release (+1) slots of ``idle_and_releasing`` only."""
        self.idle_and_releasing.adjust(place, sign)
        self._outdated_nodes.add(place.node)

    @cached_property
    def empty(self) -> NodePlacer:
        """The same nodes, ready and without any use: what could ever fit."""
        return NodePlacer(self._nodes, self.strategy, empty=True)

    @cached_property
    def domains(self) -> TopologyDomains:
        return TopologyDomains(self._snapshot.topologies, self._available.nodes)

    def _accepts_jobs(self, node: NodeRow) -> bool:
        """Return False for a node out of service or in maintenance."""
        return node.schedulable and node.reachable and node.id not in self._in_maintenance

    def _capacity_milli(self) -> int:
        """Return the milli to divide: healthy GPUs of nodes that accept jobs, and what is held on others."""
        total = 0
        for node in self._nodes:
            ready = self._accepts_jobs(node)
            total += sum(WHOLE_MILLI if ready and gpu.healthy else gpu.used_milli for gpu in node.gpus)
        return total

    def compute_shares(self, waiting: Iterable[Sequence[Gang]]) -> None:
        """Compute fair shares from held resources and the demand of ``waiting`` (gangs by class)."""
        asked = dict.fromkeys(self.tree.parent, ZERO)
        alike: Counter[tuple[ProjectId, ResourceVector]] = Counter()
        users: list[tuple[ProjectId, dict[UserId, float]]] = [
            (level, {}) for level in self.ledger.user_holdings
        ]
        for group in waiting:
            gang, count = group[0], len(group)
            amounts = gang.pending_demand
            alike[gang.leaf_project, amounts] += count
            for level, mine in users:
                if level in self.tree.path[gang.leaf_project]:
                    mine[gang.user] = mine.get(gang.user, 0.0) + count * amounts.gpu_milli
        for (leaf, amounts), count in alike.items():
            asked[leaf] = asked[leaf].add(amounts.multiply(count))
        most = {level: self.ledger.user_holdings[level].requestable(mine) for level, mine in users}
        shares = [self._divide_resource(resource, asked, {} if resource else most) for resource in (0, 1, 2)]
        self.shares = shares[0]
        self.fair_share_milli = {project: share.amount for project, share in self.shares.items()}
        self._sibling_keys.clear()
        self.ledger.set_fair_shares(
            {
                p: ResourceVector(*(each[p].amount if each else math.inf for each in shares))
                for p in self.tree.parent
            },
            self.tree.created_s,
        )

    def _divide_resource(
        self, resource: int, asked: dict[ProjectId, ResourceVector], most: dict[ProjectId, float]
    ) -> dict[ProjectId, FairShare]:
        """Divide one resource; empty if no quota bounds it. ``most`` caps requests by user limits."""
        if resource and not any((q.cpu, q.memory)[resource - 1] for q in self.quotas.values()):
            return {}
        ledger = self.ledger
        requested = dict.fromkeys(asked, 0.0)
        for project in sorted(asked, key=lambda p: -len(self.tree.path[p])):
            if not self.tree.children[project]:
                held = ledger.held[project][resource] + ledger.releasing[project][resource]
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

    def users_of(self, leaf: ProjectId) -> ProjectUsers:
        """Return the users of a leaf project, ranked by past usage in this pool."""
        if not self._users:
            seconds: dict[ProjectId, dict[UserId, list[float]]] = {}
            for row in self._snapshot.usage:
                if row.pool == self.pool.id and row.user is not None:
                    users = seconds.setdefault(self.tree.leaf_of[row.project], {})
                    users.setdefault(row.user, []).append(row.gpu_seconds)
            for each in self.tree.parent:
                totals = {user: math.fsum(rows) for user, rows in seconds.get(each, {}).items()}
                self._users[each] = ProjectUsers(totals, self.policy.start_charge_s)
        return self._users[leaf]

    def share_breakdowns(self) -> list[FairShareBreakdown]:
        """Return the fair-share breakdown of each project; internal leaves are part of their project.

        What is held is that of now, without what stopping jobs release: what the reclaim rules compare with shares.
        """
        return [
            FairShareBreakdown(
                project,
                self.pool.id,
                self.quotas[project].guaranteed_milli,
                self.quotas[project].limit_milli,
                int(self.ledger.held[project].gpu_milli),
                self.requested_milli[project],
                share.amount,
                tuple(share.steps),
            )
            for project, share in sorted(self.shares.items())
            if not self.tree.is_own_leaf(project)
        ]

    def could_ever_fit(self, job: PendingRow) -> bool:
        """Return True if each task of the gang fits on eligible nodes of the empty pool."""
        placer = self.empty
        if job.groups:
            gang = build_pending_gang(job, self.tree.leaf_of[job.project], self.smallest_gpu_mib)
            asked = Counter(
                task.shape._replace(avoid_nodes=ineligible_nodes(job)) for task in gang.next_tasks
            )
            return any(
                all(placer.fit_count(each.restrict(shape)) >= count for shape, count in asked.items())
                for each in placer.hardware.choices(asked)
            )
        if not job.task_requests:
            return (
                self.domains.max_tasks_together(job.topology_constraint, placer, self.unrestricted_shape(job))
                >= job.required_tasks
            )
        return self._may_fit_together(job, placer, ineligible_nodes(job))

    def _may_fit_together(self, job: PendingRow, placer: NodePlacer, avoid: tuple[NodeId, ...]) -> bool:
        """Return False if the required tasks of a gang of several shapes cannot all be placed.

        Compares counts only: the tasks at least as large as each shape, and the sum of each resource in units
        that divide all its amounts. A gang that passes may still fail to fit.
        """
        shapes = self.shape_counts(job, avoid)
        if job.required_tasks < job.tasks or job.ranks:
            return all(placer.fit_count(shape) >= 1 for shape in shapes)
        return any(
            self._may_fit_on_hardware(job, placer, {each.restrict(shape): n for shape, n in shapes.items()})
            for each in placer.hardware.choices(shapes)
        )

    def _may_fit_on_hardware(
        self, job: PendingRow, placer: NodePlacer, shapes: Mapping[TaskShape, int]
    ) -> bool:

        def fits(shape: TaskShape, tasks: int) -> bool:
            return self.domains.max_tasks_together(job.topology_constraint, placer, shape) >= tasks

        for shape in shapes:
            if not fits(shape, sum(count for each, count in shapes.items() if _is_at_least(each, shape))):
                return False
        largest = max(shapes, key=attrgetter("request.gpus"))
        for resource in ("gpus", "cpu_milli", "memory_mib"):
            amounts = {shape: getattr(shape.request, resource) for shape in shapes}
            if unit := 1 if resource == "gpus" and largest.request.gpus else math.gcd(*amounts.values()):
                one = largest.request._replace(**{**_NO_AMOUNTS, resource: unit})
                bare = largest._replace(request=one)
                if not fits(bare, sum(count * amounts[shape] for shape, count in shapes.items()) // unit):
                    return False
        return True

    def shape_counts(self, job: PendingRow, avoid: tuple[NodeId, ...]) -> Counter[TaskShape]:
        """Return the shapes of a job's tasks, with the number of tasks of each."""
        asked = Counter(job.task_requests or {job.request: job.tasks}).items()
        return Counter(
            {
                build_task_shape(
                    ask,
                    job.project,
                    avoid,
                    job.node_affinity,
                    self.smallest_gpu_mib,
                    same_gpus=job.needs_same_gpus,
                )[0]: count
                for ask, count in asked
            }
        )

    def fits_when_empty(self, job: PendingRow) -> bool:
        """Return True if the gang fits on its allowed nodes of the empty pool; groups are ignored."""
        return self.tasks_fit(job, self.empty)

    def tasks_fit(self, job: PendingRow, placer: NodePlacer) -> bool:
        """Return True if the gang fits on its allowed nodes by their capacity; groups are ignored."""
        if job.task_requests:
            return self._may_fit_together(job, placer, tuple(sorted(job.avoid_nodes)))
        return (
            self.domains.max_tasks_together(job.topology_constraint, placer, self.task_shape(job))
            >= job.required_tasks
        )

    def unrestricted_shape(self, job: PendingRow) -> TaskShape:
        """Return the job's task shape with only ineligible nodes avoided."""
        return self.task_shape(job)._replace(avoid_nodes=ineligible_nodes(job))

    def task_shape(self, job: PendingRow) -> TaskShape:
        return self._shape_and_demand(job)[0]

    def _shape_and_demand(self, job: PendingRow) -> tuple[TaskShape, ResourceVector]:
        """Return the shape and demand of one task of a job with equal tasks."""
        avoid = tuple(sorted(job.avoid_nodes))
        return build_task_shape(
            job.request, job.project, avoid, job.node_affinity, self.smallest_gpu_mib,
            same_gpus=job.needs_same_gpus,
        )  # fmt: skip

    def demand(self, job: PendingRow) -> ResourceVector:
        """Return the demand of the tasks that must start together."""
        if not (job.task_requests or job.groups):
            return self._shape_and_demand(job)[1].multiply(job.required_tasks)
        gang = build_pending_gang(job, self.tree.leaf_of[job.project], self.smallest_gpu_mib)
        return total_demand(gang.tasks)

    def is_quota_blocked(
        self, gang: Gang, demand: ResourceVector, assume_released: AssumeReleased = AssumeReleased.NONE
    ) -> bool:
        return self.ledger.is_blocked(gang.leaf_project, gang.user, demand, gang.preemptible, assume_released)

    def fits_now(self, job: PendingRow) -> bool:
        """Return True if limits, guarantee and free capacity let the gang start now."""
        if not (job.task_requests or job.groups):
            return self.batch_fits_now(job, self.batch_request(job))
        gang = build_pending_gang(job, self.tree.leaf_of[job.project], self.smallest_gpu_mib)
        wanted = gang.next_tasks
        if not wanted or self.is_quota_blocked(gang, total_demand(wanted)):
            return False
        if job.task_requests and not job.groups:
            return self._may_fit_together(job, self.available, tuple(sorted(job.avoid_nodes)))
        return self.available.fit_count(wanted[0].shape) >= len(wanted)

    def gang_fits_now(self, gang: Gang) -> bool:
        """Return ``fits_now`` of a pending gang, using its known tasks."""
        if gang.pending_row is None:
            return False
        if gang.homogeneous and gang.pending_row.request.share_mib is None:
            task, row = gang.tasks[0], gang.pending_row
            wanted = BatchRequest(
                task.shape, task.amounts, len(gang.next_tasks), row.topology_constraint, row.preemptible
            )
            return self.batch_fits_now(row, wanted)
        return self.fits_now(gang.pending_row)

    def batch_request(self, job: PendingRow) -> BatchRequest:
        """Return the required tasks of a job with equal tasks as one batch."""
        return BatchRequest(
            *self._shape_and_demand(job), job.required_tasks, job.topology_constraint, job.preemptible
        )

    def batch_fits_now(self, job: PendingRow, batch: BatchRequest) -> bool:
        """Return True if limits and free capacity let the project and user of ``job`` start ``batch`` now."""
        if self._max_tasks_together(batch.topology_constraint, batch.shape) < batch.task_count:
            return False
        leaf, amounts = self.tree.leaf_of[job.project], batch.per_task.multiply(batch.task_count)
        return not self.ledger.is_blocked(leaf, job.user, amounts, batch.preemptible)

    def _max_tasks_together(self, near: TopologyConstraint | None, shape: TaskShape) -> int:
        """Return how many tasks fit now within the topology constraint; cached until the pool changes."""
        self._discard_outdated()
        known = self._max_together.get((near, shape))
        if known is None:
            known = self._max_together[near, shape] = self.domains.max_tasks_together(
                near, self.available, shape
            )
        return known

    def is_over_limit(self, *gangs: Gang) -> bool:
        """Return True if the user of a gang, or a project on its path, is over a limit."""
        levels = {level for gang in gangs for level in self.tree.path[gang.leaf_project]}
        return any(map(self._is_user_over_limit, gangs)) or any(map(self.ledger.is_over_limit, levels))

    def _is_user_over_limit(self, gang: Gang) -> bool:
        """Return True if the gang's user exceeds a user limit because of this plan.

        Resources held before a limit was lowered are no reason to evict.
        """
        over = self.ledger.user_limits_exceeded(gang.leaf_project, gang.user)
        return bool(over) and any(
            each.user == gang.user
            and not set(over).isdisjoint(self.tree.path[each.leaf_project])
            and any(
                task.state is GangTaskState.ALLOCATED or (task.nominated and not task.held)
                for task in each.tasks
            )
            for each in (gang, *self.gangs.values())  # a gang that is being placed is not in ``gangs`` yet
        )

    def sibling_key(self, project: ProjectId, requested: ResourceVector) -> SiblingKey[ProjectId]:
        """Return the sort key of ``project`` among its siblings if its next job requests ``requested``."""
        self._discard_outdated()
        known = self._sibling_keys.get((project, requested))
        if known is None:
            owed, held = self.ledger.entitlements[project], self.ledger.held[project]
            in_any = self.policy.semantics.over_share_in_any
            known = sibling_key(project, owed, held, requested, self.capacity, over_share_in_any=in_any)
            self._sibling_keys[project, requested] = known
        return known

    def _discard_outdated(self) -> None:
        if self._cached_version != self.version:
            self._cached_version = self.version
            self._sibling_keys.clear()
            self._max_together.clear()

    def is_within_share(self, leaf: ProjectId, amounts: ResourceVector) -> bool:
        """Return True if the project and its ancestors stay within their shares with ``amounts`` more."""
        return self.exceeded_share(leaf, amounts) is None

    def exceeded_share(self, leaf: ProjectId, amounts: ResourceVector) -> ExceededQuota | None:
        """Return the lowest project whose fair share the project would exceed with ``amounts`` more."""
        for level in self.tree.path[leaf]:
            held, share = self.ledger.held[level], self.ledger.entitlements[level].fair_share
            exceeds = held.add(amounts).exceeds_each(share)
            if any(exceeds):
                resource = exceeds.index(True)
                return ExceededQuota(level, held[resource], share[resource], resource)
        return None


def projects_with_user_limits(pool_states: Iterable[PoolState]) -> frozenset[ProjectId]:
    """Return the leaf projects in which a user limit applies in some pool."""
    return frozenset(
        leaf
        for pool_state in pool_states
        if pool_state.ledger.user_holdings
        for leaf in pool_state.tree.path
        if pool_state.ledger.has_user_limit(leaf)
    )


def ineligible_nodes(job: PendingRow) -> tuple[NodeId, ...]:
    """Return the nodes that can never run the job, sorted."""
    return tuple(sorted(job.ineligible_nodes))
