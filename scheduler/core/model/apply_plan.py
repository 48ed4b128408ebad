"""Apply a plan to a snapshot: for replays, forecasts and the test that a second decision changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from scheduler.core.model.plan import Eviction, JobPlacement, Plan
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    JobId,
    NodeRow,
    PendingRow,
    PoolId,
    RunningRow,
    RunningTask,
    Snapshot,
    TaskRequest,
)


def apply_plan(snapshot: Snapshot, plan: Plan) -> Snapshot:
    """Return ``snapshot`` after the commit of ``plan``: starts hold their GPUs, victims are stopping."""
    pending = {row.job: row for row in snapshot.pending}
    evicted = {eviction.job: eviction for eviction in plan.evictions}
    kept = {start.job: start for start in plan.nominations}
    running = [_evicted(row, evicted.get(row.job), kept.get(row.job)) for row in snapshot.running]
    for job in kept.keys() & pending.keys():
        pending[job] = replace(pending[job], nominated_tasks=_running_tasks(kept[job], pending[job]))
    runs = {row.job: number for number, row in enumerate(running)}
    started = []
    joined = []
    for start in plan.starts:
        row = pending.pop(start.job)
        if len(start.tasks) < row.tasks:
            pending[start.job] = _still_pending(row, start)
        if start.job in runs:
            before = running[runs[start.job]]
            new = _running_tasks(start, row)
            running[runs[start.job]] = replace(before, tasks=(*before.tasks, *new))
            joined.append(replace(before, tasks=new))
            continue
        started.append(_running_row(row, start.pool, snapshot.now_s, _running_tasks(start, row)))
    nodes = _change_usage(snapshot.nodes, [*started, *joined])
    return replace(snapshot, nodes=nodes, running=(*running, *started), pending=tuple(pending.values()))


def complete_evictions(snapshot: Snapshot, plan: Plan) -> Snapshot:
    """Return ``snapshot`` after ``plan``, when stopping jobs are gone and nominated jobs run in their place.

    Jobs evicted for others are pending again.
    """
    after = apply_plan(snapshot, plan)
    nominated = {start.job: start for start in plan.nominations}
    pending: dict[JobId, PendingRow] = {}
    started: list[RunningRow] = []
    for row in after.pending:
        start = nominated.get(row.job)
        if start is None or row.ranks:
            pending[row.job] = row
            continue
        started.append(_running_row(row, start.pool, after.now_s, row.nominated_tasks))
        if len(start.tasks) < row.tasks:
            pending[row.job] = _still_pending(row, start)
    running: list[RunningRow] = []
    released: list[RunningRow] = []
    for held in after.running:
        stopping = tuple(task for task in held.tasks if task.stopping or held.stopping)
        if not stopping:
            running.append(held)
            continue
        released.append(replace(held, tasks=stopping))
        if not held.stopping:
            running.append(replace(held, tasks=tuple(task for task in held.tasks if not task.stopping)))
        elif held.job in nominated:
            started.append(replace(held, tasks=held.nominated_tasks, stopping=False))
        if not held.stopping or (held.preempted_for and held.job not in nominated):
            pending[held.job] = _requeued_tasks(held, stopping, pending.get(held.job))
    nodes = _change_usage(_change_usage(after.nodes, released, -1), started)
    return replace(after, nodes=nodes, running=(*running, *started), pending=tuple(pending.values()))


def _requeued_tasks(row: RunningRow, gone: Sequence[RunningTask], waiting: PendingRow | None) -> PendingRow:
    """Return the pending row of evicted tasks, with the ranks of the job that waited before."""
    again = requeued_row(replace(row, tasks=tuple(gone)))
    by_rank = _requests_by_rank(again, [_rank(row, task) for task in gone])
    if waiting is not None:
        by_rank |= _requests_by_rank(waiting, waiting.ranks or range(waiting.tasks))
    ranks = sorted(by_rank)
    asks = tuple(by_rank[rank] for rank in ranks)
    return replace(
        again,
        tasks=len(ranks),
        ranks=() if row.stopping else tuple(ranks),
        task_requests=() if len(set(asks)) == 1 else asks,
    )


def _rank(row: RunningRow, task: RunningTask) -> int:
    return next(i for i, each in enumerate(row.tasks) if each is task) if task.rank is None else task.rank


def _requests_by_rank(row: PendingRow, ranks: Iterable[int]) -> dict[int, TaskRequest]:
    asks = row.task_requests or (row.request,) * row.tasks
    return dict(zip(ranks, asks, strict=True))


def requeued_row(row: RunningRow) -> PendingRow:
    """Return the row of a running job once it is evicted: it requests what it holds."""
    asks = tuple(task.request(row.constraints) for task in row.tasks)
    first = asks[0]
    return PendingRow(
        row.job,
        row.name,
        row.project,
        row.user,
        (row.pool,),
        row.started_s if row.submitted_s is None else row.submitted_s,
        row.priority,
        row.preemptible,
        len(asks),
        first,
        row.time_limit_s,
        avoid_nodes=row.avoid_nodes,
        node_affinity=row.node_affinity,
        min_tasks=row.min_tasks,
        task_requests=() if all(ask == first for ask in asks) else asks,
        allow_mixed_gpus=row.allow_mixed_gpus,
    )


def _running_row(row: PendingRow, pool: PoolId, now_s: float, tasks: tuple[RunningTask, ...]) -> RunningRow:
    """Return the row of a job that starts now."""
    return RunningRow(
        row.job,
        row.project,
        row.user,
        pool,
        row.priority,
        row.preemptible,
        now_s,
        row.time_limit_s,
        tasks,
        name=row.name,
        avoid_nodes=row.avoid_nodes,
        node_affinity=row.node_affinity,
        min_tasks=row.min_tasks,
        submitted_s=row.submitted_s,
        topology_constraint=row.topology_constraint,
        allow_mixed_gpus=row.allow_mixed_gpus,
        constraints=row.request.constraints,
    )


def _evicted(row: RunningRow, eviction: Eviction | None, nominated: JobPlacement | None) -> RunningRow:
    """Return a running job with its eviction, of the whole job or of some ranks."""
    if eviction is None:
        return row
    if not eviction.ranks:
        places = _nominated_tasks(nominated, row) if nominated else ()
        return replace(row, stopping=True, preempted_for=eviction.for_job, nominated_tasks=places)
    gone = set(eviction.ranks)
    ranked = enumerate(row.tasks)
    tasks = (replace(t, stopping=t.stopping or (i if t.rank is None else t.rank) in gone) for i, t in ranked)
    return replace(row, tasks=tuple(tasks))


def _still_pending(row: PendingRow, start: JobPlacement) -> PendingRow:
    """Return the ranks of an elastic job that were not placed."""
    placed = {task.rank for task in start.tasks}
    left = [(i, rank) for i, rank in enumerate(row.ranks or range(row.tasks)) if rank not in placed]
    return replace(
        row,
        tasks=len(left),
        ranks=tuple(rank for _, rank in left),
        task_requests=tuple(row.task_requests[i] for i, _ in left) if row.task_requests else (),
        group_of_rank=tuple(row.group_of_rank[i] for i, _ in left) if row.group_of_rank else (),
        nominated_tasks=(),
    )


def _running_tasks(start: JobPlacement, row: PendingRow) -> tuple[RunningTask, ...]:
    """Return the placed tasks of a gang with the amounts that each requests."""
    asks = (
        dict(zip(row.ranks or range(row.tasks), row.task_requests, strict=True)) if row.task_requests else {}
    )
    return tuple(
        RunningTask(
            task.node,
            task.gpus,
            asks[task.rank].cpu_milli if asks else row.request.cpu_milli,
            asks[task.rank].memory_mib if asks else row.request.memory_mib,
            rank=task.rank if row.ranks or len(start.tasks) < row.tasks else None,
        )
        for task in start.tasks
    )


def _nominated_tasks(start: JobPlacement, row: RunningRow) -> tuple[RunningTask, ...]:
    """Return the nominated placement of a migrating job."""
    now = {i if task.rank is None else task.rank: task for i, task in enumerate(row.tasks)}
    return tuple(
        # a pending rank that was to join the job requests what its other tasks do
        replace(now.get(task.rank, row.tasks[0]), node=task.node, gpus=task.gpus, rank=task.rank)
        for task in start.tasks
    )


def _change_usage(nodes: tuple[NodeRow, ...], rows: list[RunningRow], sign: int = 1) -> tuple[NodeRow, ...]:
    """Return the nodes with what ``rows`` hold added, or removed if ``sign`` is -1."""
    milli: Counter[str] = Counter()
    cpu: Counter[str] = Counter()
    memory: Counter[str] = Counter()
    whole: dict[str, bool] = {}
    for row in rows:
        for task in row.tasks:
            cpu[task.node] += sign * task.cpu_milli
            memory[task.node] += sign * task.memory_mib
            for gpu in task.gpus:
                milli[gpu.uuid] += sign * gpu.milli
                whole[gpu.uuid] = sign > 0 and gpu.milli == WHOLE_MILLI
    return tuple(
        node
        if node.id not in cpu
        else replace(
            node,
            cpu_used_milli=node.cpu_used_milli + cpu[node.id],
            memory_used_mib=node.memory_used_mib + memory[node.id],
            gpus=tuple(
                replace(
                    gpu,
                    used_milli=gpu.used_milli + milli[gpu.uuid],
                    exclusive=whole.get(gpu.uuid, gpu.exclusive),
                )
                for gpu in node.gpus
            ),
        )
        for node in nodes
    )
