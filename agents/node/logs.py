"""Logs by byte offset: the portal mirrors a task's file, so asking again for the same bytes does no harm."""

from __future__ import annotations

import base64
import os
from typing import Any, Dict

from agents.node import refusals
from agents.node.ledger import EXITED
from agents.node.refusals import Refusal
from agents.node.spec import container_name, public_id, whole_number
from agents.node.tasks import Tasks

MAX_BYTES = 262_144


def read_log(tasks: Tasks, fields: Dict[str, Any]) -> Dict[str, Any]:
    """Bytes of a task's log from ``offset``; ``eof`` only when the task has ended and nothing follows."""
    job, attempt = public_id(fields, "job"), whole_number(fields, "attempt")
    task, offset = (
        whole_number(dict(fields, task=fields.get("task", 0)), "task"),
        whole_number(fields, "offset"),
    )
    limit = min(whole_number(dict(fields, limit=fields.get("limit", MAX_BYTES)), "limit"), MAX_BYTES)
    name = container_name(tasks.settings.cluster, job, attempt, task)
    record = tasks.ledger.tasks().get(name)
    if record is None:
        raise Refusal(refusals.NO_SUCH_CONTAINER, f"{name} is not on this node.")
    ended = record["phase"] == EXITED  # asked before the file is read, so that eof is never early
    runtime = tasks.runtimes[record["runtime"]]
    data, size = _bytes(runtime.log_path(name, tasks.places.log(name)), offset, limit)
    return {
        "data_b64": base64.b64encode(data).decode("ascii"),
        "offset": offset,
        "next_offset": offset + len(data),
        "size": size,
        "eof": ended and offset + len(data) >= size,
        "format": runtime.log_format,
    }


def _bytes(path: str, offset: int, limit: int) -> Any:
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(offset)
            return stream.read(limit), size
    except FileNotFoundError:
        return b"", 0
