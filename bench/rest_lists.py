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

from bench.calibration import calibration_ms
from bench.portal_dataset import BenchDataset
from bench.report import percentile, print_figure
from bench.scratch_database import scratch_database

FEW_JOBS = 2_000
FEW_RUNNING, MANY_RUNNING = 200, 6_000
"""Of the newest of the first jobs, and of the newest of all.

So the first pages of both contain the same kinds of rows: a missing kind would save its queries.
"""
FEW_ROUNDS = 8
TARGET_MS = 100.0
REFERENCE_CALIBRATION_MS = 150.0
"""Of the machine for which the target is written; the target grows on a slower one."""
TARGET = "p95 below 100 ms where the calibration loop takes 0.15 s, as many queries as with 2,000 jobs"

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
    bench: str, arguments: list[str], *makers: Callable[[BenchDataset], list[RequestCase]]
) -> None:
    """Measure the requests that the makers return for the users; print one line each."""
    parser = argparse.ArgumentParser(prog=f"bench {bench}")
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="a part of the path")
    wanted = parser.parse_args(arguments)
    with bench_dataset() as scene:
        scene.add_jobs(FEW_JOBS, running=FEW_RUNNING)
        looks = [look for make in makers for look in make(scene) if wanted.only in look[1]]
        few = [_or_problem(look, measure_with_few_jobs) for look in looks]
        scene.add_jobs(wanted.jobs - FEW_JOBS, running=MANY_RUNNING)
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
    except Exception as error:
        return f"it failed: {error!r}"[:500]


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


def measure_with_few_jobs(look: RequestCase) -> tuple[int, float]:
    """Return the queries, and the median milliseconds of a few requests."""
    return count_queries(look), statistics.median(request_times_ms(look, FEW_ROUNDS)[0])


def request_times_ms(look: RequestCase, rounds: int) -> tuple[list[float], int]:
    """Return the milliseconds of each request, and the bytes of the last answer."""
    from portal.valkey import rate_limits

    rate_limits.PREFIX = f"bench:{secrets.token_hex(6)}"
    took_ms, size = [], 0
    for _ in range(rounds):
        began_s = time.perf_counter()
        size = len(look[2]().content)
        took_ms.append((time.perf_counter() - began_s) * 1000)
    return took_ms, size


def measure(few: tuple[int, float], jobs: int, rounds: int, look: RequestCase) -> None:
    """Print the line of one request. Its reference is the median of the same request with few jobs."""
    user, path, _ = look
    queries_with_few, reference_ms = few
    queries = count_queries(look)
    took_ms, size = request_times_ms(look, rounds)
    p50_ms, p95_ms = statistics.median(took_ms), percentile(took_ms, 0.95)
    limit_ms = TARGET_MS * max(1.0, calibration_ms() / REFERENCE_CALIBRATION_MS)
    print_figure(
        f"{path} as {user}",
        ours=round(p95_ms, 1),
        reference=round(reference_ms, 1),
        ratio=round(p50_ms / reference_ms, 2),
        unit="ms p95",
        target=TARGET,
        met=p95_ms < limit_ms and queries <= queries_with_few,
        p50_ms=round(p50_ms, 1),
        queries=queries,
        queries_with_few=queries_with_few,
        bytes=size,
        jobs=jobs,
    )


def rest_requests(scene: BenchDataset) -> list[RequestCase]:
    """Return the requests of the API's lists, with a token."""
    from django.test import Client

    from portal.services.accounts.tokens import Scope, do_create_token

    looks: list[RequestCase] = []
    for name, user in scene.users.items():
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
