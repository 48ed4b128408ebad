"""How long it takes to foresee every start: one pass over the record, 1,000 nodes of 8 GPUs, 10,000 jobs waiting.

    DATABASE_URL=... REDIS_URL=... python -m bench forecast [--rounds 3]

Each row is ``scheduler.forecast.forecast_pass.foresee`` as worker-replay runs it, from the photograph to the intervals written: first
where nobody was foreseen before, then where a job ended, one came and cycles ran since. Makes a database of its own
beside the one that DATABASE_URL names, and drops it.
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
"""Jobs that have ended: how long others will run is learned from so many."""
TARGET_S = 20.0


def main(arguments: list[str]) -> int:
    """Prints the rows; 1 when a pass takes longer than the time to the next."""
    parser = argparse.ArgumentParser(prog="bench forecast")
    parser.add_argument("--rounds", type=int, default=3, help="passes where little changed")
    rounds = parser.parse_args(arguments).rounds
    with scratch_database():
        from scheduler.cycle_state import CycleState
        from scheduler.forecast.forecast_pass import ForecastState

        record, state, forecast_state = BenchCluster(), CycleState(), ForecastState()
        _add_ended(record)
        record.add_running_and_pending()
        _spread_starts()
        record.settle(state)
        met = _measure_pass("foresee, nobody foreseen before", forecast_state)
        for n in range(rounds):
            record.end_one(n)
            record.submit_one(n)
            record.settle(state)
            met &= _measure_pass("foresee, one job ended and one came", forecast_state)
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
    """Jobs like those that wait, which have ended after some minutes to some days."""
    from portal.models import Job

    draw, ends = random.Random(1), record.now
    jobs = record.add_jobs(record.snapshot.pending[:ENDED], "COMPLETED")
    for job in jobs:
        ends -= dt.timedelta(seconds=20)
        job.started_at, job.ended_at = ends - dt.timedelta(seconds=draw.lognormvariate(8.0, 1.5)), ends
    Job.objects.bulk_update(jobs, ["started_at", "ended_at"], batch_size=1_000)


def _spread_starts() -> None:
    """Running jobs began at different times of the last hours, not all at once."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE portal_attempt SET created_at = created_at - make_interval(secs => (id * 7919) % 20000)"
        )
