"""The working state of one decision: pool states, pending gangs, and evictions ordered so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from scheduler.core.actions.backfill import BackfillReservations
from scheduler.core.capacity.gang_hardware import GangHardware
from scheduler.core.model.plan import EvictionReason
from scheduler.core.model.policy import Policy
from scheduler.core.model.project_tree import ProjectTree
from scheduler.core.model.resources import ResourceVector
from scheduler.core.model.snapshot import JobId, PendingRow, PoolId, ProjectId, Snapshot
from scheduler.core.model.validation import check_snapshot
from scheduler.core.session.admin_reservations import AdminReservations
from scheduler.core.session.cache import DecisionCache
from scheduler.core.session.gang import Gang, GangTask, GangTaskState, add_pending_tasks, build_pending_gang
from scheduler.core.session.job_queue import effective_submit_s
from scheduler.core.session.pool import PoolState, projects_with_user_limits


@dataclass(frozen=True, slots=True)
class OrderedEviction:
    """The eviction of one task, its reason, and the job it frees resources for."""

    task: GangTask
    reason: EvictionReason
    for_job: JobId


def preemption_allowed_from_s(gang: Gang, policy: Policy) -> float:
    """Return the earliest time at which ``gang`` may evict others: after its own delay, else the pool's."""
    own_s = gang.pending_row.preemption_delay_s if gang.pending_row else None
    return gang.submitted_s + (policy.preemption_delay_s if own_s is None else own_s)


class ReadyClasses:
    """Ready gangs of one pool with the same project, priority and preemptibility, grouped by class."""

    def __init__(self) -> None:
        self.groups: list[list[Gang]] = []

    @cached_property
    def min_demand(self) -> ResourceVector:
        """Lower bound of every resource over the tasks of these gangs."""
        unlike = {group[0].shape_id: group[0] for group in self.groups}
        asked = (
            task.amounts
            for gang in unlike.values()
            for task in (gang.tasks[:1] if gang.homogeneous else gang.tasks)
        )
        return ResourceVector(*map(min, zip(*asked, strict=True)))


