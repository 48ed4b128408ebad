"""Duration of one decision: full cycles over 1,000 nodes of 8 GPUs with 10,000 pending jobs."""

from __future__ import annotations

import json
import random
import resource
import time
from functools import cache

from bench.calibration import calibration_ms
from scheduler.core.decide import decide
from scheduler.core.model import snapshot as c
from scheduler.core.model.apply_plan import apply_plan
from scheduler.core.model.plan import Plan
from scheduler.core.model.policy import Policy

NODES, GPUS_PER_NODE, PROJECTS, USER_COUNT, PENDING = 1_000, 8, 60, 300, 10_000
NOW_S = 1_000_000.0


def build_snapshot(seed: int = 1) -> c.Snapshot:
    """Return an empty cluster, a tree of projects and a queue of mixed jobs that exceeds the capacity."""
    draw = random.Random(seed)
    pool = c.PoolRow(c.PoolId("pool"), "main")
    nodes = tuple(
        c.NodeRow(
            c.NodeId(f"n{n:04}"), f"n{n:04}", pool.id, True, True, 128_000, 0, 1_048_576, 0,
            tuple(
                c.GpuRow(c.GpuUuid(f"GPU-{n}-{g}"), g, "H100" if n % 4 == 0 else "A100", 81_920)
                for g in range(GPUS_PER_NODE)
            ),
        )
        for n in range(NODES)
    )  # fmt: skip
    groups = [c.ProjectRow(c.ProjectId(f"group{g}"), f"group {g}", None, float(g)) for g in range(6)]
    leaves = [
        c.ProjectRow(c.ProjectId(f"project{p}"), f"project {p}", groups[p % 6].id, float(p))
        for p in range(PROJECTS)
    ]
    quotas = [
        c.QuotaRow(p.id, pool.id, draw.choice((0, 40_000, 80_000)), draw.choice((None, 400_000)), 1.0, 0)
        for p in leaves
    ]
    pending = tuple(_job(draw, i, leaves[draw.randrange(PROJECTS)], pool.id) for i in range(PENDING))
    usage = tuple(
        c.UsageRow(leaves[u % PROJECTS].id, pool.id, c.UserId(f"user{u}"), draw.random() * 1e6)
        for u in range(USER_COUNT)
    )
    return c.Snapshot(NOW_S, (pool,), nodes, (*groups, *leaves), tuple(quotas), usage, (), pending)


def _job(draw: random.Random, i: int, project: c.ProjectRow, pool: c.PoolId) -> c.PendingRow:
    gpus, tasks, milli = draw.choice(
        ((1, 1, 1000), (1, 1, 1000), (1, 1, 500), (2, 1, 1000), (4, 1, 1000), (8, 1, 1000), (8, 2, 1000))
    )
    return c.PendingRow(
        c.JobId(f"job{i:05}"), f"job {i}", project.id, c.UserId(f"user{draw.randrange(USER_COUNT)}"), (pool,),
        NOW_S - draw.random() * 86_400, draw.choice((50, 75, 100)), True, tasks,
        _request(gpus, milli, draw.choice((None, None, "A100", "H100")), draw.choice((8_192, 16_384)) * gpus),
        draw.choice((None, 3_600.0)),
    )  # fmt: skip


@cache
def _request(gpus: int, milli: int, model: str | None, memory_mib: int) -> c.TaskRequest:
    """Return the request of a task; equal ones are one object, as in a snapshot of the database."""
    return c.TaskRequest(gpus, milli, 4_000 * gpus, memory_mib, c.GpuConstraints(model))


def main(arguments: list[str]) -> None:
    """Print the figures."""
    snapshot = build_snapshot()
    calibration = calibration_ms()
    plan = _measure("decide, empty cluster, 10,000 pending", snapshot, calibration)
    _measure("decide, full cluster, the rest pending", apply_plan(snapshot, plan), calibration)


def _measure(name: str, snapshot: c.Snapshot, calibration: float) -> Plan:
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        plan = decide(snapshot, Policy())
        times.append(time.perf_counter() - begin)
    print(
        json.dumps(
            {
                "figure": name,
                "seconds": round(min(times), 3),
                "nodes": NODES,
                "gpus": NODES * GPUS_PER_NODE,
                "pending": len(snapshot.pending),
                "starts": len(plan.starts),
                "verdicts": len(plan.verdicts),
                "steps": plan.steps_used,
                "truncated": plan.truncated,
                "calibration_ms": round(calibration, 1),
                "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    )
    return plan
