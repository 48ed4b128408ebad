"""Reads mirrored logs: lines from a cursor, and the tail.

A cursor is a byte offset at which a line begins. Two formats are read: ``k8s`` (podman's and docker's: time,
stream and an F or P for whole and partial before each piece) and ``raw`` (bytes as the process wrote them).
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from portal.access import Permission, Requester, require_permission
from portal.domain.states import NodeState
from portal.errors import NotFound
from portal.models import Attempt, Job, Node, Task
from portal.selectors.logs.files import LOG_FORMATS, MAX_LOG_BYTES, TIMESTAMP_PREFIX, log_path

MAX_LINES = 2_000
MAX_READ_BYTES = 1024 * 1024
MAX_LINE_CHARACTERS = 16_384
TAIL_BLOCK_BYTES = 64 * 1024


@dataclass(frozen=True)
class NodeConnectionLoss:
    """The connection to the node of a log that is not complete; the log's end here is not its end there."""

    node: str
    since: dt.datetime | None
    message: str


@dataclass(frozen=True)
class LogFile:
    """The mirrored log of one task; ``form`` is k8s or raw, ``complete`` when nothing more will come.

    ``reported_bytes`` is how much of it the node has reported.
    """

    path: Path
    log_format: str
    complete: bool
    attempt: int
    rank: int
    connection_loss: NodeConnectionLoss | None = None
    reported_bytes: int = 0

    @property
    def is_expired(self) -> bool:
        """True when it was here, and was removed because of its age."""
        return self.complete and self.reported_bytes > 0 and not self.path.exists()

    @property
    def truncated_bytes(self) -> int:
        """What came after the most that is kept here of one log."""
        return max(0, self.reported_bytes - MAX_LOG_BYTES)

    @property
    def size_bytes(self) -> int:
        """Bytes that are here now."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


@dataclass(frozen=True)
class LogLine:
    """One line. ``at`` is an ISO time or None; ``stream`` is stdout, stderr or "" where unknown."""

    at: str | None
    stream: str
    text: str
    cursor: int


@dataclass(frozen=True)
class LogPage:
    """Lines, where they begin, where to read on, and whether that is all there will ever be."""

    lines: list[LogLine]
    start: int
    cursor: int
    size_bytes: int
    complete: bool


def get_log(requester: Requester, job: Job, rank: int = 0, attempt: int | None = None) -> LogFile:
    """The log of a rank (of the newest attempt unless one is named). Raises NotThere, NotAllowed."""
    require_permission(requester, Permission.READ_LOGS, job)
    attempts = Attempt.objects.filter(job=job)
    row = attempts.filter(number=attempt).first() if attempt is not None else attempts.last()
    tasks = Task.objects.filter(attempt=row, rank=rank).select_related("node")
    task = tasks.first() if row is not None else None
    if row is None or task is None:
        raise NotFound("There is no such rank, or it has not been placed yet.", code="no_such_task")
    return _task_log(job, row, task)


def list_logs(requester: Requester, job: Job, attempt: int | None = None) -> list[LogFile]:
    """The logs of all ranks of an attempt, as ``log_for`` gives each: three queries."""
    require_permission(requester, Permission.READ_LOGS, job)
    attempts = Attempt.objects.filter(job=job)
    row = attempts.filter(number=attempt).first() if attempt is not None else attempts.last()
    if row is None:
        raise NotFound("There is no such attempt, or nothing has been placed yet.", code="no_such_task")
    return [_task_log(job, row, task) for task in row.task_rows.select_related("node").order_by("rank")]


def _task_log(job: Job, attempt: Attempt, task: Task) -> LogFile:
    file = log_file(job.public_id, attempt.number, task.rank, complete=task.log_complete)
    lost = None if task.log_complete else node_connection_loss(task.node)
    return replace(file, connection_loss=lost, reported_bytes=task.log_bytes)


def node_connection_loss(node: Node) -> NodeConnectionLoss | None:
    """What there is to say of the connection to a node while it does not answer."""
    if node.state == NodeState.RETIRED.value:
        return NodeConnectionLoss(
            node.name, None, f"The node {node.name} is retired; what it had not sent is lost."
        )
    if node.reachable:
        return None
    message = (
        f"The connection to {node.name} was lost; it is tried again, and the log goes on where it stopped."
    )
    return NodeConnectionLoss(node.name, node.unreachable_since, message)


def log_file(job: str, attempt: int, rank: int, *, complete: bool = False) -> LogFile:
    """The mirrored file of a task, whichever format it has; it may not exist yet."""
    found = [form for form in LOG_FORMATS if log_path(job, attempt, rank, form).is_file()]
    form = found[0] if found else LOG_FORMATS[0]
    return LogFile(log_path(job, attempt, rank, form), form, complete, attempt, rank)


# -- lines -----------------------------------------------------------------------------------------


def read_lines(log: LogFile, cursor: int = 0, limit: int = 500) -> LogPage:
    """Up to ``limit`` whole lines from ``cursor`` on. A line still being written is left for later."""
    limit = max(1, min(limit, MAX_LINES))
    size = log.size_bytes
    cursor = max(0, min(cursor, size))
    with open_log(log) as stream:
        stream.seek(cursor)
        data = stream.read(MAX_READ_BYTES)
    at_end = cursor + len(data) >= size
    if at_end and not (log.complete and data):
        whole = data[: data.rfind(b"\n") + 1]
    else:
        whole = data if at_end else data[: data.rfind(b"\n") + 1]
    if not whole and len(data) == MAX_READ_BYTES:
        whole = data  # one line longer than a read: cut it rather than stand still
    lines, used = _decode(log.log_format, whole, cursor, limit, flush=log.complete and at_end)
    next_cursor = cursor + used
    return LogPage(lines, cursor, next_cursor, size, log.complete and next_cursor >= size)


def tail(log: LogFile, limit: int = 200) -> LogPage:
    """The last lines."""
    limit = max(1, min(limit, MAX_LINES))
    size = log.size_bytes
    start, breaks = size, 0
    with open_log(log) as stream:
        while start > 0 and breaks <= limit and size - start < MAX_READ_BYTES:
            step = min(TAIL_BLOCK_BYTES, start)
            start -= step
            stream.seek(start)
            breaks += stream.read(step).count(b"\n")
        if start > 0:
            stream.seek(start)
            start += len(stream.readline(MAX_READ_BYTES))
    page = read_lines(log, start, MAX_LINES)
    lines = page.lines[-limit:]
    begin = lines[0].cursor if lines else page.start
    return LogPage(lines, begin, page.cursor, page.size_bytes, page.complete)


# -- formats ---------------------------------------------------------------------------------------


def _decode(log_format: str, data: bytes, base: int, limit: int, *, flush: bool) -> tuple[list[LogLine], int]:
    return (_decode_k8s if log_format == "k8s" else _decode_raw)(data, base, limit, flush)


def _decode_raw(data: bytes, base: int, limit: int, flush: bool) -> tuple[list[LogLine], int]:
    lines: list[LogLine] = []
    used = 0
    for piece in _split(data):
        if len(lines) >= limit:
            break
        lines.append(LogLine(None, "", _decode_text(piece), base + used))
        used += len(piece)
    return lines, used


def _decode_k8s(data: bytes, base: int, limit: int, flush: bool) -> tuple[list[LogLine], int]:
    """Joins partial pieces of each stream; what is not finished yet stays before the cursor's line."""
    lines: list[LogLine] = []
    parts: dict[bytes, tuple[int, str, list[bytes]]] = {}
    used = read = 0
    for piece in _split(data):
        if len(lines) >= limit:
            break
        begin = base + read
        read += len(piece)
        line = piece.rstrip(b"\n")
        match = TIMESTAMP_PREFIX.match(line)
        if match is None:
            lines.append(LogLine(None, "", _decode_text(piece), begin))
        else:
            at, stream, mark = match.groups()
            held = parts.setdefault(stream, (begin, at.decode(), []))
            held[2].append(line[match.end() :])
            if mark == b"P":
                continue
            del parts[stream]
            lines.append(LogLine(held[1], stream.decode(), _decode_text(b"".join(held[2])), held[0]))
        if not parts:
            used = read
    if parts and (flush or (used == 0 and lines)):
        # One stream holds a line open while the other goes on: show what there is, rather than nothing.
        for stream, (begin, at_text, contents) in sorted(parts.items(), key=lambda item: item[1][0]):
            lines.append(LogLine(at_text, stream.decode(), _decode_text(b"".join(contents)), begin))
        used = read
    if parts and used < read and not flush:
        lines = [line for line in lines if line.cursor < base + used]
    return lines, used


def _split(data: bytes) -> list[bytes]:
    pieces = data.split(b"\n")
    last = pieces.pop()
    return [piece + b"\n" for piece in pieces] + ([last] if last else [])


def _decode_text(piece: bytes) -> str:
    text = piece.rstrip(b"\n").decode("utf-8", "replace")
    return text if len(text) <= MAX_LINE_CHARACTERS else text[:MAX_LINE_CHARACTERS] + " … (cut)"


def open_log(log: LogFile) -> BinaryIO:
    """The file for reading; an empty one before its first byte."""
    try:
        return log.path.open("rb")
    except FileNotFoundError:
        return Path("/dev/null").open("rb")
