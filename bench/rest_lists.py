"""REST lists with 100,000 jobs: response time through the whole Django stack, and query counts.

    DATABASE_URL=... REDIS_URL=... python -m bench rest_lists [--jobs N] [--rounds N] [--only PART]

Creates a database of its own beside the one in DATABASE_URL, and drops it. Queries are counted with 2,000
jobs first: the number must not grow with the rows.
"""

from __future__ import annotations

import argparse
import gc
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from bench.report import percentile, print_figure
from bench.scratch_database import scratch_database

FEW_JOBS = 2_000
GPUS = 400
"""Half belong to the newest of the first jobs, half to the newest of all.

So the first pages of both contain the same kinds of rows: a missing kind would save its queries.
"""
TARGET_MS = 100.0
TARGET = "p95 below 100 ms, as many queries as with 2,000 jobs"

HOST = "localhost"
"""A host that settings allow. Django's test environment is not set up: it copies each template's context."""

_T = TypeVar("_T")
RequestCase = tuple[str, str, Callable[[], Any]]
"""User, name, and the request itself."""


def main(arguments: list[str]) -> int:
    """Print a line for each list and kind of user."""
    run_requests("lists", arguments, rest_requests)
    return 0


def run_requests(
    bench: str, arguments: list[str], *makers: Callable[[dict[str, Any]], list[RequestCase]]
) -> None:
    """Measure the requests that the makers return for the users; print one line each."""
    parser = argparse.ArgumentParser(prog=f"bench {bench}")
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="a part of the path")
    wanted = parser.parse_args(arguments)
    with bench_dataset() as scene:
        scene.add_jobs(FEW_JOBS, running=GPUS // 2)
        looks = [look for make in makers for look in make(scene.users) if wanted.only in look[1]]
        few = [_or_problem(look, count_queries) for look in looks]
        scene.add_jobs(wanted.jobs - FEW_JOBS, running=GPUS // 2)
        gc.collect()
        gc.freeze()  # as web does for permanent objects
        for look, queries in zip(looks, few, strict=True):
            problem = queries if isinstance(queries, str) else None
            if not isinstance(queries, str):
                problem = _or_problem(look, partial(measure, queries, wanted.jobs, wanted.rounds))
            if problem is not None:
                print_figure(f"{look[1]} as {look[0]}", skipped=problem)


def _or_problem(look: RequestCase, act: Callable[[RequestCase], _T]) -> _T | str:
    """Return the result or the error: one failing page must not prevent the others."""
    try:
        return act(look)
    except Exception as problem:
        return f"it failed: {problem!r}"[:500]


@contextmanager
def bench_dataset() -> Iterator[BenchDataset]:
    """Provide a fresh database with users, projects and nodes; drop it at the end."""
    with scratch_database():
        yield BenchDataset()


def count_queries(look: RequestCase) -> int:
    """Return the database queries of one request with warm caches."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    ask = look[2]
    for _ in range(3):
        answer = ask()
        assert answer.status_code == 200, (look[1], answer.status_code, answer.content[:500])
    with CaptureQueriesContext(connection) as queries:
        ask()
    return len(queries)


def measure(queries_with_few: int, jobs: int, rounds: int, look: RequestCase) -> None:
    """Print the line of one request."""
    from portal.valkey import rate_limits

    user, path, ask = look
    rate_limits.PREFIX = f"bench:{secrets.token_hex(6)}"
    queries = count_queries(look)
    took_ms, size = [], 0
    for _ in range(rounds):
        began_s = time.perf_counter()
        size = len(ask().content)
        took_ms.append((time.perf_counter() - began_s) * 1000)
    p95_ms = percentile(took_ms, 0.95)
    print_figure(
        f"{path} as {user}",
        ours=round(p95_ms, 1),
        unit="ms p95",
        target=TARGET,
        met=p95_ms < TARGET_MS and queries <= queries_with_few,
        p50_ms=round(statistics.median(took_ms), 1),
        queries=queries,
        queries_with_few=queries_with_few,
        bytes=size,
        jobs=jobs,
    )


def rest_requests(users: dict[str, Any]) -> list[RequestCase]:
    """Return the requests of the API's lists, with a token."""
    from django.test import Client

    from portal.services.accounts.tokens import Scope, do_create_token

    looks: list[RequestCase] = []
    for name, user in users.items():
        token = do_create_token(user, name="bench", scopes=[Scope.READ])[1]
        client = Client(headers={"Authorization": f"Bearer {token}"}, SERVER_NAME=HOST)
        looks += [(name, path, partial(client.get, path)) for path in _paths()]
    return looks


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


class BenchDataset:
    """100 projects with quotas, 200 users, 50 nodes of 8 GPUs; ``add_jobs`` adds jobs."""

    def __init__(self) -> None:
        from portal.models import Environment, Gpu, Membership, Node, NodePool, Project, Quota, User

        pool = self.pool = NodePool.objects.create(name="pool")
        self.lab = Environment.objects.create(name="lab", title="Lab", tool="jupyterlab", tool_port=8888)
        persons = self.persons = User.objects.bulk_create(
            User(username=f"user-{n}", uid=300_000 + n, gid=300_000 + n, is_admin=n == 0) for n in range(200)
        )
        projects = self.projects = Project.objects.bulk_create(
            Project(name=f"project-{n}") for n in range(100)
        )
        Membership.objects.bulk_create(
            Membership(user=user, project=project, role="member")
            for n, user in enumerate(persons)
            for project in {projects[n % 100], projects[7]}
        )
        nodes = self.nodes = Node.objects.bulk_create(
            Node(
                name=f"node-{n}",
                pool=pool,
                state="ready",
                reachable=True,
                cpu_milli=64_000,
                memory_mib=512_000,
            )
            for n in range(50)
        )
        self.gpus = Gpu.objects.bulk_create(
            Gpu(
                node=node,
                uuid=f"GPU-{node.pk}-{i}",
                index=i,
                model="H200",
                memory_mib=143_000,
                used_milli=1000,
            )
            for node in nodes
            for i in range(GPUS // len(nodes))
        )
        self._free = iter(self.gpus)
        Quota.objects.bulk_create(
            Quota(project=project, pool=pool, guaranteed_milli=4_000) for project in projects
        )
        self.users: dict[str, Any] = {"admin": persons[0], "member": persons[7]}

    def _add_sweeps(self, rows: list[Any]) -> None:
        """Make jobs the trials of sweeps of 300 in each project."""
        from portal.models import Sweep, Trial

        for project in self.projects:
            mine = [job for job in rows if job.project_id == project.pk]
            for first in range(0, len(mine), 300):
                sweep = Sweep.objects.create(
                    name="lr-search", owner=mine[first].owner, project=project, environment=self.lab,
                    job={"name": "t"}, max_trials=300, seed=1,
                )  # fmt: skip
                Trial.objects.bulk_create(
                    Trial(sweep=sweep, number=n, parameters={}, job=job)
                    for n, job in enumerate(mine[first : first + 300])
                )

    def add_jobs(self, jobs: int, *, running: int) -> None:
        """Add jobs of every state, the last ``running`` on a GPU each; the member owns one in fifty."""
        import datetime as dt
        import random

        from django.db import connection
        from django.utils import timezone

        from portal.models import Allocation, Attempt, Job, JobEvent, JobVerdict, Task, UsageInterval
        from portal.models.public_id import new_public_id

        dice = random.Random(jobs)
        now = timezone.now()
        projects, users, gpus, nodes = self.projects, self.persons, self.gpus, self.nodes
        pool, lab = self.pool, self.lab
        rows = []
        for n in range(jobs):
            project = projects[7] if n % 10 == 0 else dice.choice(projects)
            owner = users[7] if n % 50 == 0 else dice.choice(users)
            state = dice.choices(["COMPLETED", "FAILED", "CANCELLED", "PENDING"], [80, 8, 2, 10])[0]
            live = n >= jobs - running
            state = "RUNNING" if live else state
            rows.append(
                Job(
                    name=f"run-777-{n}" if live else f"run-{n}",
                    public_id=new_public_id(),
                    kind="workspace" if n % 20 == 0 else "training",
                    project=project,
                    owner=owner,
                    environment=lab,
                    state=state,
                    priority=dice.choice([-10, 0, 0, 10]),
                    command=["python", "train.py"],
                    started_at=now if state != "PENDING" else None,
                )
            )
        rows = Job.objects.bulk_create(rows, batch_size=5000)
        self._add_sweeps([job for n, job in enumerate(rows) if n % 3 == 0 and job.kind == "training"])
        JobVerdict.objects.bulk_create(
            (
                JobVerdict(
                    job=job, code="over_fair_share", message="It waits.", decided_at=now, code_since=now
                )
                for job in rows
                if job.state == "PENDING"
            ),
            batch_size=5000,
        )
        JobEvent.objects.bulk_create(
            (JobEvent(job=job, kind="submitted", message="Submitted.") for job in rows), batch_size=10_000
        )
        ended = [job for job in rows if job.state in {"COMPLETED", "FAILED"}]
        attempts = Attempt.objects.bulk_create(
            [Attempt(job=job, number=1, state="COMPLETED", pool=pool, leader_epoch=1) for job in ended]
            + [
                Attempt(job=job, number=1, state="RUNNING", pool=pool, leader_epoch=1)
                for job in rows[len(rows) - running :]
            ],
            batch_size=5000,
        )
        tasks = Task.objects.bulk_create(
            (
                Task(attempt=attempt, rank=0, node=nodes[n % 50], state=attempt.state)
                for n, attempt in enumerate(attempts)
            ),
            batch_size=5000,
        )
        allocations = []
        for n, task in enumerate(tasks):
            began = now - dt.timedelta(minutes=n % 40_000)
            running = task.state == "RUNNING"
            allocations.append(
                Allocation(
                    task=task,
                    gpu=next(self._free) if running else gpus[n % GPUS],
                    milli=1000,
                    whole=True,
                    started_at=began,
                    ended_at=None if running else began + dt.timedelta(hours=1),
                    proof="" if running else "gone",
                )
            )
        allocations = Allocation.objects.bulk_create(allocations, batch_size=5000)
        UsageInterval.objects.bulk_create(
            (
                UsageInterval(
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
