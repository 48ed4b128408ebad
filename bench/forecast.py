"""Duration of a forecast pass: 1,000 nodes of 8 GPUs, 10,000 pending jobs.

    DATABASE_URL=... REDIS_URL=... python -m bench forecast [--rounds 3]

Each row is one pass of ``scheduler.forecast.forecast_pass`` as worker-replay runs it, from the snapshot to
the written intervals: first without earlier forecasts, then after a job ended, one was submitted and cycles
ran. Creates a database of its own beside the one in DATABASE_URL, and drops it.
"""

from __future__ import annotations

import argparse
import datetime as dt
import random
import time
from typing import Any

from bench.cycle import PENDING, BenchCluster
from bench.report import print_figure
from bench.scratch_database import scratch_database

ENDED = 5_000
"""Ended jobs from which durations are learned."""
TARGET_S = 20.0


def main(arguments: list[str]) -> int:
    """Print the rows; return 1 when a pass takes longer than its period."""
    parser = argparse.ArgumentParser(prog="bench forecast")
    parser.add_argument("--rounds", type=int, default=3, help="passes with few changes")
    rounds = parser.parse_args(arguments).rounds
    with scratch_database():
        from scheduler.cycle import CycleState
        from scheduler.forecast.forecast_pass import ForecastState

        record, state, forecast_state = BenchCluster(), CycleState(), ForecastState()
        _add_ended(record)
        record.add_running_and_pending()
        _spread_starts()
        record.settle(state)
        met = _measure_pass("forecast, no earlier forecasts", forecast_state)
        for n in range(rounds):
            record.end_one(n)
            record.submit_one(n)
            record.settle(state)
            met &= _measure_pass("forecast, one job ended and one arrived", forecast_state)
    return 0 if met else 1


def _measure_pass(name: str, state: Any) -> bool:
    from scheduler.forecast import forecast_pass

    began_s, used_s = time.perf_counter(), time.process_time()
    written = forecast_pass.run_forecast_pass(state=state)
    seconds, used_s = time.perf_counter() - began_s, time.process_time() - used_s
    print_figure(
        name,
        ours=round(seconds, 2),
        unit="s",
        target=f"below {TARGET_S:g}",
        met=seconds < TARGET_S,
        processor_s=round(used_s, 2),
        pending=PENDING,
        written=written,
    )
    return seconds < TARGET_S


def _add_ended(record: BenchCluster) -> None:
    """Add ended jobs like the pending ones, with durations from minutes to days."""
    from portal.models import Job

    draw, ends = random.Random(1), record.now
    jobs = record.add_jobs(record.snapshot.pending[:ENDED], "COMPLETED")
    for job in jobs:
        ends -= dt.timedelta(seconds=20)
        job.started_at, job.ended_at = ends - dt.timedelta(seconds=draw.lognormvariate(8.0, 1.5)), ends
    Job.objects.bulk_update(jobs, ["started_at", "ended_at"], batch_size=1_000)


def _spread_starts() -> None:
    """Spread the starts of running jobs over the last hours."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE portal_attempt SET created_at = created_at - make_interval(secs => (id * 7919) % 20000)"
        )
