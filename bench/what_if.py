"""Cost of a query to worker-ask, "would this start now, and what would be preempted", on a busy cluster.

    DATABASE_URL=... python -m bench what_if [--nodes N] [--pending N] [--rounds N]

Creates a database of its own beside the one in DATABASE_URL, and drops it. Each query is answered as the
worker does: once with a fresh snapshot, and once with the one that queries within a second share.
"""

from __future__ import annotations

import argparse
import datetime as dt
import random
import statistics
import time
from typing import Any

from bench.report import percentile, print_figure
from bench.scratch_database import scratch_database

TARGET_MS = 300.0
EFFECT_TARGET_MS = 8_000.0
"""The portal waits this long for the effect of quotas."""
QUOTA_ROUNDS = 10
GPUS_PER_NODE = 8
ENDED = 5_000
"""Ended jobs from which durations are learned."""


def main(arguments: list[str]) -> int:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(prog="bench what_if")
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--pending", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=40)
    wanted = parser.parse_args(arguments)
    with scratch_database():
        bodies = build_cluster(wanted.nodes, wanted.pending)
        for fresh in (True, False):
            measure(bodies, fresh, wanted)
        measure_quota_effect(bodies, wanted)
    return 0


def measure(bodies: list[dict[str, Any]], fresh: bool, wanted: argparse.Namespace) -> None:
    """Print the line of one way."""
    from scheduler import what_if

    took_ms, leaving, waits = [], 0, 0
    for number in range(wanted.rounds):
        if fresh:
            what_if._cached_inputs = None
        began_s = time.perf_counter()
        answer = what_if._answer("would_start", bodies[number % len(bodies)])
        took_ms.append((time.perf_counter() - began_s) * 1000)
        assert "error" not in answer, answer
        leaving += bool(answer["victims"])
        waits += not answer["starts_now"]
    p95_ms = percentile(took_ms, 0.95)
    print_figure(
        "what-if query, new snapshot" if fresh else "what-if query, cached snapshot",
        ours=round(p95_ms, 1),
        unit="ms p95",
        target=f"below {TARGET_MS:g} ms",
        met=p95_ms < TARGET_MS,
        p50_ms=round(statistics.median(took_ms), 1),
        nodes=wanted.nodes,
        pending=wanted.pending,
        waits=waits,
        asks_others_to_leave=leaving,
    )


def measure_quota_effect(bodies: list[dict[str, Any]], wanted: argparse.Namespace) -> None:
    """Print the line of a change of two quotas, each time with a new snapshot."""
    from scheduler import what_if

    values = {"limit_milli": None, "weight": 1.0, "priority": 0, "user_limit_milli": None}
    projects = (bodies[0]["project"], bodies[2]["project"])
    took_ms = []
    for number in range(1, QUOTA_ROUNDS + 1):
        what_if._cached_inputs = None
        quotas = [
            {"project": project, "pool": bodies[0]["pool"], "guaranteed_milli": number * 16_000, **values}
            for project in projects
        ]
        began_s = time.perf_counter()
        answer = what_if._answer("quota_effect", {"quotas": quotas})
        took_ms.append((time.perf_counter() - began_s) * 1000)
        assert "error" not in answer, answer
    slowest_ms = max(took_ms)
    print_figure(
        "effect of two quotas",
        ours=round(slowest_ms, 1),
        unit="ms at most",
        target=f"below {EFFECT_TARGET_MS:g} ms",
        met=slowest_ms < EFFECT_TARGET_MS,
        p50_ms=round(statistics.median(took_ms), 1),
        nodes=wanted.nodes,
        pending=wanted.pending,
        changed_starts=answer["sooner"] + answer["later"],
    )


def build_cluster(nodes: int, pending: int) -> list[dict[str, Any]]:
    """Build a full cluster of four projects with a queue; return queries of several kinds."""
    from django.db import connection, transaction
    from django.utils import timezone

    from portal.database.roles import as_owner
    from portal.models import Environment, Gpu, Job, Membership, Node, NodePool, Project, Quota, User
    from portal.models.public_id import new_public_id
    from portal.services.jobs.submission import JobRequest, do_submit_job
    from portal.services.lifecycle import job_control
    from portal.services.lifecycle.job_control import RankPlacement
    from scheduler.cycle import run_cycle

    draw = random.Random(1)
    pool = NodePool.objects.create(name="main")
    for number in range(nodes):
        node = Node.objects.create(
            name=f"n{number:03}", pool=pool, state="ready", reachable=True, runtime="podman",
            cpu_milli=128_000, memory_mib=1_048_576,
        )  # fmt: skip
        Gpu.objects.bulk_create(
            Gpu(node=node, uuid=f"GPU-{number}-{g}", index=g, model="H100", memory_mib=81_920)
            for g in range(GPUS_PER_NODE)
        )
    batch = Environment.objects.create(name="batch", title="Batch", runtime="podman", image="localhost/x:1")
    projects, users = [], []
    for number in range(4):
        project, user = Project.objects.create(name=f"p{number}"), User.objects.create_user(f"u{number}")
        Membership.objects.create(project=project, user=user, role="member")
        guaranteed = 0 if number < 2 else nodes * GPUS_PER_NODE * 1000 // 4
        Quota.objects.create(project=project, pool=pool, guaranteed_milli=guaranteed)
        projects.append(project)
        users.append(user)

    def submit(number: int, **fields: Any) -> Job:
        asked = JobRequest(
            name="job",
            project=projects[number],
            environment=batch,
            command=["true"],
            cpu_milli=4000,
            **fields,
        )
        return do_submit_job(users[number], asked)

    ends = timezone.now()
    ended = []
    for _ in range(ENDED):
        number, ends = draw.randrange(4), ends - dt.timedelta(seconds=20)
        ended.append(
            Job(
                public_id=new_public_id(), name="ended", project=projects[number], owner=users[number],
                environment=batch, command=["true"], state="COMPLETED", gpus_per_task=draw.choice((1, 2, 4, 8)),
                started_at=ends - dt.timedelta(seconds=draw.lognormvariate(10.0, 1.0)), ended_at=ends,
            )
        )  # fmt: skip
    Job.objects.bulk_create(ended)
    for index, node in enumerate(Node.objects.order_by("id")):
        gpus = list(node.gpus.order_by("index").values_list("pk", flat=True))
        for half in (gpus[:4], gpus[4:]):
            job = submit(index % 2, gpus_per_task=4)
            with transaction.atomic():
                locked = Job.objects.select_for_update().get(pk=job.pk)
                job_control.start_attempt(
                    locked, pool, [RankPlacement(node, [(gpu, 1000) for gpu in half])], epoch=1
                )
    for _ in range(pending):
        submit(draw.randrange(2), gpus_per_task=draw.choice((1, 2, 4, 8)), tasks=draw.choice((1, 1, 1, 2)))
    run_cycle("bench", "bench")
    with as_owner(), connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return [
        {
            "project": projects[number].public_id,
            "user": users[number].public_id,
            "environment": batch.public_id,
            "pool": pool.public_id,
            "gpus_per_task": gpus,
            "tasks": tasks,
        }
        for number, gpus, tasks in ((0, 1, 1), (1, 8, 2), (2, 1, 1), (2, 8, 4), (3, 8, 16))
    ]
