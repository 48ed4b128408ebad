"""Five hundred simulated nodes with 8 GPUs at 1 Hz: cost of collector and worker-nodes, and age of frames.

    python -m bench nodes [--nodes N] [--over-ssh N] [--seconds S]

A complete Fairway (``manage.py up``) with real links: pipes to a child process for most nodes and a real sshd
for the rest. One process behind them simulates all machines (``bench.simulated_nodes``). Each node runs a job
of 8 GPUs that the scheduler has placed and started there. The age is that of each node's sample in frames of
topic ``cluster`` when a browser receives them through the gateway.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.fanout import _cpu_s
from bench.report import percentile, print_figure
from bench.simulated_nodes import GPUS, PROGRAM
from bench.start import enter_portal

CORE_TARGET_PERCENT, MEMORY_TARGET_MIB, AGE_TARGET_MS = 100.0, 1024.0, 1000.0
FAR = "127.1.{}.{}"


def main(arguments: list[str]) -> int:
    """Print a line for each process, one for the age of frames, and one for the duration of the set-up."""
    parser = argparse.ArgumentParser(prog="bench nodes")
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--over-ssh", type=int, default=50)
    parser.add_argument("--seconds", type=int, default=60)
    wanted = parser.parse_args(arguments)
    from tests.stories.portal import StoryPortal

    with StoryPortal("--no-local-node") as portal, _simulated_nodes() as crowd:
        admin = enter_portal(portal)
        data = portal.folder / "data"
        (data / "agent" / "agent.pyz").write_bytes(_program())
        far = [FAR.format(number // 250, number % 250 + 1) for number in range(wanted.over_ssh)]
        with _sshd(data, crowd) as (port, host_key):
            _measure(wanted, portal, admin, crowd, far, port, host_key)
    return 0


def _measure(
    wanted: Any, portal: Any, admin: Any, crowd: str, far: list[str], port: int, host_key: str
) -> None:
    from portal.models import Attempt, Node

    began = time.monotonic()
    _add_nodes(admin, wanted.nodes - len(far), crowd, far, port, host_key)
    heard_s = _until(
        portal,
        lambda: (
            Node.objects.filter(state="ready", reachable=True, gpus__uuid__isnull=False).distinct().count()
        ),
        wanted.nodes,
        began,
    )
    began = time.monotonic()
    _submit(admin, wanted.nodes)
    running = Attempt.objects.filter(state="RUNNING")
    running_s = _until(portal, running.count, wanted.nodes, began)
    time.sleep(15)  # until nodes are reconciled and pages have their backfill
    pids = _pids(portal)
    before, began = {name: _cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
    ages, ticks = _browse(portal, admin, wanted.seconds)
    took_s = time.monotonic() - began
    load = round(os.getloadavg()[0], 1)
    for name in ("collector", "worker-nodes"):
        percent = (_cpu_s(pids[name]) - before[name]) / took_s * 100
        memory = _resident_mib(pids[name])
        print_figure(
            f"{wanted.nodes}_nodes_{name.replace('-', '_')}",
            ours=round(percent, 1),
            unit="percent of a core",
            target=f"at most {CORE_TARGET_PERCENT:.0f} percent and {MEMORY_TARGET_MIB:.0f} MiB",
            met=percent <= CORE_TARGET_PERCENT and memory <= MEMORY_TARGET_MIB,
            rss_mib=round(memory),
            over_ssh=len(far),
            load_average=load,
        )
    print_figure(
        f"{wanted.nodes}_nodes_to_the_browser",
        ours=round(percentile(ages, 0.95)),
        unit="ms from sample to browser, p95 of all nodes and ticks",
        target=f"less than {AGE_TARGET_MS:.0f} ms",
        met=percentile(ages, 0.95) < AGE_TARGET_MS,
        p50_ms=round(percentile(ages, 0.5)),
        p99_ms=round(percentile(ages, 0.99)),
        most_ms=round(max(ages)),
        ticks=ticks,
        rows=len(ages),
        load_average=load,
    )
    others = {
        name: round((_cpu_s(pid) - before[name]) / took_s * 100, 1)
        for name, pid in pids.items()
        if name not in {"collector", "worker-nodes"}
    }
    print_figure(
        f"{wanted.nodes}_nodes_others",
        ours=others,
        unit="percent of a core",
        until_all_are_heard_s=round(heard_s, 1),
        until_all_jobs_run_s=round(running_s, 1),
        load_average=load,
    )


# -- environment ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _simulated_nodes() -> Iterator[str]:
    """Run the process that simulates all nodes; yield the address at which it accepts streams."""
    with tempfile.TemporaryDirectory(prefix="fairway-crowd-") as folder:
        Path(folder).chmod(0o755)
        address = f"{folder}/crowd.sock"
        process = subprocess.Popen([sys.executable, "-m", "bench.simulated_nodes", address, folder])
        try:
            while not Path(address).exists():
                time.sleep(0.05)
            yield address
        finally:
            process.kill()
            process.wait()


def _program() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("__main__.py", PROGRAM)
    return packed.getvalue()


@contextlib.contextmanager
def _sshd(data: Path, crowd: str) -> Iterator[tuple[int, str]]:
    """Run one sshd with an address for each node, whose forced commands pass their streams on."""
    from agents.keys import PURPOSES, key_path, read_public_key
    from tests.rig.loopback import loopback_sshd

    keys: dict[str, str] = {role: read_public_key(key_path(data / "keys", role)) for role in PURPOSES}
    with (
        tempfile.TemporaryDirectory(prefix="fairway-crowd-sshd-") as folder,
        loopback_sshd(
            Path(folder), _program(), keys, options="MaxStartups 500\n", listens_at="0.0.0.0"
        ) as sshd,
    ):
        (Path(folder) / "node.json").write_text(json.dumps({"simulated_nodes": crowd}))
        yield sshd.port, sshd.host_key


def _add_nodes(admin: Any, near: int, crowd: str, far: list[str], port: int, host_key: str) -> None:
    import getpass

    from portal.domain.states import NodeTransport, RuntimeKind
    from portal.services.nodes.nodes import do_create_node, do_create_pool

    pool = do_create_pool(admin, "crowd")
    for number in range(near):
        name = f"near-{number}"
        do_create_node(
            admin,
            name=name,
            pool=pool,
            link=NodeTransport.LOCAL,
            runtime=RuntimeKind.PROCESS,
            settings={"simulated_nodes": crowd, "node": name},
        )
    for number, address in enumerate(far):
        do_create_node(
            admin,
            name=f"far-{number}",
            pool=pool,
            host=address,
            port=port,
            ssh_user=getpass.getuser(),
            host_key=host_key,
            runtime=RuntimeKind.PROCESS,
        )


def _submit(admin: Any, count: int) -> None:
    """Add a job of all GPUs of a node for each node, as rows that submission would write."""
    from django.db import transaction

    from portal.models import Environment, Job, Project
    from portal.services.lifecycle import job_control

    environment = Environment.objects.create(name="crowd", title="Crowd", runtime="process")
    project = Project.objects.get(name="default")
    with transaction.atomic():
        for number in range(count):
            job = Job.objects.create(
                owner=admin,
                project=project,
                environment=environment,
                name=f"crowd-{number}",
                kind="training",
                command=["sleep", "86400"],
                gpus_per_task=GPUS,
            )
            job_control.record_submitted([job], actor=admin.username)


def _until(portal: Any, count: Callable[[], int], wanted: int, began: float) -> float:
    """Return seconds since ``began`` until ``count`` reaches ``wanted``."""
    while (there := count()) < wanted:
        print(f"{time.monotonic() - began:.0f} s: {there} of {wanted}", file=sys.stderr, flush=True)
        if time.monotonic() - began > 300:
            raise SystemExit(f"only {there} of {wanted}:\n{portal.tail()}")
        time.sleep(1)
    return time.monotonic() - began


def _pids(portal: Any) -> dict[str, int]:
    rows = json.loads((portal.folder / "data" / "run" / "children.json").read_text())
    return {row["name"]: row["pid"] for row in rows}


def _resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def _browse(portal: Any, admin: Any, seconds: int) -> tuple[list[float], int]:
    """Return ages in ms of all nodes' samples in all frames within some seconds, and the number of frames."""
    from websockets.sync.client import connect

    from tests.gateway.gateway_harness import sign_in

    headers = {"Cookie": f"fairway_session={sign_in(admin)}"}
    ages: list[float] = []
    ticks = 0
    with connect(
        portal.url.replace("http", "ws") + "/live/",
        origin=portal.url,
        additional_headers=headers,
        max_size=2**24,
    ) as socket:
        socket.send(json.dumps({"subscribe": ["cluster"]}))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            data = json.loads(socket.recv(timeout=10)).get("data", {})
            now_s = time.time()
            if data.get("kind") != "sample":
                continue
            ticks += 1
            ages += [(now_s - data["at_s"] + row["lag_s"]) * 1000 for row in data["nodes"].values()]
    return ages, ticks
