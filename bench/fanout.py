"""Live fan-out: one frame per second to many browsers; delay of the last browser, and CPU cost.

    DATABASE_URL=... REDIS_URL=... python -m bench fanout [--browsers N] [--seconds S] [--nodes N] [--direct]

The browsers connect through the gateway (``--direct``: to web), signed in as several users, and watch
``cluster`` and ``user.me``; the frame is that of a cluster of N nodes with 8 GPUs. Creates a database of its
own and drops it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.gateway import _free, _process, _rss_mib, _until_open
from bench.report import percentile, print_figure
from bench.scratch_database import scratch_database

SOCKETS_PER_USER = 25
LAST_TARGET_MS, CORE_TARGET_PERCENT = 100.0, 25
_AT = re.compile(rb'"kind":"sample","at_s":([0-9.]+)')


def main(arguments: list[str]) -> int:
    """Print one line."""
    parser = argparse.ArgumentParser(prog="bench fanout")
    parser.add_argument("--browsers", type=int, default=500)
    parser.add_argument("--seconds", type=int, default=20, help="number of ticks; p95 of few is the slowest")
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--direct", action="store_true", help="straight to web, without the gateway")
    parser.add_argument("--part", nargs="*", help=argparse.SUPPRESS)
    wanted = parser.parse_args(arguments)
    if wanted.part:
        asyncio.run(_browse(int(wanted.part[0]), float(wanted.part[1]), wanted.part[2].split(",")))
        return 0
    port, web_port = _free("127.0.0.1"), _free("127.0.0.1")
    os.environ["FAIRWAY_PORTAL_URL"] = f"http://localhost:{port}"
    with scratch_database() as url:
        from portal.standalone.process_table import web_arguments

        users = -(-wanted.browsers // SOCKETS_PER_USER)
        keys = _sign_in(users, wanted.nodes)
        with tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder, contextlib.ExitStack() as stack:
            web_socket = f"{folder}/web.sock"
            environment = {"DATABASE_URL": url, "FAIRWAY_DATA_DIR": folder, "FAIRWAY_WEB_SOCKET": web_socket}
            words = [*web_arguments(Path(web_socket)), "--log-level", "error"]  # as `manage.py up` starts it
            if wanted.direct:
                at = words.index("--uds")
                words[at : at + 2] = ["--port", str(web_port)]
            web = stack.enter_context(_process(sys.executable, *words, **environment))
            pids = {"web": web.pid}
            if wanted.direct:
                port = web_port
            else:
                gateway = stack.enter_context(
                    _process(sys.executable, "-m", "portal.gateway", "--port", str(port), **environment)
                )
                pids["gateway"] = gateway.pid
            _until_open(port)
            if not wanted.direct:
                until = time.monotonic() + 20
                while not Path(web_socket).exists() and time.monotonic() < until:
                    time.sleep(0.05)
            _measure(wanted, port, os.environ["FAIRWAY_PORTAL_URL"], keys, pids)
    return 0


def _measure(wanted: Any, port: int, origin: str, keys: list[str], pids: dict[str, int]) -> None:
    each = [keys[number % len(keys)] for number in range(wanted.browsers)]
    command = [
        sys.executable,
        "-m",
        "bench",
        "fanout",
        "--part",
        str(port),
        str(wanted.seconds),
        ",".join(each),
    ]
    environment = dict(os.environ) | {"FAIRWAY_BENCH_ORIGIN": origin}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as browsers:
        assert browsers.stdout is not None
        ready = browsers.stdout.readline().strip()
        assert ready == "ready", ready
        time.sleep(1)
        before = {name: _cpu_s(pid) for name, pid in pids.items()}
        began = time.monotonic()
        frame_bytes = asyncio.run(_tick(wanted.seconds, wanted.nodes))
        took_s = time.monotonic() - began
        spent = {name: (_cpu_s(pid) - before[name]) / took_s * 100 for name, pid in pids.items()}
        found = json.loads(browsers.stdout.readline())
    last = found["last_ms"]
    last_ms = percentile(last, 0.95)
    percent = max(spent.values())
    print_figure(
        f"fanout_{wanted.browsers}_browsers_1_hz",
        ours=round(last_ms, 1),
        unit="ms until the last client has it, p95",
        target=f"at most {LAST_TARGET_MS:.0f} ms, at most {CORE_TARGET_PERCENT} % of a core",
        met=last_ms <= LAST_TARGET_MS and percent <= CORE_TARGET_PERCENT and not found["missed"],
        p50_ms=round(statistics.median(last), 1),
        through="web" if wanted.direct else "gateway",
        ticks=len(last),
        frame_bytes=frame_bytes,
        missed=found["missed"],
        **{f"{name}_percent_of_a_core": round(value, 1) for name, value in spent.items()},
        **{f"{name}_rss_mib": round(_rss_mib((pid,)), 1) for name, pid in pids.items()},
    )


def _cpu_s(pid: int) -> float:
    """Return CPU seconds of all threads so far. Clock ticks (/proc/PID/stat) miss short bursts."""
    spent_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread may have ended
            spent_ns += int((thread / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


def _sign_in(users: int, nodes: int) -> list[str]:
    from tests import factories
    from tests.gateway.gateway_harness import sign_in

    pool = factories.pool()
    for _ in range(nodes):
        factories.node(pool, gpus=8)
    return [sign_in(factories.user()) for _ in range(users)]


async def _tick(seconds: int, nodes: int) -> int:
    """Send what the collector sends, once a second."""
    from channels.layers import get_channel_layer

    from portal.live_events import channel_group

    layer = get_channel_layer()
    rows = {
        f"node{number:06d}": {"lag_s": 0.1, "cpu": 50, "u": [50] * 8, "m": [40000] * 8, "w": [300] * 8}
        for number in range(nodes)
    }
    text = ""
    for _ in range(seconds):
        await asyncio.sleep(1 - time.time() % 1)
        frame = {"kind": "sample", "at_s": round(time.time(), 6), "lag_s": 0.1, "nodes": rows}
        text = json.dumps(frame, separators=(",", ":"))
        await layer.group_send(
            channel_group("cluster"), {"type": "fairway.frame", "topic": "cluster", "text": text}
        )
    await asyncio.sleep(1)
    return len(text)


# -- the browsers ----------------------------------------------------------------------------------


class _Browser(asyncio.Protocol):
    """Parse only the time in each frame, to cost as little as possible."""

    def __init__(self, key: str, port: int, heard: dict[float, list[float]]) -> None:
        self._heard, self._open, self._data = heard, False, b""
        origin = os.environ["FAIRWAY_BENCH_ORIGIN"]
        self._hello = (
            f"GET /live/ HTTP/1.1\r\nHost: {origin.removeprefix('http://')}\r\nOrigin: {origin}\r\n"
            f"Cookie: fairway_session={key}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n"  # as browsers offer it
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}\r\n\r\n"
        ).encode()
        self.filled = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._hello)

    def data_received(self, data: bytes) -> None:
        now = time.time()
        if not self._open:
            self._data += data
            if b"\r\n\r\n" not in self._data:
                return
            if b" 101 " not in self._data[:16] or b"permessage-deflate" in self._data:
                self.filled.set_exception(RuntimeError(self._data[:300].decode("latin-1")))
                return
            self._open, self._data = True, b""
            words = json.dumps({"subscribe": ["cluster", "user.me"]}).encode()
            self._transport.write(bytes([0x81, 0x80 | len(words), 0, 0, 0, 0]) + words)
            return
        if not self.filled.done() and b"backfill" in data:
            self.filled.set_result(None)
        for match in _AT.finditer(data):
            self._heard.setdefault(float(match.group(1)), []).append(now)

    def connection_lost(self, problem: Exception | None) -> None:
        if not self.filled.done():
            self.filled.set_exception(RuntimeError("closed"))


async def _browse(port: int, seconds: float, keys: list[str]) -> None:
    loop = asyncio.get_running_loop()
    heard: dict[float, list[float]] = {}
    browsers = []
    for number, key in enumerate(keys):
        _, browser = await loop.create_connection(partial(_Browser, key, port, heard), "127.0.0.1", port)
        browsers.append(browser)
        if number % 25 == 24:
            await asyncio.wait_for(browser.filled, 30)
    await asyncio.wait_for(asyncio.gather(*(browser.filled for browser in browsers)), 60)
    print("ready", flush=True)
    await asyncio.sleep(seconds + 3)
    last = [(max(times) - at) * 1000 for at, times in heard.items() if len(times) == len(keys)]
    missed = sum(len(keys) - len(times) for times in heard.values())
    print(json.dumps({"last_ms": last, "missed": missed}), flush=True)
