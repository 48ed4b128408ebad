"""The gateway beside configurable-http-proxy: requests/s, MB/s, round trips, memory with 30 tabs.

Round trips are those of an echo server, which shows the proxy itself, and of a kernel of a real JupyterLab.
Measured for a local node, and for an SSH node, where the other proxy is in front of ``ssh -L`` over the same
sshd.

    DATABASE_URL=... REDIS_URL=... python -m bench gateway [--seconds S] [--rounds N]
        [--where local ssh] [--chp PROGRAM]

Both proxies serve the same upstreams on this machine and are measured alternately, round by round. npm
installs the other proxy into a temporary folder unless ``--chp`` names one. Creates a database of its own and
drops it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.report import print_figure
from bench.scratch_database import scratch_database

JOBS = "127.77.0.1"
SMALL_BYTES = 1024
BIG_BYTES = 256 << 20
TABS = 30
MEMORY_TARGET_MIB = 300.0
SOCKETS_A_TAB = 4

WorkspaceTarget = tuple[int, str, str]
"""Port, Host header and cookie of a workspace; or TOKEN and the tool's own secret for a cookie."""
TOKEN = "token:"
Figure = tuple[float, float]

FIGURES = {
    "requests": ("1/s", "http"),
    "download": ("MB/s", "http"),
    "upload": ("MB/s", "http"),
    "round_trip": ("ms", "ws"),
    "messages": ("1/s", "ws"),
    "kernel_round_trip": ("ms", "lab"),
}
"""Unit and upstream of each figure."""

UPSTREAM = """
const http = require('http'), small = Buffer.alloc(%d, 'x'), block = Buffer.alloc(1 << 20, 'y');
http.createServer((request, answer) => {
  if (request.method === 'POST') {
    let size = 0; request.on('data', (data) => { size += data.length; });
    request.on('end', () => {
      const told = String(size); answer.setHeader('content-length', told.length); answer.end(told); });
    return;
  }
  if (request.url === '/big') {
    let left = %d; answer.setHeader('content-length', left);
    const more = () => {
      while (left > 0) {
        left -= block.length;
        if (!answer.write(block)) { answer.once('drain', more); return; }
      }
      answer.end();
    };
    more(); return;
  }
  answer.setHeader('content-type', 'text/plain'); answer.setHeader('content-length', small.length); answer.end(small);
}).listen(%d, '%s');
"""


def main(arguments: list[str]) -> int:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(prog="bench gateway")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--where", nargs="*", choices=["local", "ssh"], default=["local", "ssh"])
    parser.add_argument("--figures", nargs="*", choices=sorted(FIGURES), default=list(FIGURES))
    parser.add_argument("--chp", help="configurable-http-proxy, if it is already installed")
    parser.add_argument("--part", nargs="*", help=argparse.SUPPRESS)
    wanted = parser.parse_args(arguments)
    if wanted.part:
        return _part(*wanted.part)
    from tests.rig.needs import missing_for_loopback

    with tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder, contextlib.ExitStack() as stack:
        chp = wanted.chp or os.environ.get("FAIRWAY_CHP") or _fetch_chp(Path(folder))
        http_port, ws_port = _free(JOBS), _free(JOBS)
        program = UPSTREAM % (SMALL_BYTES, BIG_BYTES, http_port, JOBS)
        stack.enter_context(_process("node", "-e", program))
        stack.enter_context(_process(*_self("echo", ws_port)))
        ports = {"http": http_port, "ws": ws_port}
        far = None if (reason := missing_for_loopback()) else stack.enter_context(_ssh_node(Path(folder)))
        labs = {where: _free(JOBS) for where in wanted.where if where == "local" or far is not None}
        gateway = stack.enter_context(_gateway(folder, ports, labs, far))
        for where in wanted.where:
            if where == "ssh" and far is None:
                print_figure("gateway_ssh", skipped=reason)
                continue
            others: dict[str, WorkspaceTarget] = {}
            pids: dict[str, tuple[int, ...]] = {}
            for name, port in (ports | {"lab": labs[where]}).items():
                behind = f"{JOBS}:{port}"
                carriers: tuple[int, ...] = ()
                if far is not None and where == "ssh":
                    near, carrier = stack.enter_context(_forwarded(far, port))
                    behind, carriers = f"127.0.0.1:{near}", (carrier,)
                listen, pid = stack.enter_context(_reference_proxy(chp, behind))
                others[name], pids[name] = (listen, "localhost", ""), (pid, *carriers)
            doors = {name: gateway["doors"][f"{where}-{name}"] for name in (*ports, "lab")}
            secret = gateway["secrets"][f"{where}-lab"]
            stack.enter_context(_lab(Path(folder) / where, labs[where], secret))
            others["lab"] = (others["lab"][0], "localhost", f"{TOKEN}{secret}")
            for port, *_ in [*doors.values(), *others.values(), (http_port,), (ws_port,), (labs[where],)]:
                _until_open(port)
            _measure(
                where, gateway["pid"], doors, others, pids, wanted.figures, wanted.seconds, wanted.rounds
            )
    return 0


