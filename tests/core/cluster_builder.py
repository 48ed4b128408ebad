"""Clusters drawn as tables, and drawn at random, for the tests of the core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from portal.domain.scheduling.throughput import Layout, LayoutSpeed
from scheduler.core.model.plan import Plan
from scheduler.core.model.snapshot import (
    GpuConstraints,
    GpuRow,
    GpuShare,
    GpuUuid,
    JobDependency,
    JobId,
    NodeId,
    NodeRow,
    PendingRow,
    PoolId,
    PoolRow,
    ProjectId,
    ProjectRow,
    QuotaRow,
    ReservationRow,
    RunningRow,
    RunningTask,
    Snapshot,
    TaskRequest,
    TopologyConstraint,
    TopologyRow,
    UsageRow,
    UserId,
)

NOW_S = 1_000_000.0
MAIN = PoolId("main")
FABRIC = TopologyRow("fabric", ("block", "rack"))
LABELS = [(), (("block", "a"),), (("block", "a"), ("rack", "1")), (("block", "a"), ("rack", "2")),
          (("block", "b"), ("rack", "1"))]  # fmt: skip
NEARS = [*[None] * 6, TopologyConstraint("fabric", "rack"), TopologyConstraint("fabric", "block", "rack"),
         TopologyConstraint("fabric", None, "rack"),
         TopologyConstraint("nowhere", "rack")]  # fmt: skip
SPEEDS = (LayoutSpeed(Layout("H100", 1, 1, 0), 100), LayoutSpeed(Layout("A100", 1, 1, 0), 60),
          LayoutSpeed(Layout("A100", 2, 2, 0), 80), LayoutSpeed(Layout("A100 + H100", 1, 1, 0), 35))  # fmt: skip
PLACEMENTS = (None, "pack", "fragmentation", "spread")


def gpus(node: str, count: int, model: str = "A100", memory_mib: int = 81_920) -> tuple[GpuRow, ...]:
    return tuple(GpuRow(GpuUuid(f"{node}-gpu{i}"), i, model, memory_mib) for i in range(count))


def node(name: str, count: int = 4, *, pool: str = MAIN, model: str = "A100", **changes: Any) -> NodeRow:
    row = NodeRow(
        NodeId(name), name, PoolId(pool), True, True, 64_000, 0, 512_000, 0, gpus(name, count, model)
    )
    return replace(row, **changes)


def project(name: str, parent: str | None = None, created_s: float = 0.0) -> ProjectRow:
    return ProjectRow(ProjectId(name), name, ProjectId(parent) if parent else None, created_s)


def quota(
    name: str,
    guaranteed: float = 0,
    limit: float | None = None,
    *,
    weight: float = 1.0,
    priority: int = 0,
    person: float | None = None,
    pool: str = MAIN,
) -> QuotaRow:
    limit_milli, user_limit_milli = (None if n is None else round(n * 1000) for n in (limit, person))
    return QuotaRow(
        ProjectId(name), PoolId(pool), round(guaranteed * 1000), limit_milli, weight, priority,
        user_limit_milli=user_limit_milli,
    )  # fmt: skip


def waits(
    job: str, of: str, count: int = 1, *, tasks: int = 1, age_s: float = 0.0, **changes: Any
) -> PendingRow:
    row = PendingRow(
        JobId(job), job, ProjectId(of), UserId("ada"), (MAIN,), NOW_S - age_s, 50, True, tasks,
        TaskRequest(count, 1000, 1_000, 1_024), None,
    )  # fmt: skip
    return row.change(changes)


def runs(
    job: str, of: str, *places: tuple[str, Iterable[int]], milli: int = 1000, **changes: Any
) -> RunningRow:
    """A running job; each place is (node, GPU indexes)."""
    tasks = tuple(
        RunningTask(
            NodeId(where), tuple(GpuShare(GpuUuid(f"{where}-gpu{i}"), milli) for i in indexes), 1_000, 1_024
        )
        for where, indexes in places
    )
    row = RunningRow(
        JobId(job), ProjectId(of), UserId("ada"), MAIN, 50, True, NOW_S - 600, None, tasks, name=job
    )
    return replace(row, **changes)


def cluster(
    nodes: Iterable[NodeRow],
    projects: Iterable[ProjectRow],
    quotas: Iterable[QuotaRow] = (),
    *,
    running: Iterable[RunningRow] = (),
    pending: Iterable[PendingRow] = (),
    usage: Iterable[UsageRow] = (),
    pools: Iterable[PoolRow] = (PoolRow(MAIN, "main"),),
) -> Snapshot:
    """A snapshot in which the nodes' used amounts follow from the running jobs."""
    running = tuple(running)
    return Snapshot(
        NOW_S, tuple(pools), counted(nodes, running), tuple(projects), tuple(quotas), tuple(usage), running,
        tuple(pending),
    )  # fmt: skip


