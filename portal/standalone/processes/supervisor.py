"""Supervises the processes of one machine: restarts them, prints their lines, and terminates all.

One thread waits for signals and exits of children; one thread per child copies its lines to the terminal. A
process that dies is restarted after a delay that doubles from 0.5 s to 30 s. The record file has pid and
start time of every child, so that the next start can terminate what a killed supervisor left.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from portal.standalone.processes.exec_child import exec_command
from portal.standalone.processes.log_prefix import PrefixedWriter
from portal.standalone.processes.orphan_processes import ChildRecord, write_records

INITIAL_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STABLE_AFTER_S = 30.0
"""After running this long, a process has its restart delay reset."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(BaseException):
    """SIGINT or SIGTERM arrived during the start."""


@dataclass(frozen=True)
class Process:
    """One supervised process. Processes of a lower `stage` stop after those of a higher one."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path = Path("/")
    stage: int = 1
    account: str | None = None
    niceness: int = 0
    stop_signal: signal.Signals = signal.SIGTERM
    grace_s: float = 10.0


@dataclass
class _Child:
    process: Process
    popen: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    backoff_s: float = INITIAL_BACKOFF_S
    restart_at_s: float | None = None
    exit_count: int = 0
    reader: threading.Thread | None = field(default=None, repr=False)


class Supervisor:
    """Run processes until `stop` or a signal. Use as a context manager in the main thread only."""

    def __init__(self, records: Path, lines: PrefixedWriter) -> None:
        self._records = records
        self._lines = lines
        self._children: dict[str, _Child] = {}
        self._stop_requests = False
        self._starting = True

    def __enter__(self) -> Supervisor:
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, self._on_stop) for number in STOP_SIGNALS}
        self._old_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._old_handlers)
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.stop()
        finally:
            signal.set_wakeup_fd(self._old_wakeup)
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def start(self, process: Process) -> None:
        child = _Child(process)
        self._children[process.name] = child
        self._spawn(child)

    def is_running(self, name: str) -> bool:
        child = self._children.get(name)
        return child is not None and child.popen is not None and child.popen.poll() is None

    def exit_counts(self) -> dict[str, int]:
        """How often each process has exited by itself so far."""
        return {name: child.exit_count for name, child in self._children.items()}

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Restart processes that die, until a signal or until `until()` is true."""
        self._starting = False
        if until is not None:
            self._starting = True
        while not self._stop_requests and not (until and until()):
            self._restart_due()
            self._wait(self._seconds_to_restart(0.1 if until else 1.0))
            for child in self._children.values():
                if child.popen is not None and _has_exited(child.popen):
                    self._reap(child)

    def stop_processes(self, *names: str) -> None:
        """Stop some processes before the others and do not restart them; another signal shortens the wait."""
        self._stop_requests = False
        self._terminate([child for name in names if (child := self._children.pop(name, None))])
        self._write_records()

    @property
    def force_stop_requested(self) -> bool:
        """True when another signal arrived during the stop."""
        return self._stop_requests

    def stop(self) -> None:
        """Stop all processes, later stages first; kill whole process groups after the grace period."""
        self._starting = False
        self._stop_requests = False
        for stage in sorted({child.process.stage for child in self._children.values()}, reverse=True):
            self._terminate([child for child in self._children.values() if child.process.stage == stage])
        for child in self._children.values():
            if child.reader is not None:
                child.reader.join(timeout=1)
        self._children.clear()
        self._records.unlink(missing_ok=True)

    def _terminate(self, group: list[_Child]) -> None:
        """Signal the processes and wait until all have ended; kill those that do not end in time."""
        began = time.monotonic()
        waiting = [(child, child.popen) for child in group if child.popen is not None]
        for child, popen in waiting:
            if not _has_exited(popen):
                popen.send_signal(child.process.stop_signal)
        while waiting:
            for child, popen in list(waiting):
                if not _has_exited(popen):
                    if not self._stop_requests and time.monotonic() - began < child.process.grace_s:
                        continue
                    self._lines.supervisor_line(f"{child.process.name} did not stop in time; killing it")
                _kill_group(popen)
                popen.wait()
                child.popen = None
                waiting.remove((child, popen))
            if waiting:
                self._wait(0.05)

    def _spawn(self, child: _Child) -> None:
        process = child.process
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            child.popen = subprocess.Popen(
                exec_command(
                    process.command,
                    account=process.account,
                    niceness=process.niceness,
                    death_signal=process.stop_signal,
                ),
                cwd=process.folder,
                env=dict(process.environment),
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                start_new_session=True,
            )
        finally:
            os.close(write)
        child.started_s = time.monotonic()
        child.restart_at_s = None
        source: IO[bytes] = os.fdopen(read, "rb")
        child.reader = threading.Thread(
            target=self._lines.copy_from, args=(process.name, source), daemon=True
        )
        child.reader.start()
        self._write_records()

    def _reap(self, child: _Child) -> None:
        """Kill the rest of the dead process's group, and schedule the restart."""
        popen = child.popen
        if popen is None:
            return
        _kill_group(popen)
        code = popen.wait()
        child.popen = None
        if self._stop_requests:
            return
        child.exit_count += 1
        if time.monotonic() - child.started_s >= STABLE_AFTER_S:
            child.backoff_s = INITIAL_BACKOFF_S
        child.restart_at_s = time.monotonic() + child.backoff_s
        self._lines.supervisor_line(
            f"{child.process.name} {_describe_exit(code)}; restarting it in {child.backoff_s:g} s"
        )
        child.backoff_s = min(child.backoff_s * 2, MAX_BACKOFF_S)
        self._write_records()

    def _restart_due(self) -> None:
        for child in self._children.values():
            if child.restart_at_s is not None and time.monotonic() >= child.restart_at_s:
                self._spawn(child)

    def _seconds_to_restart(self, at_most_s: float) -> float:
        due = [child.restart_at_s for child in self._children.values() if child.restart_at_s is not None]
        return max(0.0, min([at_most_s, *(moment - time.monotonic() for moment in due)]))

    def _wait(self, limit_s: float) -> None:
        """Sleep until a signal (including SIGCHLD) or the time limit."""
        select.select([self._wake_read], [], [], limit_s)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_requests = True
        if self._starting:
            raise StopRequested

    def _write_records(self) -> None:
        running = [
            ChildRecord.from_pid(child.process.name, child.popen.pid)
            for child in self._children.values()
            if child.popen is not None
        ]
        write_records(self._records, running)


def _has_exited(popen: subprocess.Popen[bytes]) -> bool:
    """Return whether the process exited, without reaping it, so that its pid stays reserved."""
    if popen.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _kill_group(popen: subprocess.Popen[bytes]) -> None:
    if popen.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
