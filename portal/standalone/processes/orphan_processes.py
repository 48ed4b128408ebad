"""Terminates processes that outlived a killed supervisor, identified by pid, start time and session."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agents.node.host.atomic_files import write_atomic

GRACE_S = 12.0
SUPERVISED_VARIABLE = "FAIRWAY_SUPERVISED"
"""Set in the environment of every child; its value identifies the data folder."""


@dataclass(frozen=True)
class ChildRecord:
    """A child in the record file; a pid alone may have been reused."""

    name: str
    pid: int
    start_ticks: int

    @classmethod
    def from_pid(cls, name: str, pid: int) -> ChildRecord:
        status = _process_status(pid)
        return cls(name, pid, status.start_ticks if status else 0)


@dataclass(frozen=True)
class _ProcessStatus:
    session: int
    start_ticks: int
    state: str


def write_records(path: Path, children: Iterable[ChildRecord]) -> None:
    """Replace the record file atomically."""
    write_atomic(str(path), json.dumps([asdict(child) for child in children]).encode(), sync=False)


def read_records(path: Path) -> list[ChildRecord]:
    """Return the children last recorded by a supervisor; none if the file is missing or truncated."""
    try:
        rows = json.loads(path.read_text())
        return [ChildRecord(str(row["name"]), int(row["pid"]), int(row["start_ticks"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def terminate_orphans(path: Path, *marks: str) -> list[str]:
    """Terminate live recorded children and their sessions; return their names.

    Only processes with one of the marks in their environment count: pids are reused, and the record file of a
    copied data folder names the processes of the original.
    """
    records = read_records(path)
    found = {record.name for record in records if _is_ours(record, marks)}
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_S
        pids = _pids(records, marks)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while _pids(records, marks) and time.monotonic() < deadline:
            time.sleep(0.05)
    path.unlink(missing_ok=True)
    return sorted(found)


def _pids(records: list[ChildRecord], marks: Sequence[str]) -> set[int]:
    sessions = {record.pid for record in records}
    pids = {record.pid for record in records if _is_ours(record, marks)}
    if not sessions:
        return pids
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            status = _process_status(int(entry.name))
            if status and status.state != "Z" and status.session in sessions and _has_marker(entry, marks):
                pids.add(int(entry.name))
    return pids


def _is_ours(record: ChildRecord, marks: Sequence[str]) -> bool:
    status = _process_status(record.pid)
    is_alive = status is not None and status.state != "Z" and status.start_ticks == record.start_ticks
    return is_alive and _has_marker(Path(f"/proc/{record.pid}"), marks)


def _has_marker(entry: Path, marks: Sequence[str]) -> bool:
    try:
        variables = (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(f"{SUPERVISED_VARIABLE}={mark}".encode() in variables for mark in marks)


def _process_status(pid: int) -> _ProcessStatus | None:
    """Return state, session and start time from /proc, parsed after the name, which may contain anything."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return _ProcessStatus(session=int(fields[3]), start_ticks=int(fields[19]), state=fields[0])
