"""Submissions of jobs by several clients at once: rate, response times, and whether one is lost or doubled.

    DATABASE_URL=... REDIS_URL=... python -m bench submissions [--jobs N] [--clients N] [--crowd N]

One web process as `up` starts it. First one client submits one job after the other, which is the reference;
then 8 clients, each of a user of its own, submit 500 jobs as fast as they can; then a crowd of clients sends
one each at the same moment, more than the process works on at once. Nobody repeats a refused request.
Afterwards the database must contain exactly the jobs that were answered with 201. Creates a database of its
own and drops it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.gateway import _process
from bench.report import percentile, print_figure
from bench.scratch_database import scratch_database

CLIENTS = 8
LIMIT_S = 60.0
WARM = 10
CROWD_USERS = 20


@dataclass(frozen=True)
class Answer:
    """What the client saw of one submission. ``status`` is 0 if there was no answer."""

    name: str
    status: int
    took_ms: float
    retry_after: str | None = None
    job: str = ""


@dataclass(frozen=True)
class GroupResult:
    """The answers of one group of clients, and the seconds from their first request to the last answer."""

    answers: list[Answer]
    spent_s: float


def main(arguments: list[str]) -> int:
    """Print a line for the clients and one for the crowd; return 1 if a job was lost or doubled."""
    parser = argparse.ArgumentParser(prog="bench submissions")
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument(
        "--crowd", type=int, default=300, help="clients that send at the same moment; 0: none"
    )
    options = parser.parse_args(arguments)
    with scratch_database() as url, tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder:
        from portal.standalone.process_table import web_arguments

        tokens = _tokens(options.clients + CROWD_USERS + 1)
        socket = Path(folder) / "web.sock"
        words = [*web_arguments(socket), "--log-level", "error"]
        environment = {"DATABASE_URL": url, "FAIRWAY_DATA_DIR": folder}
        with contextlib.ExitStack() as stack:
            stack.enter_context(_process(sys.executable, *words, **environment))
            _until_served(socket)
            _submit_all(socket, tokens[:1], WARM, "warm")
            alone = _submit_all(socket, tokens[:1], max(10, options.jobs // 5), "alone")
            together = _submit_all(socket, tokens[1 : options.clients + 1], options.jobs, "together")
            ok = _report(f"{options.clients} clients", alone, together, options.jobs)
            if options.crowd:
                crowd_tokens = tokens[options.clients + 1 :]
                senders = [crowd_tokens[place % CROWD_USERS] for place in range(options.crowd)]
                crowd = _submit_all(socket, senders, options.crowd, "crowd")
                ok &= _report(f"{options.crowd} clients at once", alone, crowd, options.crowd)
    return 0 if ok else 1


def _tokens(count: int) -> list[str]:
    """Return a token each of ``count`` members of one project."""
    from portal.models import Membership
    from portal.services.accounts.tokens import Scope, do_create_token
    from tests import factories

    made = factories.basic_cluster()
    tokens = []
    for _ in range(count):
        user = factories.user()
        Membership.objects.create(project=made["project"], user=user, role="member")
        tokens.append(do_create_token(user, name="bench", scopes=list(Scope))[1])
    _request.update(project=made["project"].name, environment=made["environment"].name)
    return tokens


_request: dict[str, Any] = {"command": ["true"], "gpus_per_task": 1}


def _client(socket: Path, **more: Any) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(socket))
    return httpx.Client(transport=transport, base_url="http://localhost", timeout=30, **more)


def _until_served(socket: Path) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.TransportError), _client(socket) as client:
            if client.get("/healthz").status_code == 200:
                return
        if time.monotonic() > deadline_s:
            raise SystemExit("the web process does not answer")
        time.sleep(0.05)


def _submit_all(socket: Path, tokens: Sequence[str], jobs: int, prefix: str) -> GroupResult:
    """Submit ``jobs`` jobs by as many clients as tokens, each one job after the other."""
    began_s: list[float] = []
    start = threading.Barrier(len(tokens), action=lambda: began_s.append(time.perf_counter()))

    def submit(place: int) -> list[Answer]:
        with _client(socket, headers={"Authorization": f"Bearer {tokens[place]}"}) as client:
            client.get("/healthz")
            start.wait(60)
            return [_submit(client, f"{prefix}-{number}") for number in range(place, jobs, len(tokens))]

    with ThreadPoolExecutor(len(tokens)) as pool:
        answers = [answer for each in pool.map(submit, range(len(tokens))) for answer in each]
    return GroupResult(answers, time.perf_counter() - began_s[0])


def _submit(client: httpx.Client, name: str) -> Answer:
    began_s = time.perf_counter()
    try:
        answer = client.post("/api/v1/jobs/", content=json.dumps(_request | {"name": name}), headers=_JSON)
    except httpx.TransportError as error:
        return Answer(f"{name} {error!r}", 0, (time.perf_counter() - began_s) * 1000)
    took_ms = (time.perf_counter() - began_s) * 1000
    job = answer.json().get("id", "") if answer.status_code == 201 else ""
    return Answer(name, answer.status_code, took_ms, answer.headers.get("Retry-After"), job)


_JSON = {"Content-Type": "application/json"}


def _report(row: str, alone: GroupResult, group: GroupResult, jobs: int) -> bool:
    from portal.models import Job

    answers, spent_s = group.answers, group.spent_s
    prefix = answers[0].name.split("-")[0]
    accepted = {answer.name: answer.job for answer in answers if answer.status == 201}
    stored = Counter(Job.objects.filter(name__startswith=f"{prefix}-").values_list("name", "public_id"))
    names = Counter(name for name, _ in stored)
    lost = len(set(accepted.items()) - set(stored))
    doubled = sum(count - 1 for count in names.values())
    unannounced = len(set(names) - set(accepted))
    statuses = Counter(answer.status for answer in answers)
    refused = [answer for answer in answers if answer.status in (429, 503)]
    without_time = sum(answer.retry_after is None for answer in refused)
    others = len(answers) - len(accepted) - len(refused)
    faults = lost + doubled + unannounced + without_time + others
    reference = len(alone.answers) / alone.spent_s
    ours = len(accepted) / spent_s
    p95_ms = percentile([answer.took_ms for answer in answers], 0.95)
    alone_p95_ms = percentile([answer.took_ms for answer in alone.answers], 0.95)
    print_figure(
        f"submissions, {row}",
        ours=round(ours, 1),
        reference=round(reference, 1),
        ratio=round(ours / reference, 2),
        unit="accepted /s",
        target=f"all answered within {LIMIT_S:.0f} s by 201, or 429 or 503 before any work; none lost, none doubled",
        met=faults == 0 and len(answers) == jobs and spent_s <= LIMIT_S,
        spent_s=round(spent_s, 1),
        p95_ms=round(p95_ms, 1),
        reference_p95_ms=round(alone_p95_ms, 1),
        p95_ratio=round(p95_ms / alone_p95_ms, 2),
        accepted=len(accepted),
        refused_429=statuses[429],
        refused_503=statuses[503],
        others=others,
        lost=lost,
        doubled=doubled,
        stored_without_201=unannounced,
        refused_without_retry_after=without_time,
        cores=os.cpu_count(),
    )
    return faults == 0
