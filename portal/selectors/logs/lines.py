"""Reads mirrored logs: lines from a cursor, and the tail.

A cursor is a byte offset at which a line starts. Formats are ``k8s`` (podman and docker: time, stream, and F
or P for full or partial before each piece) and ``raw`` (bytes as the process wrote them).
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from django.utils.translation import gettext as _

from portal.access import Permission, Requester, require_permission
from portal.domain.roles import ranks_of_role
from portal.domain.states import NodeState
from portal.errors import NotFound
from portal.models import Attempt, Job, Node, Task
from portal.selectors.logs.files import LOG_FORMATS, MAX_LOG_BYTES, TIMESTAMP_PREFIX, log_path

MAX_LINES = 2_000
MAX_READ_BYTES = 1024 * 1024
MAX_LINE_CHARACTERS = 16_384
TAIL_BLOCK_BYTES = 64 * 1024
_TERMINAL_ESCAPES = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]"
)
"""Terminal escape sequences. No match extends past the next escape, so malformed lines need one pass."""


@dataclass(frozen=True)
class NodeConnectionLoss:
    """The node of an incomplete log is not connected, so the log may continue there."""

    node: str
    since: dt.datetime | None
    message: str


@dataclass(frozen=True)
class LogFile:
    """The mirrored log of one task; ``log_format`` is k8s or raw, ``complete`` if no more will come.

    ``reported_bytes`` is the size that the node reported.
    """

    path: Path
    log_format: str
    complete: bool
    attempt: int
    rank: int
    connection_loss: NodeConnectionLoss | None = None
    reported_bytes: int = 0
    label: str = ""
    """Such as worker 1, or rank 1 in a job without roles."""

    @property
    def is_expired(self) -> bool:
        """True if the log was removed because of its age."""
        return self.complete and self.reported_bytes > 0 and not self.path.exists()

    @property
    def truncated_bytes(self) -> int:
        return max(0, self.reported_bytes - MAX_LOG_BYTES)

    @property
    def size_bytes(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


@dataclass(frozen=True)
class LogLine:
    """One line. ``at`` is an ISO time or None; ``stream`` is stdout, stderr, or blank if unknown."""

    at: str | None
    stream: str
    text: str
    cursor: int


@dataclass(frozen=True)
class LogPage:
    """Lines with start and next cursor, and whether the log is complete."""

    lines: list[LogLine]
    start: int
    cursor: int
    size_bytes: int
    complete: bool


def get_log(requester: Requester, job: Job, rank: int = 0, attempt: int | None = None) -> LogFile:
    """Return the log of a rank, of the newest attempt by default. Raise NotFound or Forbidden."""
    require_permission(requester, Permission.READ_LOGS, job)
    row = _get_attempt(job, attempt)
    tasks = Task.objects.filter(attempt=row, rank=rank).select_related("node")
    task = tasks.first() if row is not None else None
    if row is None or task is None:
        raise NotFound(_("There is no such rank, or it has not been placed yet."), code="no_such_task")
    return _task_log(job, row, task)


def list_logs(
    requester: Requester, job: Job, attempt: int | None = None, ranks: Container[int] | None = None
) -> list[LogFile]:
    """Return the logs of all ranks of an attempt, or of ``ranks``, as ``get_log``, in three queries."""
    require_permission(requester, Permission.READ_LOGS, job)
    row = _get_attempt(job, attempt)
    if row is None:
        raise NotFound(_("There is no such attempt, or nothing has been placed yet."), code="no_such_task")
    tasks = row.task_rows.select_related("node").order_by("rank")
    return [_task_log(job, row, task) for task in tasks if ranks is None or task.rank in ranks]


def role_ranks(job: Job, role: str) -> range:
    """Return the ranks of a role. Raise NotFound."""
    try:
        return ranks_of_role(job.job_roles, role)
    except KeyError:
        raise NotFound(_("The job has no role {role}.").format(role=role), code="no_such_role") from None


def _get_attempt(job: Job, number: int | None) -> Attempt | None:
    rows = Attempt.objects.filter(job=job)
    return rows.last() if number is None else rows.filter(number=number).first()


def _task_log(job: Job, attempt: Attempt, task: Task) -> LogFile:
    file = log_file(job.public_id, attempt.number, task.rank, complete=task.log_complete)
    lost = None if task.log_complete else node_connection_loss(task.node)
    label = job.task_label(task.rank)
    return replace(file, connection_loss=lost, reported_bytes=task.log_bytes, label=label)


def node_connection_loss(node: Node) -> NodeConnectionLoss | None:
    """Return the connection status of a node that does not answer, else None."""
    if node.state == NodeState.RETIRED.value:
        message = _("The node {name} is retired; log lines that it had not sent are lost.")
        return NodeConnectionLoss(node.name, None, message.format(name=node.name))
    if node.reachable:
        return None
    message = _("The connection to {name} was lost; the log continues when it is restored.")
    return NodeConnectionLoss(node.name, node.unreachable_since, message.format(name=node.name))


def log_file(job: str, attempt: int, rank: int, *, complete: bool = False) -> LogFile:
    """Return the mirrored file of a task in whichever format exists; it may not exist yet."""
    found = [form for form in LOG_FORMATS if log_path(job, attempt, rank, form).is_file()]
    form = found[0] if found else LOG_FORMATS[0]
    return LogFile(log_path(job, attempt, rank, form), form, complete, attempt, rank)


# -- lines -----------------------------------------------------------------------------------------


def read_lines(log: LogFile, cursor: int = 0, limit: int = 500) -> LogPage:
    """Return up to ``limit`` complete lines from ``cursor``; an incomplete last line is left for later."""
    limit = max(1, min(limit, MAX_LINES))
    size = log.size_bytes
    cursor = max(0, min(cursor, size))
    with open_log(log) as stream:
        stream.seek(cursor)
        data = stream.read(MAX_READ_BYTES)
    at_end = cursor + len(data) >= size
    whole = data if at_end and log.complete else data[: data.rfind(b"\n") + 1]
    if not whole and len(data) == MAX_READ_BYTES:
        whole = data  # one line longer than a read: split it to make progress
    if log.log_format == "k8s":
        lines, used = _decode_k8s(whole, cursor, limit, flush=log.complete and at_end)
    else:
        lines, used = _decode_raw(whole, cursor, limit)
    next_cursor = cursor + used
    return LogPage(lines, cursor, next_cursor, size, log.complete and next_cursor >= size)


def tail(log: LogFile, limit: int = 200) -> LogPage:
    """Return the last ``limit`` lines."""
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


def whole_lines(log: LogFile, limit: int) -> list[str]:
    """Return the last ``limit`` lines without the limit on their length, of at most ``MAX_READ_BYTES`` in all."""
    with open_log(log) as stream:
        stream.seek(max(0, log.size_bytes - MAX_READ_BYTES))
        data = stream.read(MAX_READ_BYTES)
    texts: list[str] = []
    parts: dict[bytes, bytes] = {}
    for piece in data.splitlines():
        match = TIMESTAMP_PREFIX.match(piece) if log.log_format == "k8s" else None
        source, mark = (match[2], match[3]) if match else (b"", b"F")
        parts[source] = parts.get(source, b"") + (piece[match.end() :] if match else piece)
        if mark != b"P":
            texts.append(parts.pop(source).decode("utf-8", "replace"))
    return texts[-limit:]


# -- formats ---------------------------------------------------------------------------------------


def _decode_raw(data: bytes, base: int, limit: int) -> tuple[list[LogLine], int]:
    lines: list[LogLine] = []
    used = 0
    for piece in _split(data):
        if len(lines) >= limit:
            break
        lines.append(LogLine(None, "", _decode_text(piece), base + used))
        used += len(piece)
    return lines, used


def _decode_k8s(data: bytes, base: int, limit: int, *, flush: bool) -> tuple[list[LogLine], int]:
    """Join the partial pieces of each stream; the returned cursor precedes unfinished lines."""
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
        # One stream has an unfinished line while the other continues: show what there is rather than nothing.
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


def displayed_text(line: LogLine) -> str:
    """Return the text that a terminal would show: after the last carriage return, without escapes."""
    text = line.text.rstrip("\r").rsplit("\r", 1)[-1]
    return _TERMINAL_ESCAPES.sub("", text)


def open_log(log: LogFile) -> BinaryIO:
    """Open the file for reading; it is empty before the first byte."""
    try:
        return log.path.open("rb")
    except FileNotFoundError:
        return Path("/dev/null").open("rb")