class SchedulingSession:
    """The mutable state of one decision, shared by the actions."""

    def __init__(self, snapshot: Snapshot, policy: Policy, cache: DecisionCache) -> None:
        self.cache = cache
        cache.begin(
            (
                snapshot.projects,
                snapshot.pools,
                snapshot.quotas,
                snapshot.topologies,
                policy,
                cache.hardware_key(snapshot.nodes),
            ),
            len(snapshot.pending),
        )
        seen = cache.compare(snapshot)
        check_snapshot(snapshot, cache.validated)
        cache.accept(seen)
        self.policy = policy
        self.tree = ProjectTree(snapshot.projects)
        self.admin_reservations = AdminReservations(snapshot, self.tree, cache.restricted_rows)
        self.snapshot = snapshot = self.admin_reservations.restrict(snapshot)
        self.pool_states = {
            pool.id: PoolState(snapshot, policy, self.tree, pool, cache)
            for pool in sorted(snapshot.pools, key=lambda pool: pool.id)
        }
        cache.finish_running()
        self.pending = sorted(snapshot.pending, key=attrgetter("job"))
        self.gangs: dict[JobId, Gang]
        self.pool_of: dict[JobId, PoolId] = {}
        self._build_gangs()
        self._indexed = False
        self.evictions: dict[GangTask, OrderedEviction] = {}
        self.nominated_jobs: set[JobId] = set()
        """Nominated by an earlier plan, or placed by evictions of this one."""
        self.backfill_reservations: dict[PoolId, BackfillReservations] = {}
        self.unprocessed: set[JobId] = set()
        self.steps_used = 0

    def _build_gangs(self) -> None:
        """Build a gang for every pending job; pending ranks of a running elastic job join its gang."""
        counted = projects_with_user_limits(self.pool_states.values())
        where = {job: pool for pool, pool_state in self.pool_states.items() for job in pool_state.gangs}
        self.gangs = {
            row.job: known
            if known is not None and row.job not in where
            else self._build_gang(row, where.get(row.job), counted)
            for row, known in zip(self.pending, self.cache.pending_gangs(self.pending), strict=True)
        }
        grows = where.keys() & self.gangs.keys()
        self.cache.store_pending([gang for job, gang in self.gangs.items() if job not in grows])

    def _build_gang(self, row: PendingRow, runs_in: PoolId | None, counted: Set[ProjectId]) -> Gang:
        keys, questions = self.cache.shape_ids, self.cache.quota_class_ids
        gang = self._new_gang(row, runs_in)
        gang.effective_submit_s = effective_submit_s(row, self.policy)
        gang.queue_rank = row.queue_rank
        gang.shape_id = keys.setdefault(_shape_key(gang), len(keys))
        gang.time_dependent = _is_time_dependent(row)
        owner = gang.user if gang.leaf_project in counted else None
        question = (gang.shape_id, gang.leaf_project, gang.preemptible, gang.priority, owner)
        gang.quota_class_id = questions.setdefault(question, len(questions))
        return gang

    def placed(self, gang: Gang, pool: PoolId) -> None:
        """Record that tasks of ``gang`` were placed in ``pool``."""
        self.unprocessed.discard(gang.job)
        self.join_pool(gang, pool)
        if gang.homogeneous and gang.next_tasks and gang.class_id >= 0:
            # what is left is placed task by task, while its class waits for a whole minimum
            number = self.cache.class_ids.setdefault((gang.job,), len(self.cache.class_ids))
            gang.shape_id = gang.quota_class_id = gang.class_id = -2 - number
            self._indexed = False

    def join_pool(self, gang: Gang, pool: PoolId) -> None:
        """Make a gang one of ``pool`` only: an earlier placement in another pool was undone."""
        before = self.pool_of.get(gang.job)
        if before is not None and before != pool:
            del self.pool_states[before].gangs[gang.job]
        self.pool_states[pool].gangs[gang.job] = gang
        self.pool_of[gang.job] = pool

    def is_elsewhere(self, gang: Gang, pool: PoolId) -> bool:
        """Return True if tasks of a gang have places in another pool, so that no others may join from ``pool``."""
        return self.pool_of.get(gang.job, pool) != pool and any(
            task.state is not GangTaskState.PENDING for task in gang.tasks
        )

    def _new_gang(self, row: PendingRow, runs_in: PoolId | None) -> Gang:
        pool = runs_in or next((pool for pool in row.pools if pool in self.pool_states), None)
        pool_state = self.pool_states[pool] if pool else next(iter(self.pool_states.values()))
        if runs_in is None:
            return build_pending_gang(row, self.tree.leaf_of[row.project], pool_state.smallest_gpu_mib)
        gang = pool_state.gangs[row.job]
        if row.needs_same_gpus:
            held = (
                place for task in gang.tasks if task.state is GangTaskState.RUNNING for place in task.held
            )
            row = _join_hardware(row, pool_state.available.hardware.used_by(held))
        add_pending_tasks(gang, row, pool_state.smallest_gpu_mib)
        gang.mark_changed()
        self.pool_of[row.job] = runs_in
        return gang

    def classify_jobs(self, feasible_pools: Callable[[PendingRow], list[PoolId]]) -> None:
        """Set the feasible pools of every pending gang and index the ready gangs, those that have any."""
        for row, gang in zip(self.pending, self.gangs.values(), strict=True):
            if gang.class_id < 0 or gang.time_dependent:
                self._find_feasible_pools(row, gang, feasible_pools)
        self.index_ready()

    def index_ready(self) -> None:
        """Group the ready gangs by class, unless no class has changed."""
        if self._indexed:
            return
        self._indexed = True
        # by the first feasible pool, and by rank of the pool, pool and shape
        self.by_first_pool: dict[PoolId, list[list[Gang]]] = {pool: [] for pool in self.pool_states}
        self.by_pool_rank: list[dict[PoolId, dict[int, list[list[Gang]]]]] = []
        self.ready_classes: dict[PoolId, dict[tuple[ProjectId, int, bool], ReadyClasses]] = {
            p: {} for p in self.pool_states
        }
        alike: dict[int, list[Gang]] = defaultdict(list)
        for gang in self.gangs.values():
            if gang.feasible_pools:
                alike[gang.class_id].append(gang)
        for group in alike.values():
            first = group[0]
            pool = first.feasible_pools[0]
            self.by_first_pool[pool].append(group)
            owner = (first.leaf_project, first.priority, first.preemptible)
            self.ready_classes[pool].setdefault(owner, ReadyClasses()).groups.append(group)
            for choice, pool in enumerate(first.feasible_pools):
                if choice == len(self.by_pool_rank):
                    self.by_pool_rank.append({pool: {} for pool in self.pool_states})
                self.by_pool_rank[choice][pool].setdefault(first.shape_id, []).append(group)

    def _find_feasible_pools(
        self, row: PendingRow, gang: Gang, feasible_pools: Callable[[PendingRow], list[PoolId]]
    ) -> None:
        """Set the pools where a job could run if they were empty; none if it must not start now."""
        key = (gang.quota_class_id, row.pools, row.ineligible_nodes, row.required_cuda)
        known = None if gang.time_dependent else self.cache.feasible_pools.get(key)
        if known is None:
            known = feasible_pools(row)
            if not gang.time_dependent:
                self.cache.feasible_pools[key] = known
        runs_in = self.pool_of.get(row.job)
        gang.feasible_pools = known if runs_in is None else [pool for pool in known if pool == runs_in]
        gang.class_id = self.cache.class_ids.setdefault(
            (*key, *gang.feasible_pools), len(self.cache.class_ids)
        )

    def compute_shares(self) -> None:
        """Compute the fair shares of every pool; a job counts as demand in its first feasible pool."""
        for pool, pool_state in self.pool_states.items():
            pool_state.compute_shares(self.by_first_pool[pool])

    def count_step(self, gang: Gang) -> bool:
        """Count a step. Return False, and mark the job as unprocessed, when the cycle's budget is used up."""
        if self.steps_used >= self.policy.max_steps_per_cycle:
            self.unprocessed.add(gang.job)
            return False
        self.steps_used += 1
        return True


def _join_hardware(row: PendingRow, used: Set[GangHardware]) -> PendingRow:
    """Return the row of ranks that join running ones on ``used``; a gang on mixed hardware stays mixed."""
    if len(used) != 1:
        return row
    (hardware,) = used
    avoid = (*row.avoid_nodes, *hardware.other_fabrics)
    model = hardware.model or row.request.constraints.gpu_model
    return row.change({"gpu_model": model, "avoid_nodes": avoid})


def _is_time_dependent(row: PendingRow) -> bool:
    """Return True if the feasible pools can change without a change of projects, quotas and nodes."""
    return bool(row.held or row.dependencies) or row.not_before_s is not None or row.node_affinity is not None


def _shape_key(gang: Gang) -> tuple[object, ...]:
    """Return the properties that decide where a gang fits; gangs with equal keys need only one attempt."""
    if gang.homogeneous:
        return (
            gang.tasks[0].shape if gang.tasks else None,
            len(gang.tasks),
            gang.root.required_members,
            gang.root.topology_constraint,
        )
    return (gang.job,)