def counted(nodes: Iterable[NodeRow], running: Iterable[RunningRow]) -> tuple[NodeRow, ...]:
    tasks = [task for row in running for task in row.tasks]
    used: Counter[str] = Counter()
    for task in tasks:
        for gpu in task.gpus:
            used[gpu.uuid] += gpu.milli
    whole = {gpu.uuid for task in tasks for gpu in task.gpus if gpu.milli == 1000}
    return tuple(
        replace(
            row,
            cpu_used_milli=sum(t.cpu_milli for t in tasks if t.node == row.id),
            memory_used_mib=sum(t.memory_mib for t in tasks if t.node == row.id),
            gpus=tuple(replace(g, used_milli=used[g.uuid], exclusive=g.uuid in whole) for g in row.gpus),
        )
        for row in nodes
    )


def release_stopping_jobs(snapshot: Snapshot) -> Snapshot:
    """Return ``snapshot`` after every stopping job has released its resources and ended."""
    running = tuple(row for row in snapshot.running if not row.stopping)
    return replace(snapshot, nodes=counted(snapshot.nodes, running), running=running)


def started(plan: Plan) -> set[str]:
    return {str(start.job) for start in plan.starts}


def places(plan: Plan, job: str) -> list[tuple[str, int]]:
    """(node, number of GPUs) of each rank."""
    (start,) = (start for start in plan.starts if start.job == job)
    return [(str(task.node), len(task.gpus)) for task in start.tasks]


# -- at random ---------------------------------------------------------------------------------------------


@st.composite
def snapshots(draw: st.DrawFn, *, with_running: bool = True) -> Snapshot:
    """Small clusters with everything that can go wrong in them: drained nodes, lost GPUs, trees, shares."""
    pools = [PoolRow(PoolId(f"pool{i}"), f"pool {i}", draw(st.sampled_from(PLACEMENTS))) for i in range(
        draw(st.integers(1, 2)))]  # fmt: skip
    nodes = [_drawn_node(draw, i, draw(st.sampled_from(pools)).id) for i in range(draw(st.integers(0, 4)))]
    projects = _drawn_projects(draw)
    quotas = [
        QuotaRow(
            each.id, pool.id, draw(st.sampled_from([0, 1000, 2000, 4000])),
            draw(st.sampled_from([None, None, 0, 1500, 3000, 6000])),
            draw(st.sampled_from([0.0, 1.0, 1.0, 3.0])), draw(st.integers(0, 1)),
            user_limit_milli=draw(st.sampled_from([None, None, None, 0, 500, 2000, 3000])),
        )
        for each in projects for pool in pools if draw(st.booleans())
    ]  # fmt: skip
    usage = [
        UsageRow(draw(st.sampled_from(projects)).id, draw(st.sampled_from(pools)).id,
                 draw(st.sampled_from([None, UserId("ada"), UserId("bob")])), draw(st.floats(0, 1e6)))
        for _ in range(draw(st.integers(0, 3)))
    ]  # fmt: skip
    running = _drawn_running(draw, nodes, projects) if with_running else ()
    pending = tuple(_drawn_pending(draw, i, projects, pools, nodes) for i in range(draw(st.integers(0, 8))))
    return Snapshot(NOW_S, tuple(pools), counted(nodes, running), tuple(projects), tuple(quotas),
                    tuple(usage), running, pending, (FABRIC,), drawn_reservations(draw, nodes, projects))  # fmt: skip


