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
    keys = ("cluster", "job", "attempt", "task", "digest", "runtime", "exit_code", "oom", "peak_memory_mib")
    row: JsonObject = {key: record[key] for key in keys}
    row.update(name=name, state=state, ports=record["ports"], gpus=record["gpus"])
    row.update(
        started_s=record["started_s"], ended_s=record["ended_s"], rebooted=bool(record.get("rebooted"))
    )
    row.update(owner=record.get("owner"), project=record.get("project"), fault=record.get("fault"))
    row.update({key: record.get(key) for key in DISK_FIELDS})
    return row


def row_from_runtime(found: ContainerInfo, record: Optional[Record], runtime: str) -> JsonObject:
    """Return the row of a task from its runtime, completed from the ledger."""
    if record is not None and record["phase"] == EXITED:
        return row_from_ledger(found.name, record)
    return {
        "name": found.name,
        "cluster": found.cluster,
        "job": found.job,
        "attempt": found.attempt,
        "task": found.task,
        "digest": found.digest,
        "runtime": runtime,
        "state": found.state,
        "exit_code": found.exit_code,
        "oom": found.oom,
        "peak_memory_mib": found.peak_memory_mib,
        "started_s": found.started_s,
        "ended_s": found.ended_s,
        "ports": record["ports"] if record else {},
        "gpus": record["gpus"] if record else [],
        "rebooted": False,
        "owner": found.owner,
        "project": found.project,
    }


def running_info(name: str, record: Record) -> ContainerInfo:
    return ContainerInfo(
        name=name,
        cluster=record["cluster"],
        job=record["job"],
        attempt=record["attempt"],
        task=record["task"],
        digest=record["digest"],
        state=IS_RUNNING,
        exit_code=None,
        oom=None,
        pid=record["pid"],
        started_s=record["started_s"],
        ended_s=None,
    )
