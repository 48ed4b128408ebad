"""Reads mirrored logs: lines from a cursor, and the tail.

A cursor is a byte offset at which a piece starts. Formats are ``k8s`` (podman and docker: time, stream, and F
or P for full or partial before each piece) and ``raw`` (bytes as the process wrote them).
"""

from __future__ import annotations

import datetime as dt
import re
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from django.utils.translation import gettext as _

from portal.access import Permission, Requester, require_permission
from portal.domain.jobs.roles import ranks_of_role
from portal.domain.states import NodeState
from portal.errors import NotFound
from portal.models import Attempt, Job, Node, Task
from portal.selectors.jobs.logs.files import LOG_FORMATS, MAX_LOG_BYTES, log_path
from portal.selectors.jobs.logs.line_assembly import CONTEXT_BLOCKS, LineAssembler, LogLine
from portal.selectors.jobs.logs.pieces import PIECE_BYTES, Piece, read_pieces
from portal.selectors.jobs.logs.terminal_text import terminal_text

MAX_LINES = 2_000
MAX_READ_BYTES = 1024 * 1024
MAX_TAIL_BYTES = 8 * 1024 * 1024
_RAW_LINE = re.compile(rb"\n")
_K8S_LINE = re.compile(rb"[\dZ] std(?:out|err) F ")


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
class LogPage:
    """Lines with start and next cursor, and whether the log is complete.

    ``unfinished`` are the lines at the end of the log that the program has not ended yet, as they are now, and parts
    of them that are cut. They are behind the next cursor too, or partly, and are returned again with what follows.
    """

    lines: list[LogLine]
    start: int
    cursor: int
    size_bytes: int
    complete: bool
    unfinished: list[LogLine] = field(default_factory=list)


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
    """Return about ``limit`` lines that end at or after ``cursor``, and what is there of unfinished ones.

    The next cursor is always greater, unless the log ends here. There may be no lines between the two.
    """
    limit = max(1, min(limit, MAX_LINES))
    lines: list[LogLine] = []
    page = _read(log, cursor, lines, lambda read_bytes: len(lines) >= limit or read_bytes >= MAX_READ_BYTES)
    return replace(page, lines=lines)


def tail(log: LogFile, limit: int = 200) -> LogPage:
    """Return the last ``limit`` lines that a terminal would show, within ``MAX_TAIL_BYTES``."""
    limit = max(1, min(limit, MAX_LINES))
    start, ends = log.size_bytes, 0
    pattern = _K8S_LINE if log.log_format == "k8s" else _RAW_LINE
    with open_log(log) as stream:
        while start > 0 and ends <= limit and log.size_bytes - start < MAX_TAIL_BYTES:
            step = min(PIECE_BYTES, start)
            start -= step
            stream.seek(start)
            ends += len(pattern.findall(stream.read(step)))
    recent: deque[LogLine] = deque(maxlen=limit + 1)
    page = _read(log, start, _Shown(recent), lambda _read_bytes: False)
    lines = list(recent)[-limit:]
    if start == 0 and len(recent) <= limit:
        return replace(page, lines=lines, start=0)
    return replace(page, lines=lines, start=lines[0].cursor if lines else page.start)


def whole_lines(log: LogFile, limit: int) -> list[str]:
    """Return the last ``limit`` lines without the limit on their length, of at most ``MAX_READ_BYTES`` in all."""
    texts: deque[str] = deque(maxlen=limit)
    parts: dict[str, bytes] = defaultdict(bytes)
    size = log.size_bytes
    with open_log(log) as file:
        for piece in read_pieces(file, log.log_format, max(0, size - MAX_READ_BYTES), size):
            parts[piece.stream] += piece.text
            if piece.ends_line:
                texts.append(parts.pop(piece.stream).decode("utf-8", "replace"))
    texts.extend(text.decode("utf-8", "replace") for text in parts.values() if text)
    return list(texts)


class _Shown:
    """Appends to ``lines`` what a terminal would show."""

    def __init__(self, lines: deque[LogLine]) -> None:
        self._lines = lines

    def extend(self, lines: Iterable[LogLine]) -> None:
        self._lines.extend(line for line in lines if not line.is_overwritten)


def _read(
    log: LogFile, cursor: int, lines: list[LogLine] | _Shown, is_full: Callable[[int], bool]
) -> LogPage:
    """Add lines that end at or after ``cursor`` until ``is_full``, which is given the number of bytes read.

    Return the page without these lines.
    """
    size = log.size_bytes
    cursor = max(0, min(cursor, size))
    assembler = LineAssembler()
    start = at = None
    rest: Piece | None = None
    is_end = True
    with open_log(log) as file:
        for piece in read_pieces(file, log.log_format, _context_start(log, file, cursor), size):
            if piece.end <= cursor:
                assembler.add(piece)
                continue
            start = piece.start if start is None else start
            if is_full(piece.start - start):
                is_end = False
                break
            if not piece.finished and not log.complete:
                rest = piece
                break
            lines.extend(assembler.add(piece))
            at = piece.end
    start = cursor if start is None else start
    at = start if at is None else at
    if log.complete and at >= size and at > start:
        lines.extend(assembler.unfinished())
        return LogPage([], start, at, size, complete=True)
    cut = assembler.add(rest) if rest is not None else []
    unfinished = [*cut, *assembler.unfinished()] if is_end else []
    return LogPage([], start, at, size, log.complete and at >= size, unfinished)


def _context_start(log: LogFile, file: BinaryIO, cursor: int) -> int:
    """Return where reading begins so that the lines that are unfinished at ``cursor`` are known."""
    start = max(0, (cursor // PIECE_BYTES - CONTEXT_BLOCKS) * PIECE_BYTES)
    file.seek(start)
    data = file.read(cursor - start)
    has_headers = start == 0 or data.rfind(b"\n", 0, -1) >= 0
    if data.endswith(b"\n") and (log.log_format != "k8s" or (has_headers and b" P " not in data)):
        return cursor
    return start


def displayed_text(line: LogLine) -> str:
    """Return what a terminal shows of the line."""
    return terminal_text(line.text)


def open_log(log: LogFile) -> BinaryIO:
    """Open the file for reading; it is empty before the first byte."""
    try:
        return log.path.open("rb")
    except FileNotFoundError:
        return Path("/dev/null").open("rb")