@contextlib.contextmanager
def _reference_proxy(chp: str, target: str) -> Iterator[tuple[int, int]]:
    """Run configurable-http-proxy in front of a target; yield its port and pid."""
    listen = _free("127.0.0.1")
    addresses = ["--ip", "127.0.0.1", "--port", str(listen), "--api-port", str(_free("127.0.0.1"))]
    with _process(chp, *addresses, "--default-target", f"http://{target}", "--log-level", "error") as process:
        yield listen, process.pid


@contextlib.contextmanager
def _ssh_node(folder: Path) -> Iterator[tuple[Any, Path]]:
    """Run an sshd that accepts our tunnel key for job ports; yield it and the key."""
    from agents.keys import PURPOSES, make_keys, read_public_key
    from tests.rig.agent import rig_agent
    from tests.rig.loopback import loopback_sshd

    place = folder / "sshd"
    place.mkdir()
    keys = make_keys(place / "keys", "bench")
    public: dict[str, str] = {purpose: read_public_key(keys[purpose]) for purpose in PURPOSES}
    with loopback_sshd(place, rig_agent(), public) as sshd:
        yield sshd, keys["tunnel"]


@contextlib.contextmanager
def _lab(folder: Path, port: int, secret: str) -> Iterator[None]:
    """Run a JupyterLab as a node starts it."""
    from portal.services.environments.process_environment import ensure_process_jupyterlab, jupyterlab_command

    cache = Path(os.environ.get("FAIRWAY_TEST_CACHE", "/var/tmp/fairway-tests"))
    places = {"{address}": JOBS, "{port}": str(port)}
    command = []
    for word in jupyterlab_command(ensure_process_jupyterlab(cache)):
        for place, value in places.items():
            word = word.replace(place, value)
        command.append(word)
    if os.geteuid() == 0:
        command.append("--allow-root")
    folder.mkdir()
    (folder / "token").write_text(secret)
    own = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "FAIRWAY_SECRETS": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=own, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(10)


@contextlib.contextmanager
def _forwarded(far: tuple[Any, Path], port: int) -> Iterator[tuple[int, int]]:
    """Run ``ssh -L`` to a job port over the same sshd with the same key; yield the local port and the pid."""
    sshd, key = far
    listen = _free("127.0.0.1")
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
    way = ["-i", str(key), "-p", str(sshd.port), f"{sshd.account}@{sshd.host}"]
    with _process("ssh", "-N", *options, "-L", f"127.0.0.1:{listen}:{JOBS}:{port}", *way) as process:
        _until_open(listen)
        yield listen, process.pid


def _measure(
    where: str,
    gateway: int,
    ours: dict[str, WorkspaceTarget],
    others: dict[str, WorkspaceTarget],
    pids: dict[str, tuple[int, ...]],
    figures: list[str],
    seconds: float,
    rounds: int,
) -> None:
    far, other = where == "ssh", "chp"
    for figure in figures:
        unit, server = FIGURES[figure]
        found: dict[str, list[float]] = {"fairway": [], other: []}
        spent: dict[str, float] = {"fairway": 0.0, other: 0.0}
        for number in range(rounds):
            pairs = [("fairway", ours[server]), (other, others[server])]
            for name, (port, host, cookie) in pairs if number % 2 else reversed(pairs):
                work = (gateway,) if name == "fairway" else pids[server]
                before_s = _cpu_s(work)
                value, units = _load(figure, port, host, cookie, seconds)
                found[name].append(value)
                spent[name] += (_cpu_s(work) - before_s) / units / rounds
        ours_now, reference = statistics.median(found["fairway"]), statistics.median(found[other])
        ratio = reference / ours_now if unit == "ms" else ours_now / reference
        least = 0.8 if far and unit == "MB/s" else 1.0
        print_figure(
            f"gateway_{where}_{figure}",
            ours=round(ours_now, 3),
            reference=round(reference, 3),
            ratio=round(ratio, 2),
            unit=unit,
            target=f"at least {least:g} x {'ssh -L and ' if far else ''}configurable-http-proxy",
            met=ratio >= least,
            cpu_us_ours=round(spent["fairway"] * 1e6, 1),
            cpu_us_reference=round(spent[other] * 1e6, 1),
        )
    memory = {
        name: _load("tabs", *connection, seconds, work)[0]
        for name, connection, work in [("fairway", ours["ws"], (gateway,)), (other, others["ws"], pids["ws"])]
    }
    print_figure(
        f"gateway_{where}_memory_{TABS}_tabs",
        ours=round(memory["fairway"], 1),
        reference=round(memory[other], 1),
        unit="MiB",
        target=f"below {MEMORY_TARGET_MIB}",
        met=memory["fairway"] < MEMORY_TARGET_MIB,
        counted="proxy and ssh processes, on both sides" if far else "the proxy, on both sides",
    )