def drawn_reservations(
    draw: st.DrawFn, nodes: list[NodeRow], projects: list[ProjectRow]
) -> tuple[ReservationRow, ...]:
    """A few spans around now, for some or for nobody; they may overlap."""
    found = []
    for i in range(draw(st.sampled_from([0, 0, 0, 1, 2])) if nodes else 0):
        start_s = NOW_S + draw(st.sampled_from([-600.0, -60.0, 0.0, 60.0, 120.0, 3_600.0]))
        chosen = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=2, unique=True))
        named = draw(st.lists(st.sampled_from(projects), max_size=2, unique=True))
        found.append(
            ReservationRow(f"res{i}", f"reservation {i}", tuple(row.id for row in chosen),
                           tuple(row.id for row in named), start_s, start_s + draw(st.sampled_from([60.0, 7_200.0])))
        )  # fmt: skip
    return tuple(found)


def _drawn_projects(draw: st.DrawFn) -> list[ProjectRow]:
    found: list[ProjectRow] = []
    for i in range(draw(st.integers(1, 4))):
        parent = draw(st.sampled_from([None, *(row.id for row in found)]))
        found.append(ProjectRow(ProjectId(f"p{i}"), f"project {i}", parent, float(draw(st.integers(0, 2)))))
    return found


def _drawn_node(draw: st.DrawFn, i: int, pool: PoolId) -> NodeRow:
    name = f"n{i}"
    cards = tuple(
        GpuRow(GpuUuid(f"{name}-gpu{g}"), g, model, 40_960 if model == "A100" else 81_920,
               healthy=draw(st.integers(0, 9)) > 0,
               mig_profile=draw(st.sampled_from([*[None] * 6, "1g.10gb"])),
               compute_capability=draw(st.sampled_from([None, 8.0, 9.0])))
        for g, model in enumerate(draw(st.lists(st.sampled_from(["A100", "A100", "H100"]), max_size=4)))
    )  # fmt: skip
    return NodeRow(NodeId(name), name, pool, draw(st.integers(0, 7)) > 0, draw(st.integers(0, 7)) > 0,
                   draw(st.sampled_from([2_000, 8_000])), 0, draw(st.sampled_from([4_096, 65_536])), 0,
                   cards, draw(st.sampled_from(LABELS)))  # fmt: skip


def _drawn_running(
    draw: st.DrawFn, nodes: list[NodeRow], projects: list[ProjectRow]
) -> tuple[RunningRow, ...]:
    found = []
    free = {gpu.uuid: 1000 for row in nodes for gpu in row.gpus}
    cpu_free = {row.id: row.cpu_milli for row in nodes}
    for i in range(draw(st.integers(0, 5)) if nodes else 0):
        where = draw(st.sampled_from(nodes))
        milli = draw(st.sampled_from([1000, 1000, 1000, 500]))
        room = [gpu.uuid for gpu in where.gpus if free[gpu.uuid] >= milli]
        taken = room[: draw(st.integers(1, 3))]
        if not taken or cpu_free[where.id] < 1_000:
            continue
        cpu_free[where.id] -= 1_000
        for uuid in taken:
            free[uuid] -= milli
        task = RunningTask(where.id, tuple(GpuShare(uuid, milli) for uuid in taken), 1_000, 0)
        found.append(
            RunningRow(JobId(f"r{i}"), draw(st.sampled_from(projects)).id,
                       draw(st.sampled_from([UserId("ada"), UserId("bob")])), where.pool,
                       draw(st.sampled_from([25, 50, 100])), draw(st.integers(0, 4)) > 0,
                       NOW_S - draw(st.integers(0, 10_000)), None, (task,),
                       stopping=draw(st.integers(0, 5)) == 0)
        )  # fmt: skip
    return tuple(found)


def _drawn_request(draw: st.DrawFn) -> TaskRequest:
    gpus, milli = draw(st.sampled_from([0, 1, 1, 2, 4])), draw(st.sampled_from([1000, 1000, 500, 300]))
    constraints = GpuConstraints(
        draw(st.sampled_from([None, None, "A100", "H100", "T4"])), draw(st.sampled_from([None, None, 50_000])),
        draw(st.sampled_from([*[None] * 6, "1g.10gb"])), draw(st.sampled_from([None, None, None, 8.6])),
    )  # fmt: skip
    cpu_milli, memory_mib = draw(st.sampled_from([0, 1_000, 3_000])), draw(st.sampled_from([0, 1_024]))
    return TaskRequest(gpus, milli if gpus else 1000, cpu_milli, memory_mib, constraints)


