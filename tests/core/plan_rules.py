"""Invariants that hold for every plan, checked from rows alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.model.plan import EvictionReason, JobPlacement, Plan, TaskPlacement
from scheduler.core.model.project_tree import ProjectTree
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    GpuRow,
    GpuUuid,
    NodeId,
    NodeRow,
    PendingRow,
    PoolId,
    ProjectId,
    QuotaRow,
    RunningRow,
    Snapshot,
    TaskRequest,
    TopologyConstraint,
    UserId,
)


def _total_held_milli(row: RunningRow) -> int:
    """Return the thousandths of a GPU that a running job holds."""
    return sum(gpu.milli for task in row.tasks for gpu in task.gpus)


class PlanError(ValueError):
    """A plan that violates an invariant."""


def check_plan(snapshot: Snapshot, plan: Plan) -> None:
    """Raise ``PlanError`` if ``plan`` violates an invariant that holds for every plan."""
    pending = {row.job: row for row in snapshot.pending}
    answered = Counter([start.job for start in plan.starts] + [verdict.job for verdict in plan.verdicts])
    if answered != Counter(pending.keys()):
        raise PlanError("every pending job must have exactly one start or verdict")
    nodes = {node.id: node for node in snapshot.nodes}
    gpus = {gpu.uuid: (node.id, gpu) for node in snapshot.nodes for gpu in node.gpus}
    tree = ProjectTree(snapshot.projects)
    used: Counter[str] = Counter({uuid: gpu.used_milli for uuid, (_, gpu) in gpus.items()})
    cpu: Counter[str] = Counter({node.id: node.cpu_used_milli for node in snapshot.nodes})
    memory: Counter[str] = Counter({node.id: node.memory_used_mib for node in snapshot.nodes})
    for start in plan.starts:
        row = pending[start.job]
        asks = _requests_by_rank(row)
        if row.held or row.dependencies:
            raise PlanError(f"{row.job} starts although it is held or has dependencies")
        if start.pool not in row.pools or not _is_whole(row, start, asks.keys()):
            raise PlanError(f"{row.job} must start completely and in one of its pools")
        if not row.groups and not _meets_topology_constraint(
            snapshot, row.topology_constraint, [nodes[task.node] for task in start.tasks]
        ):
            raise PlanError(f"{row.job} violates its topology constraint")
        closed = _reserved_for_others(snapshot, tree, row)
        for task in start.tasks:
            node = nodes[task.node]
            if node.id in closed:
                raise PlanError(f"{row.job} may overlap a reservation of {node.id} for others")
            if node.pool != start.pool or not (node.schedulable and node.reachable):
                raise PlanError(f"{row.job} is placed on {node.id}, which is unavailable")
            if node.id in row.avoid_nodes or row.node_affinity not in (None, node.id):
                raise PlanError(f"{row.job} must not be placed on {node.id}")
            ask = asks[task.rank]
            _check_gpus(row, ask, task, gpus)
            cpu[node.id] += ask.cpu_milli
            memory[node.id] += ask.memory_mib
            used.update({gpu.uuid: gpu.milli for gpu in task.gpus})
            if ask.cpu_milli and cpu[node.id] > node.cpu_milli:
                raise PlanError(f"{node.id} has too little CPU for {row.job}")
            if ask.memory_mib and memory[node.id] > node.memory_mib:
                raise PlanError(f"{node.id} has too little memory for {row.job}")
    for uuid, milli in used.items():
        if milli > WHOLE_MILLI:
            raise PlanError(f"{uuid} is allocated {milli} milli")
    _check_limits(snapshot, plan)
    _check_evictions(snapshot, plan)
    _check_same_gpus(snapshot, plan)


def _check_same_gpus(snapshot: Snapshot, plan: Plan) -> None:
    """Raise ``PlanError`` if a gang that must not gets GPUs of different models or fabrics."""
    kind = {
        gpu.uuid: (gpu.model, dict(node.labels).get("fabric")) for node in snapshot.nodes for gpu in node.gpus
    }
    pending = {row.job: row for row in snapshot.pending}
    running = {row.job: row for row in snapshot.running}
    placements = (*plan.starts, *plan.nominations)
    for job in {placement.job for placement in placements}:
        row = pending.get(job) or running[job]
        requests = _requests_by_rank(row).values() if isinstance(row, PendingRow) else ()
        if not row.needs_same_gpus or len({ask.constraints.gpu_model for ask in requests if ask.gpus}) > 1:
            continue
        tasks = {
            rank if task.rank is None else task.rank: task
            for rank, task in enumerate(running[job].tasks if job in running else ())
            if not (task.stopping or running[job].stopping)
        }
        if len({kind[gpu.uuid] for task in tasks.values() for gpu in task.gpus}) > 1:
            continue  # started mixed, such as before the rule was changed
        for eviction in plan.evictions:
            if eviction.job == job:
                tasks = {
                    rank: t for rank, t in tasks.items() if eviction.ranks and rank not in eviction.ranks
                }
        placed = [*tasks.values(), *(t for each in placements if each.job == job for t in each.tasks)]
        if len({kind[gpu.uuid] for task in placed for gpu in task.gpus}) > 1:
            raise PlanError(f"{job} is placed on GPUs of different models or fabrics")


def _reserved_for_others(snapshot: Snapshot, tree: ProjectTree, row: PendingRow) -> set[NodeId]:
    """Return nodes with reservations for others that a job starting now could overlap."""
    line = tree.path[tree.leaf_of[row.project]]
    latest_s = math.inf if row.time_limit_s is None else snapshot.now_s + row.time_limit_s
    return {
        node
        for each in snapshot.reservations
        if each.end_s > snapshot.now_s
        and latest_s > each.start_s
        and not any(p in each.projects for p in line)
        for node in each.nodes
    }


def _meets_topology_constraint(
    snapshot: Snapshot, near: TopologyConstraint | None, nodes: Sequence[NodeRow]
) -> bool:
    """Return True if the nodes share a domain of the required level, if any."""
    if near is None or near.required is None:
        return True
    levels = next((row.levels for row in snapshot.topologies if row.name == near.topology), ())
    if near.required not in levels:
        return False
    path = levels[: levels.index(near.required) + 1]
    stands = {tuple(dict(node.labels).get(level) for level in path) for node in nodes}
    return len(stands) == 1 and None not in next(iter(stands))


def _requests_by_rank(row: PendingRow) -> dict[int, TaskRequest]:
    """Return the request of each pending rank."""
    return dict(
        zip(row.ranks or range(row.tasks), row.task_requests or (row.request,) * row.tasks, strict=True)
    )


def _is_whole(row: PendingRow, start: JobPlacement, waiting: Collection[int]) -> bool:
    """Return True if each started rank was pending: all ranks of a gang, or some of an elastic job."""
    ranks = [task.rank for task in start.tasks]
    grows = row.min_tasks is not None or bool(row.groups)
    return len(set(ranks)) == len(ranks) and set(ranks) <= set(waiting) and (grows or len(ranks) == row.tasks)


def _check_gpus(
    row: PendingRow, ask: TaskRequest, task: TaskPlacement, gpus: Mapping[GpuUuid, tuple[NodeId, GpuRow]]
) -> None:
    if len({gpu.uuid for gpu in task.gpus}) != ask.gpus or len(task.gpus) != ask.gpus:
        raise PlanError(f"{row.job} needs {ask.gpus} different GPUs per task")
    model, min_memory_mib, mig_profile, capability = ask.constraints
    for share in task.gpus:
        node, gpu = gpus[share.uuid]
        if ask.share_mib is None:
            enough = share.milli == ask.milli
        else:
            enough = share.milli * gpu.memory_mib >= ask.share_mib * WHOLE_MILLI
        if node != task.node or not gpu.healthy or not enough:
            raise PlanError(f"{row.job} has an invalid allocation of {share.uuid}")
        if model not in (None, gpu.model) or gpu.memory_mib < (min_memory_mib or 0):
            raise PlanError(f"{row.job} requests another model or more memory than {share.uuid} has")
        if mig_profile != gpu.mig_profile:
            raise PlanError(f"{row.job} requests {mig_profile or 'whole GPUs'}, not {share.uuid}")
        if (gpu.compute_capability or 0.0) < (capability or 0.0):
            raise PlanError(f"{row.job} requests a higher capability than {share.uuid} has")


def _check_limits(snapshot: Snapshot, plan: Plan) -> None:
    """Raise ``PlanError`` if a start exceeds a limit, or non-preemptible work a guarantee."""
    tree = ProjectTree(snapshot.projects)
    pending = {row.job: row for row in snapshot.pending}
    for pool in snapshot.pools:
        quotas = tree.quotas_in_pool(snapshot.quotas, pool.id)
        held: Counter[str] = Counter()
        firm: Counter[str] = Counter()
        grown: set[str] = set()
        grown_firm: set[str] = set()
        for running in snapshot.running:
            if running.pool == pool.id:
                for project in tree.path[tree.leaf_of[running.project]]:
                    held[project] += _total_held_milli(running)
                    firm[project] += 0 if running.preemptible else _total_held_milli(running)
        for start in plan.starts:
            row = pending[start.job]
            milli = sum(gpu.milli for task in start.tasks for gpu in task.gpus)
            if start.pool == pool.id and milli:
                for project in tree.path[tree.leaf_of[row.project]]:
                    held[project] += milli
                    grown.add(project)
                    if not row.preemptible:
                        firm[project] += milli
                        grown_firm.add(project)
        for project, quota in quotas.items():
            if quota.limit_milli is not None and project in grown and held[project] > quota.limit_milli:
                raise PlanError(f"{project} exceeds its limit in {pool.id}")
            if project in grown_firm and firm[project] > quota.guaranteed_milli:
                raise PlanError(f"non-preemptible jobs of {project} exceed its guarantee in {pool.id}")
        _check_user_limits(snapshot, plan, pool.id, tree, quotas)


def _check_user_limits(
    snapshot: Snapshot, plan: Plan, pool: PoolId, tree: ProjectTree, quotas: Mapping[ProjectId, QuotaRow]
) -> None:
    """Raise ``PlanError`` if a start makes a user exceed a user limit."""
    held: Counter[tuple[ProjectId, UserId]] = Counter()
    for running in snapshot.running:
        if running.pool == pool:
            for project in tree.path[tree.leaf_of[running.project]]:
                held[project, running.user] += _total_held_milli(running)
    pending = {row.job: row for row in snapshot.pending}
    grown: set[tuple[ProjectId, UserId]] = set()
    for start in plan.starts:
        row = pending[start.job]
        milli = sum(gpu.milli for task in start.tasks for gpu in task.gpus)
        if start.pool == pool and milli:
            mine = [(project, row.user) for project in tree.path[tree.leaf_of[row.project]]]
            held.update(dict.fromkeys(mine, milli))
            grown.update(mine)
    for project, user in grown:
        most = quotas[project].user_limit_milli
        if most is not None and held[project, user] > most:
            raise PlanError(f"{user} exceeds the user limit of {project} in {pool}")


def _check_evictions(snapshot: Snapshot, plan: Plan) -> None:
    """Raise ``PlanError`` unless each victim is evictable, and evicted once for a job of the plan."""
    running = {row.job: row for row in snapshot.running}
    pending = {row.job: row for row in snapshot.pending}
    placed = {verdict.job for verdict in plan.verdicts if verdict.code is VerdictCode.WAITING_FOR_EVICTION}
    placed |= {start.job for start in plan.starts}
    if len({eviction.job for eviction in plan.evictions}) != len(plan.evictions):
        raise PlanError("a job is evicted more than once")
    moved = {start.job for start in plan.nominations}
    for eviction in plan.evictions:
        victim = running[eviction.job]
        if eviction.reason is EvictionReason.GANG_INCOMPLETE:
            if victim.stale_since_s is None or eviction.for_job != victim.job:
                raise PlanError(f"{victim.job} is evicted as incomplete, but is complete")
            continue
        winner = pending[eviction.for_job]
        if not victim.preemptible or victim.stopping or eviction.for_job not in placed:
            raise PlanError(f"{victim.job} is evicted without need")
        if eviction.reason is EvictionReason.MIGRATED:
            if victim.job not in moved:
                raise PlanError(f"{victim.job} is migrated, but has no new placement")
            continue
        same = victim.project == winner.project
        if same != (eviction.reason is EvictionReason.PREEMPTED):
            raise PlanError(f"{victim.job} is evicted for the wrong reason")
        if same and victim.priority >= winner.priority:
            raise PlanError(f"{victim.job} is preempted for a job without higher priority")
