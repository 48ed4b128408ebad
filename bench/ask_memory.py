"""Memory of a running worker-ask while jobs are submitted, each with its query "would this start now".

    DATABASE_URL=... REDIS_URL=... python -m bench ask_memory [--seconds S] [--per-s N] [--nodes N] [--pending N]
        [--ended N]

Creates a database of its own beside the one in DATABASE_URL, and drops it. The queue keeps its length: each
submitted job has ended. Durations are learned from the latest 5,000 ended jobs, which exist from the start
unless ``--ended`` says otherwise: until then they are what grows. The figure is the resident memory at the end divided by that after the first
``WARM_ANSWERS`` answers. With ``--verbose``, each sample is a line.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.report import print_figure
from bench.scratch_database import scratch_database
from bench.what_if import build_cluster

WARM_ANSWERS = 120
"""More than the answers between two full garbage collections of worker-ask."""
TARGET_RATIO = 1.1
START_LIMIT_S = 60
SAMPLE_EVERY_S = 10.0


def main(arguments: list[str]) -> int:
    """Print the growth of the resident memory."""
    parser = argparse.ArgumentParser(prog="bench ask_memory")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--per-s", type=float, default=4.0, help="jobs per second")
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--pending", type=int, default=200)
    parser.add_argument("--ended", type=int, default=5_000, help="ended jobs at the start")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    with scratch_database() as url:
        bodies = build_cluster(options.nodes, options.pending)
        draw = random.Random(0)
        _add_ended_jobs(draw, [_varied(draw, bodies) for _ in range(options.ended)])
        from portal.standalone.process_table import PROCESSES

        (declared,) = (process for process in PROCESSES if process.name == "worker-ask")
        worker = subprocess.Popen(
            [sys.executable, *declared.template],
            env={**os.environ, "DATABASE_URL": url, "DATABASE_OWNER_URL": ""},
        )
        try:
            measure(worker.pid, bodies, options)
        finally:
            worker.terminate()
            worker.wait()
    return 0


def measure(worker: int, bodies: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Submit until the time is over and print the figure."""
    from portal.engine_client import query_would_start

    _await_worker(bodies[0])
    draw, answered, unanswered = random.Random(1), 0, 0
    first_mib = highest_mib = resident_mib(worker)
    began_s = next_s = sample_s = time.monotonic()
    while time.monotonic() - began_s < options.seconds:
        body = _varied(draw, bodies)
        _add_ended_jobs(draw, [body])
        if query_would_start(body, wait_s=5.0) is None:
            unanswered += 1
        else:
            answered += 1
        now_mib = resident_mib(worker)
        highest_mib = max(highest_mib, now_mib)
        if answered <= WARM_ANSWERS:
            first_mib = max(first_mib, now_mib)
        if options.verbose and time.monotonic() >= sample_s:
            sample_s += SAMPLE_EVERY_S
            print(f"{time.monotonic() - began_s:.0f} s: {answered} answers, {now_mib:.1f} MiB", flush=True)
        next_s += 1 / options.per_s
        time.sleep(max(0.0, next_s - time.monotonic()))
    last_mib = resident_mib(worker)
    ratio = round(last_mib / first_mib, 3)
    print_figure(
        "worker-ask, memory at the end",
        ours=round(last_mib, 1),
        reference=round(first_mib, 1),
        ratio=ratio,
        unit="MiB",
        target=f"at most {TARGET_RATIO:g} times that after {WARM_ANSWERS} answers",
        met=ratio <= TARGET_RATIO,
        highest_mib=round(highest_mib, 1),
        answered=answered,
        unanswered=unanswered,
        seconds=round(time.monotonic() - began_s),
    )


def _varied(draw: random.Random, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a request that differs from nearly all others."""
    return {
        **draw.choice(bodies),
        "gpus_per_task": draw.choice((1, 2, 4, 8)),
        "tasks": draw.choice((1, 1, 2, 4)),
        "cpu_milli": draw.randrange(1, 64) * 1000,
        "memory_mib": draw.randrange(1, 256) * 1024,
        "time_limit_s": draw.randrange(1, 96) * 900,
    }


def _add_ended_jobs(draw: random.Random, bodies: list[dict[str, Any]]) -> None:
    from django.utils import timezone

    from portal.models import Environment, Job, Project, User
    from portal.models.public_id import new_public_id

    now = timezone.now()
    projects = {row.public_id: row for row in Project.objects.all()}
    users = {row.public_id: row for row in User.objects.all()}
    environments = {row.public_id: row for row in Environment.objects.all()}
    Job.objects.bulk_create(
        [
            Job(
                public_id=new_public_id(), name="ended", command=["true"], state="COMPLETED",
                project=projects[body["project"]], owner=users[body["user"]],
                environment=environments[body["environment"]],
                gpus_per_task=body["gpus_per_task"], tasks=body["tasks"],
                started_at=now - dt.timedelta(seconds=draw.lognormvariate(8.0, 1.0)), ended_at=now,
            )
            for body in bodies
        ],
        batch_size=1000,
    )  # fmt: skip


def _await_worker(body: dict[str, Any]) -> None:
    from portal.engine_client import query_would_start

    deadline_s = time.monotonic() + START_LIMIT_S
    while query_would_start(body, wait_s=5.0) is None:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"worker-ask did not answer within {START_LIMIT_S} s")
        time.sleep(0.2)


def resident_mib(process: int) -> float:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) / 1024