def _drawn_pending(
    draw: st.DrawFn, i: int, projects: list[ProjectRow], pools: list[PoolRow], nodes: list[NodeRow]
) -> PendingRow:
    names = [row.id for row in nodes]
    return PendingRow(
        JobId(f"j{i}"), f"job {i}", draw(st.sampled_from(projects)).id,
        draw(st.sampled_from([UserId("ada"), UserId("bob")])),
        tuple(pool.id for pool in draw(st.permutations(pools))[: draw(st.integers(1, 2))]),
        NOW_S - draw(st.integers(0, 3)), draw(st.sampled_from([25, 50, 100])), draw(st.booleans()),
        draw(st.sampled_from([1, 1, 1, 2, 3])), _drawn_request(draw),
        draw(st.sampled_from([None, None, 60.0, 600.0])), draw(st.integers(0, 9)) == 0,
        draw(st.sampled_from([None, None, None, NOW_S - 1, NOW_S + 1])),
        tuple(draw(st.lists(st.sampled_from(names), max_size=1))) if names else (),
        draw(st.sampled_from([None, None, None, *names])), i, topology_constraint=draw(st.sampled_from(NEARS)),
        dependencies=tuple(
            JobDependency(JobId(f"x{n}"), f"job x{n}", draw(st.sampled_from(projects)).id)
            for n in range(draw(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 2])))
        ),
        ignore_dependency_failure=draw(st.booleans()),
        layout_speeds=draw(st.sampled_from([(), SPEEDS, SPEEDS[:1], SPEEDS[1:]])),
        preferred_nodes=tuple(draw(st.lists(st.sampled_from([*names, "gone"]), max_size=3))),
    )  # fmt: skip


@st.composite
def crowded(draw: st.DrawFn) -> Snapshot:
    """Full clusters of few projects, where nearly every start needs somebody to leave."""
    nodes = [node(f"n{i}", labels=draw(st.sampled_from(LABELS))) for i in range(draw(st.integers(1, 3)))]
    parents = [None, None, "p0"]
    projects = [project(f"p{i}", draw(st.sampled_from(parents[: 2 + (i > 0)])), float(i)) for i in range(3)]
    quotas = [
        quota(row.id, draw(st.integers(0, 4)), draw(st.sampled_from([None, None, 4, 8])),
              weight=draw(st.sampled_from([0.0, 1.0, 2.0])), priority=draw(st.integers(0, 1)),
              person=draw(st.sampled_from([None, None, 2, 4])))
        for row in projects if draw(st.booleans())
    ]  # fmt: skip
    running = []
    for where in nodes:
        start = 0
        while start < len(where.gpus) and draw(st.integers(0, 5)):
            end = min(len(where.gpus), start + draw(st.integers(1, 3)))
            running.append(
                runs(f"{where.id}-r{start}", draw(st.sampled_from(projects)).id, (where.id, range(start, end)),
                     priority=draw(st.sampled_from([25, 50])), preemptible=draw(st.integers(0, 5)) > 0,
                     user=draw(st.sampled_from([UserId("ada"), UserId("bob")])),
                     started_s=NOW_S - draw(st.integers(0, 9_999)), stopping=draw(st.integers(0, 9)) == 0)
            )  # fmt: skip
            start = end
    pending = [
        waits(f"j{i}", draw(st.sampled_from(projects)).id, draw(st.integers(1, 4)),
              tasks=draw(st.sampled_from([1, 1, 2])), age_s=float(draw(st.integers(0, 3))),
              priority=draw(st.sampled_from([25, 50, 100])), preemptible=draw(st.integers(0, 3)) > 0,
              milli_per_gpu=draw(st.sampled_from([1000, 1000, 500])),
              topology_constraint=draw(st.sampled_from(NEARS)),
              time_limit_s=draw(st.sampled_from([None, None, 60.0])),
              user=draw(st.sampled_from([UserId("ada"), UserId("bob")])))
        for i in range(draw(st.integers(1, 5)))
    ]  # fmt: skip
    return replace(
        cluster(nodes, projects, quotas, running=running, pending=pending),
        topologies=(FABRIC,), reservations=drawn_reservations(draw, nodes, projects),
    )  # fmt: skip
