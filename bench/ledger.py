"""CPU time of a node's ledger for one task, with ten thousand past jobs beside a node without.

python -m bench ledger [--jobs N]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

from agents.node.ledger.ledger import EXITED, RUNNING, Ledger
from agents.node.spec.task_spec import parse_spec
from bench.report import print_figure

TASKS, ROUNDS = 50, 5
TARGET = 1.5


def main(arguments: list[str]) -> None:
    """Print the figure."""
    parser = argparse.ArgumentParser(prog="bench ledger")
    parser.add_argument("--jobs", type=int, default=10_000, help="jobs of the last thirty days")
    jobs = parser.parse_args(arguments).jobs
    with tempfile.TemporaryDirectory() as full, tempfile.TemporaryDirectory() as empty:
        busy, idle = (Ledger(folder, uids=(3000, 1000)) for folder in (full, empty))
        now_s = time.time()
        with busy.transaction() as state:
            for number in range(jobs):
                entry = {"attempt": 1, "tombstones": [1], "last_seen_s": now_s - jobs + number}
                state["jobs"][f"past{number}"] = entry
        ours: list[float] = []
        reference: list[float] = []
        for turn in range(ROUNDS):  # in turn, so that other work slows both alike
            reference.append(_task_ms(idle, turn))
            ours.append(_task_ms(busy, turn))
    ratio = min(ours) / min(reference)
    print_figure(
        f"ledger of a node with {jobs:,} past jobs", ours=round(min(ours), 2),
        reference=round(min(reference), 2), ratio=round(ratio, 2), unit="ms of CPU a task", target=TARGET,
        met=ratio <= TARGET,
    )  # fmt: skip


def _task_ms(ledger: Ledger, turn: int) -> float:
    """Return the CPU time of the transactions from a start to a removal, and a read after each."""
    began_s = time.process_time()
    for number in range(TASKS):
        spec = _spec(f"job{turn}x{number}")
        ledger.admit(1, spec, needs_uid=True)
        ledger.update_task(spec.name, mps=None)
        ledger.mark_starting(spec.name)
        for fields in ({"phase": RUNNING, "pid": 4}, {"phase": EXITED, "exit_code": 0}, {"removed": True}):
            ledger.update_task(spec.name, **fields)
            ledger.tasks()
        ledger.check_epoch(1)
        ledger.remove_tasks([spec.name])
    return (time.process_time() - began_s) / TASKS * 1000


def _spec(job: str) -> Any:
    return parse_spec(
        {
            "cluster": "bench",
            "job": job,
            "attempt": 1,
            "task": 0,
            "digest": "d",
            "runtime": "process",
            "command": ["true"],
            "uid": 2001,
            "gid": 2001,
            "user": "ada",
            "memory_mib": 64,
            "pids": 64,
            "gpus": [{"uuid": "GPU-1", "milli": 1000}],
        }
    )
