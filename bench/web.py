"""Small requests to the web process as `up` starts it: with pooled connections, and with one each.

    DATABASE_URL=... REDIS_URL=... python -m bench web [--rounds N] [--at-once N]

Two web processes use the same small database, one of them with FAIRWAY_DATABASE_POOL=0, and are measured
alternately over their unix sockets: one request after the other, then several at once. Creates a database of
its own and drops it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from bench.gateway import _process
from bench.report import percentile, print_figure
from bench.scratch_database import scratch_database

PAGES = {"/api/v1/me/": "token", "/api/v1/jobs/?limit=50": "token", "/jobs/": "session", "/": "session"}
WARM = 20
ROUNDS = 4


def main(arguments: list[str]) -> int:
    """Print a line for each page, and one for many at once."""
    parser = argparse.ArgumentParser(prog="bench web")
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--at-once", type=int, default=16)
    wanted = parser.parse_args(arguments)
    with scratch_database() as url:
        from portal.standalone.process_table import web_arguments

        headers = _credentials()
        with tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder, contextlib.ExitStack() as stack:
            clients: dict[str, httpx.Client] = {}
            for name, size in {"shared": "20", "own": "0"}.items():
                socket = Path(folder) / f"{name}.sock"
                environment = {"DATABASE_URL": url, "FAIRWAY_DATA_DIR": folder, "FAIRWAY_DATABASE_POOL": size}
                words = [*web_arguments(socket), "--log-level", "error"]
                stack.enter_context(_process(sys.executable, *words, **environment))
                clients[name] = stack.enter_context(client_of_socket(socket))
            for path, connection in PAGES.items():
                _one_by_one(path, headers[connection], clients, wanted.rounds)
            _at_once("/api/v1/me/", headers["token"], clients, wanted.at_once, wanted.rounds)
    return 0


def _credentials() -> dict[str, dict[str, str]]:
    from portal.services.accounts.tokens import Scope, do_create_token
    from tests import factories
    from tests.gateway.gateway_harness import sign_in

    made = factories.basic_cluster()
    for _ in range(20):
        factories.job(made["owner"], made["project"], made["environment"])
    token = do_create_token(made["owner"], name="bench", scopes=[Scope.READ])[1]
    return {
        "token": {"Authorization": f"Bearer {token}"},
        "session": {"Cookie": f"fairway_session={sign_in(made['owner'])}", "Accept": "text/html"},
    }


def client_of_socket(socket: Path) -> httpx.Client:
    """Return a client of the process that will listen on a unix socket; wait up to 20 s for it."""
    until = time.monotonic() + 20
    while not socket.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=str(socket), limits=httpx.Limits(max_connections=64)),
        base_url="http://localhost",
        timeout=30,
    )


def _request_duration(client: httpx.Client, path: str, headers: dict[str, str]) -> float:
    began_s = time.perf_counter()
    answer = client.get(path, headers=headers)
    took_ms = (time.perf_counter() - began_s) * 1000
    assert answer.status_code == 200, (path, answer.status_code, answer.text[:300])
    return took_ms


def _one_by_one(path: str, headers: dict[str, str], clients: dict[str, httpx.Client], rounds: int) -> None:
    took: dict[str, list[float]] = {name: [] for name in clients}
    for turn in range(WARM + rounds):
        for name, client in clients.items():
            ms = _request_duration(client, path, headers)
            if turn >= WARM:
                took[name].append(ms)
    _print_rows(path, took)


def _at_once(
    path: str, headers: dict[str, str], clients: dict[str, httpx.Client], clients_count: int, rounds: int
) -> None:
    took: dict[str, list[float]] = {name: [] for name in clients}
    spent_s = dict.fromkeys(clients, 0.0)
    for _ in range(ROUNDS):
        for name, client in clients.items():
            with ThreadPoolExecutor(clients_count) as pool:
                began_s = time.perf_counter()
                took[name] += pool.map(
                    lambda _, c=client: _request_duration(c, path, headers), range(rounds // ROUNDS)
                )
                spent_s[name] += time.perf_counter() - began_s
    rates = {f"{name}_per_s": round(len(took[name]) / spent_s[name]) for name in clients}
    _print_rows(f"{path}, {clients_count} at once", took, **rates)


def _print_rows(row: str, took: dict[str, list[float]], **more: Any) -> None:
    ours, own = (statistics.median(took[name]) for name in ("shared", "own"))
    print_figure(
        row,
        ours=round(ours, 1),
        reference=round(own, 1),
        ratio=round(own / ours, 2),
        unit="ms p50",
        target="below that of a connection for each request",
        met=ours < own,
        p95_ms=round(percentile(took["shared"], 0.95), 1),
        reference_p95_ms=round(percentile(took["own"], 0.95), 1),
        best_ms=round(min(took["shared"]), 1),
        reference_best_ms=round(min(took["own"]), 1),
        **more,
    )
