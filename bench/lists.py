"""REST lists with 100,000 jobs: time from request to answer through the whole Django stack, and query counts.

    DATABASE_URL=... REDIS_URL=... python -m bench lists [--jobs N] [--rounds N] [--only PART]

Makes a database of its own beside the one that DATABASE_URL names, and drops it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import time
from typing import Any

from bench.calibration import calibration_ms


def main(arguments: list[str]) -> int:
    """Prints a line for each list and kind of person."""
    parser = argparse.ArgumentParser(prog="bench lists")
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="a part of the path")
    wanted = parser.parse_args(arguments)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.config.settings")
    os.environ.setdefault("FAIRWAY_SECRET_KEY", secrets.token_urlsafe(48))
    os.environ.setdefault("FAIRWAY_LOG_LEVEL", "ERROR")

    import django
    from django.db import connection

    django.setup()
    from django.test.utils import setup_test_environment, teardown_test_environment

    setup_test_environment()
    old = connection.settings_dict["NAME"]
    connection.creation.create_test_db(verbosity=0, autoclobber=True)
    try:
        people = _fill(wanted.jobs)
        for name, headers in people.items():
            for path in filter(lambda path: wanted.only in path, _paths()):
                print(json.dumps(_measure(name, path, headers, wanted.jobs, wanted.rounds)), flush=True)
    finally:
        connection.creation.destroy_test_db(old, verbosity=0)
        teardown_test_environment()
    return 0


def _paths() -> list[str]:
    jobs = "/api/v1/jobs/?limit=50"
    return [
        jobs,
        f"{jobs}&state=PENDING",
        f"{jobs}&state=RUNNING&state=PENDING&order=-priority",
        f"{jobs}&order=name",
        f"{jobs}&project=project-7",
        f"{jobs}&owner=user-7",
        f"{jobs}&search=run-777",
        f"{jobs}&search=nothing-like-this",
        "/api/v1/workspaces/?limit=50",
        "/api/v1/projects/",
        "/api/v1/nodes/",
        "/api/v1/gpus/",
        "/api/v1/usage/?by=day",
        "/api/v1/usage/?by=project",
    ]


def _measure(name: str, path: str, headers: dict[str, str], jobs: int, rounds: int) -> dict[str, Any]:
    from django.db import connection
    from django.test import Client
    from django.test.utils import CaptureQueriesContext

    from portal import throttle

    client = Client()
    throttle.PREFIX = f"bench:{secrets.token_hex(6)}"
    for _ in range(3):
        answer = client.get(path, headers=headers)
        assert answer.status_code == 200, answer.content
    with CaptureQueriesContext(connection) as queries:
        client.get(path, headers=headers)
    count = len(queries)
    took_ms = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        client.get(path, headers=headers)
        took_ms.append((time.perf_counter() - began_s) * 1000)
    took_ms.sort()
    return {
        "bench": "lists",
        "path": path,
        "person": name,
        "jobs": jobs,
        "p50_ms": round(statistics.median(took_ms), 2),
        "p95_ms": round(took_ms[int(len(took_ms) * 0.95) - 1], 2),
        "queries": count,
        "bytes": len(answer.content),
        "calibration_ms": round(calibration_ms(), 2),
        "goal_p95_ms": 100,
    }


def _fill(jobs: int) -> dict[str, dict[str, str]]:
    """100 projects, 200 people, 50 nodes of 8 GPUs, and the jobs; headers of an admin and of a member."""
    import datetime as dt
    import random

    from django.db import connection
    from django.utils import timezone

    from portal.models import (
        Allocation,
        Attempt,
        Environment,
        Gpu,
        Job,
        JobEvent,
        Membership,
        Node,
        NodePool,
        Project,
        Standing,
        Task,
        UsageLedger,
        User,
    )
    from portal.models.public_id import new_public_id
    from portal.services.tokens import Scope, do_create_token

    dice = random.Random(1)
    now = timezone.now()
    pool = NodePool.objects.create(name="pool")
    lab = Environment.objects.create(name="lab", title="Lab", tool="jupyterlab", tool_port=8888)
    people = User.objects.bulk_create(
        User(username=f"user-{n}", uid=300_000 + n, gid=300_000 + n, is_admin=n == 0) for n in range(200)
    )
    projects = Project.objects.bulk_create(Project(name=f"project-{n}") for n in range(100))
    Membership.objects.bulk_create(
        Membership(user=person, project=project, role="member")
        for n, person in enumerate(people)
        for project in {projects[n % 100], projects[7]}
    )
    nodes = Node.objects.bulk_create(
        Node(name=f"node-{n}", pool=pool, state="ready", reachable=True, cpu_milli=64_000, memory_mib=512_000)
        for n in range(50)
    )
    gpus = Gpu.objects.bulk_create(
        Gpu(node=node, uuid=f"GPU-{node.pk}-{i}", index=i, model="H200", memory_mib=143_000, used_milli=1000)
        for node in nodes
        for i in range(8)
    )
    rows = []
    for n in range(jobs):
        project = projects[7] if n % 10 == 0 else dice.choice(projects)
        state = dice.choices(["COMPLETED", "FAILED", "CANCELLED", "PENDING"], [80, 8, 2, 10])[0]
        state = "RUNNING" if n >= jobs - 400 else state
        rows.append(
            Job(
                name=f"run-{n}",
                public_id=new_public_id(),
                kind="workspace" if n % 20 == 0 else "training",
                project=project,
                owner=dice.choice(people),
                environment=lab,
                state=state,
                priority=dice.choice([-10, 0, 0, 10]),
                command=["python", "train.py"],
                started_at=now if state != "PENDING" else None,
            )
        )
    rows = Job.objects.bulk_create(rows, batch_size=5000)
    Standing.objects.bulk_create(
        (
            Standing(job=job, code="share_used_up", sentence="It waits.", place=1, decided_at=now, since=now)
            for job in rows
            if job.state == "PENDING"
        ),
        batch_size=5000,
    )
    JobEvent.objects.bulk_create(
        (JobEvent(job=job, kind="submitted", sentence="Submitted.") for job in rows), batch_size=10_000
    )
    ended = [job for job in rows if job.state in {"COMPLETED", "FAILED"}]
    attempts = Attempt.objects.bulk_create(
        [Attempt(job=job, number=1, state="COMPLETED", pool=pool, leader_epoch=1) for job in ended]
        + [Attempt(job=job, number=1, state="RUNNING", pool=pool, leader_epoch=1) for job in rows[-400:]],
        batch_size=5000,
    )
    tasks = Task.objects.bulk_create(
        (
            Task(attempt=attempt, rank=0, node=nodes[n % 50], state=attempt.state)
            for n, attempt in enumerate(attempts)
        ),
        batch_size=5000,
    )
    live = iter(gpus)
    allocations = []
    for n, task in enumerate(tasks):
        began = now - dt.timedelta(minutes=n % 40_000)
        running = task.state == "RUNNING"
        allocations.append(
            Allocation(
                task=task,
                gpu=next(live) if running else gpus[n % 400],
                milli=1000,
                whole=True,
                started_at=began,
                ended_at=None if running else began + dt.timedelta(hours=1),
                proof="" if running else "gone",
            )
        )
    allocations = Allocation.objects.bulk_create(allocations, batch_size=5000)
    UsageLedger.objects.bulk_create(
        (
            UsageLedger(
                allocation=held,
                project_id=held.task.attempt.job.project_id,
                user_id=held.task.attempt.job.owner_id,
                pool=pool,
                job=held.task.attempt.job,
                milli=1000,
                started_at=held.started_at,
                ended_at=held.ended_at,
            )
            for held in allocations
        ),
        batch_size=5000,
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return {
        name: {"Authorization": f"Bearer {do_create_token(person, name='b', scopes=[Scope.READ])[1]}"}
        for name, person in (("admin", people[0]), ("member", people[7]))
    }
