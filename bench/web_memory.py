"""Memory of a web process with a limit of 512 MiB while users browse.

    DATABASE_URL=... REDIS_URL=... python -m bench web_memory [--seconds S] [--jobs N] [--at-once N] [--limit-mib N]

A web process as `up` starts it answers every page of the access table, lists, filters and REST lists, as an
administrator and as a member, in random order, several at once. As root on a machine with cgroup v1 or v2 the
process has a cgroup with that limit, so that it is killed beyond it; else the row says that nothing limits it.
The figure is the resident memory at the end divided by that after the first ``WARM_REQUESTS`` requests. Creates a
database of its own beside the one in DATABASE_URL, and drops it. With ``--verbose``, each sample is a line.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from bench.ask_memory import resident_mib
from bench.gateway import _process
from bench.html_pages import page_requests
from bench.portal_dataset import BenchDataset
from bench.report import print_figure
from bench.rest_lists import rest_requests
from bench.scratch_database import scratch_database
from bench.web import client_of_socket

WARM_REQUESTS = 3_000
"""Each page several times, so that templates, plans and pools are there."""
TARGET_RATIO = 1.1
SAMPLE_EVERY_S = 10.0
BATCH = 200
_CGROUPS = Path("/sys/fs/cgroup")


def main(arguments: list[str]) -> int:
    """Print the growth of the resident memory."""
    parser = argparse.ArgumentParser(prog="bench web_memory")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--limit-mib", type=int, default=512)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    with scratch_database() as url, tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder:
        from portal.standalone.process_table import web_arguments

        scene = BenchDataset()
        scene.add_jobs(options.jobs, running=min(6_000, options.jobs // 4))
        requests = list(_addresses(scene))
        socket = Path(folder) / "web.sock"
        environment = {"DATABASE_URL": url, "FAIRWAY_DATA_DIR": folder, "FAIRWAY_DATABASE_POOL": "20"}
        with (
            _process(sys.executable, *web_arguments(socket), "--log-level", "error", **environment) as web,
            _memory_limit(web.pid, options.limit_mib) as has_limit,
            client_of_socket(socket) as client,
        ):
            _measure(web.pid, client, requests, options, has_limit)
    return 0


def _addresses(scene: BenchDataset) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the address and headers of each request that the other benchmarks of pages and lists make."""
    from tests.gateway.gateway_harness import sign_in

    cookies = {name: f"fairway_session={sign_in(user)}" for name, user in scene.users.items()}
    for user, _, request in [*page_requests(scene), *rest_requests(scene)]:
        address: str = request.args[0]  # type: ignore[attr-defined]  # they are partials of Client.get
        yield address, {"Cookie": cookies[user], "Accept": "application/json, text/html"}


def _measure(
    web: int,
    client: httpx.Client,
    requests: list[tuple[str, dict[str, str]]],
    options: argparse.Namespace,
    has_limit: bool,
) -> None:
    draw, answers = random.Random(1), collections.Counter[int]()
    first_mib = highest_mib = 0.0
    began_s = sample_s = time.monotonic()

    def answer(request: tuple[str, dict[str, str]]) -> int:
        return client.get(request[0], headers=request[1]).status_code

    with ThreadPoolExecutor(options.at_once) as threads:
        while time.monotonic() - began_s < options.seconds or not first_mib:
            answers.update(threads.map(answer, draw.choices(requests, k=BATCH)))
            now_mib = resident_mib(web)
            highest_mib = max(highest_mib, now_mib)
            if not first_mib and answers.total() >= WARM_REQUESTS:
                first_mib = now_mib
            if options.verbose and time.monotonic() >= sample_s:
                sample_s += SAMPLE_EVERY_S
                print(
                    f"{time.monotonic() - began_s:.0f} s: {answers.total()} answers, {now_mib:.1f} MiB",
                    flush=True,
                )
    last_mib = resident_mib(web)
    ratio = round(last_mib / first_mib, 3)
    print_figure(
        "web, memory at the end",
        ours=round(last_mib, 1),
        reference=round(first_mib, 1),
        ratio=ratio,
        unit="MiB",
        target=f"at most {TARGET_RATIO:g} times that after {WARM_REQUESTS} answers, never above the limit",
        met=ratio <= TARGET_RATIO and highest_mib <= options.limit_mib,
        highest_mib=round(highest_mib, 1),
        limit_mib=options.limit_mib if has_limit else None,
        addresses=len(requests),
        answers={str(status): count for status, count in sorted(answers.items())},
        seconds=round(time.monotonic() - began_s),
    )


@contextlib.contextmanager
def _memory_limit(process: int, limit_mib: int) -> Iterator[bool]:
    """Put the process into a cgroup with a limit of its memory. Yield whether that was possible."""
    limits: dict[str, Any] = {"memory/{}": "memory.limit_in_bytes", "{}": "memory.max"}
    for place, file in limits.items():
        group = _CGROUPS / place.format(f"fairway-bench-{process}")
        with contextlib.suppress(OSError):
            group.mkdir()
            (group / file).write_text(str(limit_mib * 1024 * 1024))
            (group / "cgroup.procs").write_text(str(process))
            break
        with contextlib.suppress(OSError):
            group.rmdir()
    else:
        yield False
        return
    try:
        yield True
    finally:
        (group.parent / "cgroup.procs").write_text(str(process))
        group.rmdir()