# -- processes beside it ------------------------------------------------------------------------------


def _self(*part: object) -> list[str]:
    return [sys.executable, "-m", "bench", "gateway", "--part", *map(str, part)]


def _part(name: str, *arguments: str) -> int:
    import uvloop

    if name == "echo":
        uvloop.run(_echo(int(arguments[0])))
    else:
        port, host, cookie, seconds, named = arguments
        pids = () if named == "-" else tuple(map(int, named.split(",")))
        print(*uvloop.run(_LOADS[name](int(port), host, cookie, float(seconds), pids)))
    return 0


def _load(
    figure: str, port: int, host: str, cookie: str, seconds: float, pids: tuple[int, ...] = ()
) -> tuple[float, float]:
    """Run one measurement in its own process; return the figure and the number of requests or MB."""
    done = subprocess.run(
        _self(figure, port, host, cookie or "-", seconds, ",".join(map(str, pids)) or "-"),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    value, units = done.stdout.split()
    return float(value), float(units)


async def _echo(port: int) -> None:
    """Run a WebSocket server that echoes messages."""
    import uvicorn

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            text = message.get("text")
            reply = {"text": text} if text is not None else {"bytes": message["bytes"]}
            await send({"type": "websocket.send"} | reply)

    config = uvicorn.Config(
        echo, host=JOBS, port=port, ws="websockets-sansio", lifespan="off", log_config=None,
        ws_per_message_deflate=False, ws_ping_interval=None,
    )  # fmt: skip
    await uvicorn.Server(config).serve()


class _Hammer(asyncio.Protocol):
    """Send the same request again as soon as the response is complete."""

    def __init__(self, request: bytes, until: float) -> None:
        self._request, self._until = request, until
        self._left = -1
        self._head = b""
        self.answers = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._left < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._head[:end].lower()
            if b" 200 " not in head[:16] or b"content-length: " not in head:
                self.done.set_exception(RuntimeError(self._head[:300].decode("latin-1")))
                self._transport.close()
                return
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            self._left = length - (len(self._head) - end - 4)
            self._head = b""
        else:
            self._left -= len(data)
        if self._left == 0:
            self._left = -1
            self.answers += 1
            if time.monotonic() < self._until:
                self._transport.write(self._request)
            else:
                self._transport.close()

    def connection_lost(self, problem: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def _request(path: str, host: str, cookie: str) -> bytes:
    """Return a request as a browser sends it."""
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: {host}",
        "User-Agent: Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0",
        "Accept: */*",
        "Accept-Language: en",
        "Accept-Encoding: gzip, deflate",
        f"Cookie: _xsrf=2|abc|def|123{'; ' + cookie if cookie != '-' else ''}",
        "Cache-Control: no-cache",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _requests(port: int, host: str, cookie: str, seconds: float, pids: tuple[int, ...]) -> Figure:
    loop = asyncio.get_running_loop()
    began = time.monotonic()
    until = began + seconds
    hammers = []
    for _ in range(24):
        _, hammer = await loop.create_connection(
            lambda: _Hammer(_request("/", host, cookie), until), "127.0.0.1", port
        )
        hammers.append(hammer)
    await asyncio.gather(*(hammer.done for hammer in hammers))
    answers = sum(hammer.answers for hammer in hammers)
    return answers / (time.monotonic() - began), answers


async def _download(port: int, host: str, cookie: str, seconds: float, pids: tuple[int, ...]) -> Figure:
    loop = asyncio.get_running_loop()
    began = time.monotonic()
    _, hammer = await loop.create_connection(
        lambda: _Hammer(_request("/big", host, cookie), began + seconds / 2), "127.0.0.1", port
    )
    await hammer.done
    megabytes = hammer.answers * BIG_BYTES / 1e6
    return megabytes / (time.monotonic() - began), megabytes


async def _upload(port: int, host: str, cookie: str, seconds: float, pids: tuple[int, ...]) -> Figure:
    head = _request("/", host, cookie).replace(b"GET", b"POST", 1)[:-2]
    head += f"Content-Length: {BIG_BYTES}\r\n\r\n".encode()
    block = b"z" * (1 << 20)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.monotonic()
    writer.write(head)
    for _ in range(BIG_BYTES // len(block)):
        writer.write(block)
        await writer.drain()
    answer = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in answer[:16], answer
    took_s = time.monotonic() - began
    writer.close()
    return BIG_BYTES / 1e6 / took_s, BIG_BYTES / 1e6


@contextlib.asynccontextmanager
async def _websocket(port: int, host: str, cookie: str) -> Any:
    import aiohttp

    headers = {"Host": host, "Origin": f"http://{host}", "Cookie": cookie}
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{port}/x", headers=headers, max_msg_size=0) as joined,
    ):
        yield joined


KERNEL_MESSAGE = json.dumps(
    {"header": {"msg_id": "x" * 40}, "content": {"code": "y" * 600}, "channel": "shell"}
)


async def _round_trip(port: int, host: str, cookie: str, seconds: float, pids: tuple[int, ...]) -> Figure:
    took_ms = []
    async with _websocket(port, host, cookie) as joined:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.perf_counter()
            await joined.send_str(KERNEL_MESSAGE)
            await joined.receive()
            took_ms.append((time.perf_counter() - began) * 1000)
    return statistics.median(took_ms), len(took_ms)


async def _messages(port: int, host: str, cookie: str, seconds: float, pids: tuple[int, ...]) -> Figure:
    async def one() -> int:
        count = 0
        async with _websocket(port, host, cookie) as joined:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                await joined.send_str(KERNEL_MESSAGE)
                await joined.receive()
                count += 1
        return count

    count = sum(await asyncio.gather(*(one() for _ in range(16))))
    return count / seconds, count


async def _tabs(port: int, host: str, cookie: str, seconds: float, pids: tuple[int, ...]) -> Figure:
    """Open thirty tabs with sockets that receive large outputs; return the peak memory of the gateway."""
    most = 0.0
    async with contextlib.AsyncExitStack() as stack:
        sockets = [
            await stack.enter_async_context(_websocket(port, host, cookie))
            for _ in range(TABS * SOCKETS_A_TAB)
        ]
        for number, joined in enumerate(sockets):
            await joined.send_str("z" * 1_000_000 if number % SOCKETS_A_TAB == 0 else KERNEL_MESSAGE)
        for joined in sockets:
            await joined.receive()
            most = max(most, _rss_mib(pids))
    return most, 1


async def _kernel_round_trip(
    port: int, host: str, cookie: str, seconds: float, pids: tuple[int, ...]
) -> Figure:
    """Send kernel_info requests and wait for each reply."""
    import aiohttp

    token = cookie.removeprefix(TOKEN)
    own = {"Authorization": f"token {token}"} if token != cookie else {"Cookie": cookie}
    headers = own | {"Host": host, "Origin": f"http://{host}"}
    address = f"http://127.0.0.1:{port}/api/kernels"
    took_ms = []
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(address, json={"name": "python3"}) as made:
            assert made.status == 201, await made.text()
            kernel = (await made.json())["id"]
        async with session.ws_connect(f"{address}/{kernel}/channels", max_msg_size=0) as joined:
            await _request_duration(joined, 0)  # starts the kernel
            until, number = time.monotonic() + seconds, 0
            while time.monotonic() < until:
                number += 1
                took_ms.append(await _request_duration(joined, number))
        async with session.delete(f"{address}/{kernel}") as ended:
            assert ended.status == 204
    return statistics.median(took_ms), len(took_ms)


async def _request_duration(joined: Any, number: int) -> float:
    """Return milliseconds until the kernel has replied."""
    head = {"msg_id": f"ask-{number}", "msg_type": "kernel_info_request", "username": "", "session": "bench"}
    words = {"header": head | {"version": "5.3"}, "parent_header": {}, "metadata": {}, "content": {}}
    began = time.perf_counter()
    await joined.send_str(json.dumps(words | {"channel": "shell"}))
    async for message in joined:
        reported = json.loads(message.data)
        if (
            reported["msg_type"] == "kernel_info_reply"
            and reported["parent_header"]["msg_id"] == head["msg_id"]
        ):
            return (time.perf_counter() - began) * 1000
    raise ConnectionError("the kernel's socket was closed")


_LOADS = {
    "requests": _requests,
    "download": _download,
    "upload": _upload,
    "round_trip": _round_trip,
    "messages": _messages,
    "kernel_round_trip": _kernel_round_trip,
    "tabs": _tabs,
}


# -- the gateway with its own database ----------------------------------------------------------------


@contextlib.contextmanager
def _gateway(
    folder: str, ports: dict[str, int], labs: dict[str, int], far: tuple[Any, Path] | None
) -> Iterator[dict[str, Any]]:
    """Yield its pid, the targets of its workspaces, and the secrets of their tools."""
    listen = _free("127.0.0.1")
    os.environ["FAIRWAY_APPS_DOMAIN"] = f"localhost:{listen}"
    with scratch_database() as url:
        entered = {f"local-{name}": _workspace(port) for name, port in ports.items()}
        if far is not None:
            entered |= {f"ssh-{name}": _workspace(port, far[0]) for name, port in ports.items()}
        for where, port in labs.items():
            entered[f"{where}-lab"] = _workspace(port, far[0] if far is not None and where == "ssh" else None)
        environment = {"DATABASE_URL": url, "FAIRWAY_DATA_DIR": folder}
        if far is not None:
            environment["FAIRWAY_TUNNEL_KEY"] = str(far[1])
        command = [sys.executable, "-m", "portal.gateway", "--port", str(listen)]
        with _process(*command, **environment) as process:
            doors = {
                name: (listen, f"ws-{job}.localhost:{listen}", f"fairway_workspace={cookie}")
                for name, (job, cookie, _) in entered.items()
            }
            secrets_of = {name: secret for name, (_, _, secret) in entered.items()}
            yield {"pid": process.pid, "doors": doors, "secrets": secrets_of}


def _workspace(port: int, sshd: Any = None) -> tuple[str, str, str]:
    """Return a running workspace, local or behind an sshd, a cookie for it, and its tool's secret."""
    from portal.models import Node
    from portal.services.jobs.attempt_secrets import decrypt_attempt_secret
    from portal.services.workspaces.access import do_open_workspace, do_redeem_ticket
    from tests import factories
    from tests.gateway.gateway_harness import attempt_of, running_workspace, sign_in

    owner = factories.user()
    node = None
    if sshd is not None:
        place = {"host": sshd.host, "port": sshd.port, "account": sshd.account, "host_key": sshd.host_key}
        node = Node.objects.filter(transport="ssh").first() or factories.node(
            factories.pool(), transport="ssh", runtime="process", **place
        )
    job = running_workspace(owner, port=port, node=node)
    _, ticket = do_open_workspace(owner, job, sign_in(owner))
    cookie = do_redeem_ticket(ticket, job.public_id)
    assert cookie is not None
    return job.public_id, cookie, decrypt_attempt_secret(attempt_of(job))


def _fetch_chp(folder: Path) -> str:
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("npm is needed to fetch configurable-http-proxy, or name one with --chp.")
    command = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--silent"]
    subprocess.run([*command, "configurable-http-proxy"], check=True, capture_output=True, timeout=300)
    return str(folder / "node_modules" / ".bin" / "configurable-http-proxy")


@contextlib.contextmanager
def _process(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=dict(os.environ) | environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _until_open(port: int) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for address in ("127.0.0.1", JOBS):
            with contextlib.suppress(OSError), socket.create_connection((address, port), 0.5):
                return
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on port {port}")


def _descendants(pids: tuple[int, ...]) -> Iterator[int]:
    """Yield these processes and their descendants: the `ssh` of a tunnel works for its proxy."""
    for pid in pids:
        yield pid
        with contextlib.suppress(FileNotFoundError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                yield from _descendants(tuple(map(int, (task / "children").read_text().split())))


def _cpu_s(pids: tuple[int, ...]) -> float:
    """Return CPU seconds of processes so far: meaningful also when other work shares the machine."""
    ticks = 0
    for pid in _descendants(pids):
        with contextlib.suppress(FileNotFoundError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _rss_mib(pids: tuple[int, ...]) -> float:
    total = 0.0
    for pid in _descendants(pids):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS"):
                    total += int(line.split()[1]) / 1024
    return total
