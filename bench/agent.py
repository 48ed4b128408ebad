"""Cost of the agent on its node: memory and CPU, idle and with eight GPUs at 1 Hz and eight tasks.

    python -m bench agent [--seconds S] [--python PYTHON] [--real-gpus]

The shipped agent runs over pipes with its two standing sessions: control (worker-nodes) and watch (the
collector). GPUs are those of the fake NVML (``tests/fakes/nvml.c``), called through NVIDIA's own module, so
only the driver's part of each query is missing. Tasks run under the runtime ``process``, one per GPU, and the
driver reports each as the process on it. With ``--real-gpus``, the GPUs are those of this machine, without tasks.
CPU time is counted over the whole period, so other load has little effect.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agents.bundle import build_archive
from agents.link import Link
from agents.local import open_local
from bench.report import print_figure
from tests.fakes import nvml

CLUSTER = "bench-agent"
GPUS = 8
MEMORY_TARGET_MB, CORE_TARGET_PERCENT = 40.0, 1.0
SETTLE_S = 5.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main(arguments: list[str]) -> int:
    """Print lines for memory and CPU time, idle and busy, and one for the shims of tasks."""
    parser = argparse.ArgumentParser(prog="bench agent")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--python", default=sys.executable, help="The Python that runs the agent.")
    parser.add_argument("--real-gpus", action="store_true", help="Use this machine's GPUs and their driver.")
    wanted = parser.parse_args(arguments)
    if wanted.real_gpus:
        return _measure_real_gpus(wanted)
    if why := nvml.missing_compiler():
        print_figure("agent", skipped=why)
        return 0
    with _node() as (folder, driver):
        with _sessions(folder, driver.environment, wanted.python) as links:
            _measure("idle", links, wanted.seconds)
        with _sessions(folder, driver.environment, wanted.python) as links:
            pids = _start_tasks(links["control"], folder)
            driver.write(nvml.h200(number, f"process {pid} 4096") for number, pid in enumerate(pids))
            links["watch"].request("stats", timeout_s=10, subscribe=True)
            _measure("8_gpus_1_hz_8_tasks", links, wanted.seconds)
            shims = [_parent(pid) for pid in pids]
            print_figure(
                "agent_memory_of_shims",
                ours=round(sum(_memory_mb(pid)[0] for pid in shims), 1),
                unit=f"MB (proportional set size) of {len(shims)} shims, one per task of the runtime process",
                resident_mb=round(sum(_memory_mb(pid)[1] for pid in shims), 1),
            )
            for number in range(GPUS):
                links["control"].request(
                    "stop", timeout_s=30, epoch=1, job=f"job{number}", attempt=1, grace_s=0
                )
    return 0


def _measure_real_gpus(wanted: argparse.Namespace) -> int:
    """Print memory and CPU time with this machine's GPUs, idle and sampled once a second."""
    with _folder() as folder:
        for what, subscribe in (("idle", False), ("1_hz", True)):
            with _sessions(folder, {}, wanted.python) as links:
                gpus = links["control"].hello.gpus
                if not gpus:
                    print_figure("agent_real_gpus", skipped="NVML finds no GPU on this machine")
                    return 0
                if subscribe:
                    links["watch"].request("stats", timeout_s=10, subscribe=True)
                _measure(f"{len(gpus)}_real_gpus_{what}", links, wanted.seconds)
    return 0


def _measure(what: str, links: dict[str, Link], seconds: int) -> None:
    time.sleep(SETTLE_S)
    pids = {role: int(link.process_id or 0) for role, link in links.items()}
    before, began = {role: _cpu_s(pid) for role, pid in pids.items()}, time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - began
    percent = {role: (_cpu_s(pid) - before[role]) / took_s * 100 for role, pid in pids.items()}
    memory = {role: _memory_mb(pid) for role, pid in pids.items()}
    mine = sum(proportional for proportional, _ in memory.values())
    print_figure(
        f"agent_memory_{what}",
        ours=round(mine, 1),
        unit="MB (proportional set size) of control and watch together",
        target=f"below {MEMORY_TARGET_MB:.0f} MB",
        met=mine < MEMORY_TARGET_MB,
        proportional_mb={role: round(each, 1) for role, (each, _) in memory.items()},
        resident_mb={role: round(each, 1) for role, (_, each) in memory.items()},
        resident_sum_mb=round(sum(each for _, each in memory.values()), 1),
    )
    spent = sum(percent.values())
    print_figure(
        f"agent_processor_{what}",
        ours=round(spent, 2),
        unit=f"% of a core over {took_s:.0f} s, control and watch together",
        target=f"at most {CORE_TARGET_PERCENT:.0f} %",
        met=spent <= CORE_TARGET_PERCENT,
        of_each={role: round(each, 2) for role, each in percent.items()},
    )


@contextlib.contextmanager
def _node() -> Iterator[tuple[Path, nvml.FakeDriver]]:
    """Provide a machine with eight GPUs of the fake driver."""
    with _folder() as folder:
        yield folder, nvml.FakeDriver(folder, [nvml.h200(number) for number in range(GPUS)])


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Provide a folder that all accounts can traverse, with the agent's program and settings."""
    folder = Path(tempfile.mkdtemp(prefix="fwa", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        build_archive(folder / "agent.pyz")
        settings = {
            "cluster": CLUSTER,
            "state_dir": str(folder / "state"),
            "home_root": str(folder / "homes"),
            "gpu_provider": "nvml",
            "runtimes": [{"kind": "process"}],
            "min_free_disk_mib": 16,
        }
        (folder / "node.json").write_text(json.dumps(settings))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _sessions(folder: Path, environment: dict[str, str], python: str) -> Iterator[dict[str, Link]]:
    with contextlib.ExitStack() as stack:
        yield {
            role: stack.enter_context(
                open_local(
                    folder / "agent.pyz",
                    role,
                    folder / "node.json",
                    cluster=CLUSTER,
                    environment=environment,
                    python=python,
                )
            )
            for role in ("control", "watch")
        }


def _start_tasks(control: Link, folder: Path) -> list[int]:
    """Start a task on each GPU; return the pids of their commands."""
    for number in range(GPUS):
        control.request("start", timeout_s=30, epoch=1, spec=_spec(number))
    tasks = json.loads((folder / "state" / "ledger.json").read_text())["tasks"].values()
    return [int(task["pid"]) for task in sorted(tasks, key=lambda task: task["job"])]


def _spec(number: int) -> dict[str, Any]:
    return {
        "cluster": CLUSTER,
        "job": f"job{number}",
        "attempt": 1,
        "task": 0,
        "digest": "d1",
        "runtime": "process",
        "command": ["sleep", "3600"],
        "uid": 2001,
        "gid": 2001,
        "user": "ada",
        "gpus": [{"uuid": f"GPU-h200-{number}", "milli": 1000}],
        "memory_mib": 64,
        "pids": 64,
    }


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _cpu_s(pid: int) -> float:
    """Return CPU seconds of a process with all its threads and reaped children."""
    return sum(int(each) for each in _stat(pid)[11:15]) / _TICKS_PER_S


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _memory_mb(pid: int) -> tuple[float, float]:
    """Return proportional and resident set size, in 10^6 bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return kib["Pss"] * 1024 / 1e6, kib["Rss"] * 1024 / 1e6
