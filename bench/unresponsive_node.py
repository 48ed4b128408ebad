"""Dispatch on healthy nodes while one node accepts commands and never answers, beside the same without it.

    python -m bench unresponsive_node [--jobs N] [--rounds N]

One worker, four nodes on this machine and a fifth whose agents are stopped (SIGSTOP) in every second round:
connections to it open, commands are accepted, and no answer arrives. Jobs are submitted one after another; a
dispatch is the time from the commit of an attempt on one of the four to RUNNING in the database. Both kinds
of rounds alternate.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from typing import Any

from bench.report import percentile, print_figure
from bench.scratch_database import scratch_database

NODES = 4
SUBMIT_INTERVAL_S = 0.2
SETTLED_WITHIN_S = 60.0


def main(arguments: list[str]) -> int:
    """Print the p95 of both kinds of rounds and their ratio."""
    parser = argparse.ArgumentParser(prog="bench unresponsive_node")
    parser.add_argument("--jobs", type=int, default=40, help="in each turn")
    parser.add_argument("--rounds", type=int, default=6)
    wanted = parser.parse_args(arguments)
    with scratch_database():
        from tests.engine_harness import engine_harness

        with engine_harness() as harness:
            times = _measure(harness, wanted.jobs, wanted.rounds)
    plain, beside = times[False], times[True]
    p95, reference = percentile(beside, 0.95), percentile(plain, 0.95)
    print_figure(
        "dispatch_beside_a_black_hole_p95",
        ours=round(p95 * 1000, 1),
        reference=round(reference * 1000, 1),
        ratio=round(p95 / reference, 2),
        unit="ms",
        target="at most 2 x without it",
        met=p95 <= 2 * reference,
        median_ms=[round(percentile(each, 0.5) * 1000, 1) for each in (beside, plain)],
        jobs=[len(beside), len(plain)],
    )
    return 0


def _measure(harness: Any, jobs: int, rounds: int) -> dict[bool, list[float]]:
    """Return seconds of each dispatch on a healthy node, by whether the fifth node was stopped."""
    from django.conf import settings

    from tests import factories

    settings.DATA_DIR = harness.folder
    owner, pool = factories.user("bench"), factories.pool()
    pool.policy = {"placement": "spread"}  # so that jobs are spread over all nodes
    pool.save()
    scene = {
        "owner": owner,
        "project": factories.project(member=owner),
        "environment": factories.environment(runtime="process", tool=False),
    }
    healthy = [harness.known(harness.node(pool=pool, name=f"n{number}")) for number in range(NODES)]
    hole = harness.known(harness.node(pool=pool, name="hole"))
    harness.worker()
    _wait_until_all_answer(NODES + 1)
    _run_round(scene, hole, healthy, 10, silent=False)  # warm-up: imports and caches
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        silent = number % 2 == 1
        times[silent] += _run_round(scene, hole, healthy, jobs, silent=silent)
    return times


def _run_round(
    scene: dict[str, Any], hole: Any, healthy: list[Any], jobs: int, *, silent: bool
) -> list[float]:
    from portal.models import Node, Task
    from tests.faults.counted_job import submit

    Node.objects.update(breaker_state="healthy", breaker_cause="", probe_at=None)
    _wait_until_all_answer(len(healthy) + 1)
    ended = threading.Event()
    silencer = threading.Thread(target=_silence, args=(hole.public_id, ended), daemon=True)
    if silent:
        silencer.start()
    made = []
    for _ in range(jobs):
        made.append(submit(scene, 0.05).pk)
        time.sleep(SUBMIT_INTERVAL_S)
    rows = Task.objects.filter(attempt__job__in=made, node__in=healthy)
    deadline_s = time.monotonic() + SETTLED_WITHIN_S
    while rows.filter(running_at__isnull=True).exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    pairs = rows.values_list("attempt__created_at", "running_at")
    found = [(running - created).total_seconds() for created, running in pairs if running is not None]
    ended.set()
    if silent:
        silencer.join()
    return found


def _silence(public_id: str, ended: threading.Event) -> None:
    """Stop the agents of a node, including new ones, until ``ended`` is set; then continue them."""
    from tests.faults.campaign.targets import agents_of, send_all

    stopped: set[int] = set()
    while not ended.wait(0.05):
        fresh = set(agents_of(f"agent/{public_id}.json")) - stopped
        send_all(sorted(fresh), signal.SIGSTOP)
        stopped |= fresh
    for pid in stopped:
        if os.path.exists(f"/proc/{pid}"):
            send_all([pid], signal.SIGCONT)


def _wait_until_all_answer(count: int) -> None:
    from portal.models import Node

    deadline_s = time.monotonic() + 90
    while Node.objects.filter(reachable=True, last_seen_at__isnull=False).count() < count:
        if time.monotonic() > deadline_s:
            raise SystemExit("the nodes do not answer")
        time.sleep(0.2)
