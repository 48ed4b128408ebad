"""The supervisor over real processes: restarts, stops, and what becomes of children when it is killed itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.standalone.waiting import alive, eventually
from tests.time_budget import budget_s

PROGRAM = Path(__file__).with_name("supervised_processes.py")
ROOT = PROGRAM.parent.parent.parent


class Run:
    """One supervisor under test, with its lines collected as they come."""

    def __init__(self, folder: Path, *rows: str, **popen: object) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), *rows],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            **popen,  # type: ignore[arg-type]
        )
        self.lines: list[str] = []
        threading.Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_line(self, pattern: str, limit_s: float = 10) -> re.Match[str]:
        found: list[re.Match[str]] = []

        def there() -> bool:
            found[:] = [m for line in list(self.lines) if (m := re.search(pattern, line))]
            return bool(found)

        assert eventually(there, limit_s), f"no line like {pattern!r} in {self.lines}"
        return found[0]

    def pids(self) -> dict[str, int]:
        rows = json.loads((self.folder / "children.json").read_text())
        return {row["name"]: row["pid"] for row in rows}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*rows: str, **popen: object) -> Run:
        run = Run(tmp_path, *rows, **popen)
        runs.append(run)
        run.wait_line("READY")
        return run

    yield begin
    for run in runs:
        run.process.kill()
        run.process.wait()
        for pid in run.pids().values() if (tmp_path / "children.json").exists() else []:
            if alive(pid):
                os.killpg(pid, signal.SIGKILL)


def test_lines_carry_the_name_of_their_process(start: Callable[..., Run]) -> None:
    run = start("web=steady", "beat=steady")
    run.wait_line(r"^web +\| here")
    run.wait_line(r"^beat +\| here")


def test_a_process_that_dies_is_started_again_with_longer_pauses(start: Callable[..., Run]) -> None:
    run = start("web=steady", "ill=dies")
    web = run.pids()["web"]
    run.wait_line(r"ill ended with exit code 3; restarting it in 0\.5 s")
    run.wait_line(r"ill ended with exit code 3; restarting it in 1 s")
    run.wait_line(r"ill ended with exit code 3; restarting it in 2 s")
    assert run.pids()["web"] == web


def test_a_killed_process_takes_its_children_with_it_and_is_restarted(start: Callable[..., Run]) -> None:
    run = start("pool=family")
    grandchild = int(run.wait_line(r"child (\d+)").group(1))
    first = run.pids()["pool"]
    os.kill(first, signal.SIGKILL)
    run.wait_line(r"pool was ended by SIGKILL; restarting it in")
    assert eventually(lambda: not alive(grandchild))
    assert eventually(lambda: run.pids().get("pool", first) != first)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_stops_everything(start: Callable[..., Run], number: signal.Signals) -> None:
    run = start("web=steady", "pool=family", "loud=chatty")
    grandchild = int(run.wait_line(r"child (\d+)").group(1))
    pids = [*run.pids().values(), grandchild]
    run.process.send_signal(number)
    assert run.process.wait(10) == 0
    assert not any(alive(pid) for pid in pids)
    assert not (run.folder / "children.json").exists()


def test_sigint_stops_it_also_when_started_in_the_background(start: Callable[..., Run]) -> None:
    """A shell that is not interactive starts background commands with SIGINT ignored."""
    run = start("web=steady", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    pid = run.pids()["web"]
    run.wait_line(r"web +\| here")
    ignored = int(re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text()).group(1), 16)  # type: ignore[union-attr]
    assert not ignored & 1 << (signal.SIGINT - 1), "children do not inherit the deafness either"
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(10) == 0
    assert not alive(pid)


def test_an_unresponsive_process_is_killed_after_its_grace_period(start: Callable[..., Run]) -> None:
    run = start("deaf=deaf", "web=steady")
    run.wait_line(r"deaf +\| here")
    pid, began = run.pids()["deaf"], time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(10) == 0
    assert 0.9 < time.monotonic() - began < budget_s(5)
    assert not alive(pid)


def test_children_end_when_their_supervisor_is_killed(start: Callable[..., Run]) -> None:
    run = start("web=steady", "beat=steady")
    run.wait_line(r"beat +\| here")
    run.wait_line(r"web +\| here")
    pids = run.pids().values()
    run.process.kill()
    assert eventually(lambda: not any(alive(pid) for pid in pids), 5)


def test_the_next_start_ends_processes_of_a_killed_supervisor(start: Callable[..., Run]) -> None:
    first = start("deaf=deaf", "pool=family")
    grandchild = int(first.wait_line(r"child (\d+)").group(1))
    first.wait_line(r"deaf +\| here")
    deaf = first.pids()["deaf"]
    first.process.kill()
    first.process.wait()
    assert alive(deaf)
    assert alive(grandchild)
    from portal.standalone.processes import orphan_processes

    records = first.folder / "children.json"
    outsider = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        rows = json.loads(records.read_text())
        records.write_text(json.dumps([*rows, {"name": "stranger", "pid": outsider.pid, "start_ticks": 1}]))
        orphan_processes.GRACE_S, kept = 1.0, orphan_processes.GRACE_S
        try:
            assert "deaf" in orphan_processes.terminate_orphans(records, str(first.folder))
        finally:
            orphan_processes.GRACE_S = kept
        assert not alive(deaf)
        assert not alive(grandchild)
        assert alive(outsider.pid), "a recycled process number harms nobody"
    finally:
        outsider.kill()
        outsider.wait()
    assert not records.exists()
