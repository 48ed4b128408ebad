"""Wire representation of tasks: rows of ``list``, reply to a start, disk fields."""

from __future__ import annotations

from typing import Any, Dict, Optional

from agents.node.ledger.ledger import EXITED, RESERVED, RUNNING, STARTING, Record
from agents.node.runtimes import CREATED, ContainerInfo
from agents.node.runtimes import EXITED as IS_EXITED
from agents.node.runtimes import RUNNING as IS_RUNNING

JsonObject = Dict[str, Any]
DISK_FIELDS = ("disk_mib", "disk_used_mib")
"""Disk limit outside volumes, and what was written when it was exceeded."""
_TASK_KEYS = ("cluster", "job", "attempt", "task", "digest", "started_s")
_LEDGER_KEYS = (*_TASK_KEYS, "runtime", "ended_s", "exit_code", "oom", "peak_memory_mib", "ports", "gpus")
_LATER_KEYS = ("owner", "project", "fault", *DISK_FIELDS)
"""Keys that records of older agents lack."""


def start_reply(name: str, record: Record, state: str, *, already: bool) -> JsonObject:
    return {
        "container": name,
        "state": state,
        "ports": record["ports"],
        "started_s": record["started_s"],
        "already": already,
    }


def row_from_ledger(name: str, record: Record) -> JsonObject:
    """Return the row of a task that only the ledger knows."""
    state = {RESERVED: CREATED, STARTING: CREATED, RUNNING: IS_RUNNING, EXITED: IS_EXITED}[record["phase"]]
    row: JsonObject = {key: record[key] for key in _LEDGER_KEYS}
    row.update({key: record.get(key) for key in _LATER_KEYS})
    return dict(row, name=name, state=state, rebooted=bool(record.get("rebooted")))


def row_from_runtime(found: ContainerInfo, record: Optional[Record], runtime: str) -> JsonObject:
    """Return the row of a task from its runtime, completed from the ledger."""
    if record is not None and record["phase"] == EXITED:
        return row_from_ledger(found.name, record)
    row = found._asdict()
    del row["pid"]
    held = {key: record[key] for key in ("ports", "gpus")} if record else {"ports": {}, "gpus": []}
    return dict(row, **held, runtime=runtime, rebooted=False)


def running_info(name: str, record: Record) -> ContainerInfo:
    known = {key: record[key] for key in (*_TASK_KEYS, "pid")}
    return ContainerInfo(name=name, state=IS_RUNNING, exit_code=None, oom=None, ended_s=None, **known)
