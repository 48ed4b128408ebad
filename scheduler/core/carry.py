"""The photograph once a plan is carried out: for replays, forecasts and the fixed-point law."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from scheduler.core.cluster import WHOLE_MILLI, JobId, NodeId, NodeRow, RunningRow, RunningTask, Snapshot
from scheduler.core.plan import Plan


def after_commit(snapshot: Snapshot, plan: Plan) -> Snapshot:
    """``snapshot`` right after ``plan`` is written down: starts hold their places, victims are stopping."""
    pending = {row.job: row for row in snapshot.pending}
    evicted = {eviction.job: eviction.for_job for eviction in plan.evictions}
    running = [
        replace(row, stopping=True, stopping_for=evicted[row.job]) if row.job in evicted else row
        for row in snapshot.running
    ]
    started = []
    for start in plan.starts:
        row = pending.pop(start.job)
        tasks = tuple(
            RunningTask(task.node, task.gpus, row.cpu_milli, row.memory_mib) for task in start.tasks
        )
        started.append(
            RunningRow(
                row.job,
                row.project,
                row.user,
                start.pool,
                row.priority,
                row.preemptible,
                snapshot.now_s,
                row.time_limit_s,
                tasks,
                name=row.name,
                gpu_model=row.gpu_model,
                min_gpu_memory_mib=row.min_gpu_memory_mib,
            )
        )
    nodes = _hold(snapshot.nodes, started, +1)
    return replace(snapshot, nodes=nodes, running=(*running, *started), pending=tuple(pending.values()))


def after_release(snapshot: Snapshot) -> Snapshot:
    """``snapshot`` once every job that was stopping has let go (and does not come back)."""
    gone = [row for row in snapshot.running if row.stopping]
    left: dict[JobId, set[NodeId]] = {}
    for row in gone:
        if row.stopping_for is not None:
            left.setdefault(row.stopping_for, set()).update(task.node for task in row.tasks)
    return replace(
        snapshot,
        nodes=_hold(snapshot.nodes, gone, -1),
        running=tuple(row for row in snapshot.running if not row.stopping),
        pending=tuple(
            replace(row, promised_nodes=tuple(sorted({*row.promised_nodes, *left[row.job]})))
            if row.job in left
            else row
            for row in snapshot.pending
        ),
    )


def _hold(nodes: tuple[NodeRow, ...], rows: list[RunningRow], sign: int) -> tuple[NodeRow, ...]:
    """The nodes with what ``rows`` hold counted in (+1) or out (-1)."""
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
        replace(
            node,
            cpu_used_milli=node.cpu_used_milli + cpu[node.id],
            memory_used_mib=node.memory_used_mib + memory[node.id],
            gpus=tuple(
                replace(
                    gpu, used_milli=gpu.used_milli + milli[gpu.uuid], whole=whole.get(gpu.uuid, gpu.whole)
                )
                for gpu in node.gpus
            ),
        )
        for node in nodes
    )
