"""Metric points from 50 jobs through the web process and the tracking server, beside COPY of the same points.

    DATABASE_URL=... REDIS_URL=... python -m bench experiments [--seconds S] [--jobs N]

Each job sends one `runs/log-batch` of 100 points a second with its own token. Reported is the CPU time of the web
process, the tracking server and PostgreSQL's backends, in cores; the reference copies the same rows into a table
like MLflow's with as many rows in a COPY.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from bench.gateway import _process
from bench.report import percentile, print_figure
from bench.scratch_database import scratch_database

POINTS = 100
KEYS = 10
TARGET = "5,000 points a second with less than half a core in web and tracking server"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main(arguments: list[str]) -> int:
    """Print the cores used, and the memory of the tracking server."""
    parser = argparse.ArgumentParser(prog="bench experiments")
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=50)
    wanted = parser.parse_args(arguments)
    with scratch_database() as url, tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder:
        from portal.standalone.process_table import web_arguments

        tokens, project = _tokens(wanted.jobs)
        web_socket, tracking_socket = Path(folder) / "web.sock", Path(folder) / "tracking.sock"
        environment = {
            "DATABASE_URL": url,
            "FAIRWAY_DATA_DIR": folder,
            "FAIRWAY_TRACKING_SOCKET": str(tracking_socket),
        }
        with contextlib.ExitStack() as stack:
            tracking = stack.enter_context(
                _process(sys.executable, "-m", "portal.tracking.server", **environment)
            )
            words = [*web_arguments(web_socket), "--log-level", "error"]
            web = stack.enter_context(_process(sys.executable, *words, **environment))
            _wait_for(tracking_socket, web_socket)
            _measure(wanted, web_socket, project, tokens, {"web": web.pid, "tracking": tracking.pid})
            print_figure(
                "memory of the tracking server", ours=_resident_mib(tracking.pid), unit="MiB resident"
            )
    return 0


def _measure(
    wanted: argparse.Namespace, socket: Path, project: str, tokens: list[str], processes: dict[str, int]
) -> None:
    base = f"http://localhost/api/mlflow/{project}/api/2.0/mlflow"
    clients = [
        httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket)),
            headers={"Authorization": f"Bearer {token}"},
            timeout=30,
        )
        for token in tokens
    ]
    experiment = _post(clients[0], f"{base}/experiments/create", {"name": "bench"})["experiment_id"]
    runs = [
        _post(client, f"{base}/runs/create", {"experiment_id": experiment, "start_time": 1})["run"]["info"][
            "run_id"
        ]
        for client in clients
    ]
    times_ms: list[float] = []

    def log(client: httpx.Client, run: str, index: int) -> None:
        began = time.monotonic() + index / len(runs)
        for second in range(wanted.seconds):
            time.sleep(max(0.0, began + second - time.monotonic()))
            sent = time.perf_counter()
            _post(client, f"{base}/runs/log-batch", {"run_id": run, "metrics": _points(second)})
            times_ms.append((time.perf_counter() - sent) * 1000)

    for client, run in zip(clients[:8], runs, strict=False):  # warm
        _post(client, f"{base}/runs/log-batch", {"run_id": run, "metrics": _points(-1)})
    before, database_before = {name: _cpu_s(pid) for name, pid in processes.items()}, _database_cpu_s()
    began = time.monotonic()
    threads = [
        threading.Thread(target=log, args=(*pair, i))
        for i, pair in enumerate(zip(clients, runs, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - began
    used = {name: (_cpu_s(pid) - before[name]) / took_s for name, pid in processes.items()}
    database = (_database_cpu_s() - database_before) / took_s
    points = wanted.seconds * len(runs) * POINTS
    stored = _stored_points(base, clients[0], runs)
    reference = _copy_cpu_s(wanted.seconds * len(runs)) / took_s
    cores = sum(used.values())
    print_figure(
        f"{points / took_s:,.0f} metric points a second from {len(runs)} jobs",
        ours=round(cores, 3),
        reference=round(reference, 3),
        ratio=round((cores + database) / reference, 2) if reference else None,
        unit="cores",
        target=TARGET,
        met=cores < 0.5 and stored,
        details={name: round(value, 3) for name, value in used.items()} | {"postgres": round(database, 3)},
        p50_ms=round(statistics.median(times_ms), 1),
        p95_ms=round(percentile(times_ms, 0.95), 1),
    )


def _tokens(count: int) -> tuple[list[str], str]:
    from portal.models import Attempt
    from portal.services.jobs.tracking import job_token
    from tests import factories

    made = factories.basic_cluster()
    tokens = []
    for _ in range(count):
        job = factories.job(made["owner"], made["project"], made["environment"])
        Attempt.objects.create(job=job, number=1, pool=made["pool"], leader_epoch=1, state="RUNNING")
        tokens.append(job_token(job.public_id, 1))
    return tokens, made["project"].public_id


def _points(second: int) -> list[dict[str, Any]]:
    now = int(time.time() * 1000)
    return [
        {
            "key": f"metric_{i % KEYS}",
            "value": i * 0.1 + second,
            "timestamp": now,
            "step": second * KEYS + i // KEYS,
        }
        for i in range(POINTS)
    ]


def _post(client: httpx.Client, url: str, body: dict[str, Any]) -> Any:
    answer = client.post(url, json=body)
    answer.raise_for_status()
    return answer.json()


def _stored_points(base: str, client: httpx.Client, runs: list[str]) -> bool:
    """Return whether the last points of all runs can be read back."""
    found = [client.get(f"{base}/runs/get", params={"run_id": run}).json() for run in runs]
    return all(len(each["run"]["data"].get("metrics", [])) == KEYS for each in found)


def _copy_cpu_s(batches: int) -> float:
    """Return PostgreSQL's CPU time for COPY of as many points, in as many transactions."""
    from django.db import connection

    from portal.database.roles import as_owner

    with as_owner(), connection.cursor() as cursor:
        cursor.execute("CREATE TABLE bench_points (LIKE mlflow.metrics INCLUDING ALL)")
        before = _database_cpu_s()
        for batch in range(batches):
            with cursor.copy(
                "COPY bench_points (run_uuid, key, value, timestamp, step, is_nan) FROM STDIN"
            ) as copy:
                for point in _points(batch):
                    row = (
                        f"run-{batch % 50}",
                        point["key"],
                        point["value"],
                        point["timestamp"],
                        point["step"],
                        False,
                    )
                    copy.write_row(row)
        return _database_cpu_s() - before


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _database_cpu_s() -> float:
    """Return the CPU time of the backends of this database, also of those that ended since."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT pid FROM pg_stat_activity WHERE datname = current_database()")
        pids = [pid for (pid,) in cursor.fetchall()]
    return sum(_cpu_s(pid) for pid in pids if Path(f"/proc/{pid}").exists())


def _resident_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS"))


def _wait_for(*sockets: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(socket.exists() for socket in sockets):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{', '.join(map(str, sockets))} did not appear within 60 s")
        time.sleep(0.1)
