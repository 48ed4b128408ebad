"""Reads logs by byte offset; the portal mirrors the file, so repeated reads are harmless."""

from __future__ import annotations

import base64
import contextlib
import os
import time
from typing import Any, Dict, Tuple

from agents.node import errors
from agents.node.errors import AgentError
from agents.node.ledger.ledger import EXITED
from agents.node.spec.task_spec import parse_integer
from agents.node.storage.directories import FIRST_LOG_SUFFIX
from agents.node.task_log import log_cut_message
from agents.node.tasks.task_manager import TaskManager

MAX_BYTES = 262_144


def read_log(tasks: TaskManager, request: Dict[str, Any]) -> Dict[str, Any]:
    """Return bytes of a log from ``offset``; ``eof`` only when the task has ended and nothing follows."""
    name, offset = tasks.task_name(request), parse_integer(request, "offset")
    limit = min(parse_integer({"limit": MAX_BYTES, **request}, "limit"), MAX_BYTES)
    record = tasks.ledger.tasks().get(name)
    if record is None:
        raise AgentError(errors.NO_SUCH_CONTAINER, f"{name} is not on this node.")
    ended = record["phase"] == EXITED  # checked before the file is read, so that eof is never early
    runtime = tasks.runtimes[record["runtime"]]
    collect_log(tasks, name)
    data, size = _read_bytes(tasks.directories.log_path(name), offset, limit, tasks.settings.max_log_mib)
    return {
        "data_b64": base64.b64encode(data).decode("ascii"),
        "offset": offset,
        "next_offset": offset + len(data),
        "size": size,
        "eof": ended and offset + len(data) >= size,
        "format": runtime.log_format,
    }


def collect_log(tasks: TaskManager, name: str) -> None:
    """Copy or link the log of a task before its engine rotates it."""
    record = tasks.ledger.tasks().get(name)
    if record is not None:
        tasks.runtimes[record["runtime"]].collect_log(name, tasks.directories.log_path(name))


def _read_bytes(path: str, offset: int, limit: int, limit_mib: int) -> Tuple[bytes, int]:
    """Return bytes of a log and its current size; a truncated log ends with a message."""
    last_words = b""
    with contextlib.suppress(FileNotFoundError):
        first, now = os.stat(path + FIRST_LOG_SUFFIX), os.stat(path)
        path += FIRST_LOG_SUFFIX
        if first.st_ino != now.st_ino:
            moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(first.st_mtime))
            last_words = f"{moment}.000000000+00:00 stdout F {log_cut_message(limit_mib)}\n".encode()
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(offset)
            data = stream.read(limit)
    except FileNotFoundError:
        return b"", 0
    if len(data) < limit:
        data += last_words[max(0, offset - size) :][: limit - len(data)]
    return data, size + len(last_words)
