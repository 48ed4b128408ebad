"""REST: the log of one rank, in pieces by byte offset, its last lines, or as a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.core.handlers.asgi import ASGIRequest
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, Verb, policy, require
from portal.api.bodies import Closed
from portal.api.route import Route, operation
from portal.api.shapes.jobs import LogPage
from portal.errors import Invalid, NotThere
from portal.models import Task, User
from portal.selectors.jobs import job_for
from portal.selectors.log_files import FORMATS, awaited, log_path
from portal.services.tokens import Scope

PIECE_BYTES = 256 * 1024
MAX_TAIL_LINES = 5000
STAMPED = re.compile(rb"^(\d{4}-\d\d-\d\dT\S+) (stdout|stderr) ([FP]) ?")
"""The head of a line in the format k8s: time, stream, and whether the line is full or goes on."""


class TaskQuery(Closed):
    """Which rank's log."""

    rank = serializers.IntegerField(required=False, default=0, min_value=0, max_value=100_000)
    attempt = serializers.IntegerField(
        required=False, min_value=1, max_value=1_000_000, help_text="Default: the newest."
    )
    timestamps = serializers.BooleanField(
        required=False, default=False, help_text="Keep time and stream before each line, where known."
    )


class LogQuery(TaskQuery):
    """Which piece of it."""

    offset = serializers.IntegerField(
        required=False, min_value=0, max_value=2**40, help_text="In bytes; go on at `next_offset`."
    )
    limit = serializers.IntegerField(
        required=False, default=PIECE_BYTES, min_value=1024, max_value=PIECE_BYTES, help_text="In bytes."
    )
    tail = serializers.IntegerField(
        required=False,
        min_value=1,
        max_value=MAX_TAIL_LINES,
        help_text="The last lines instead, as far as 256 KiB reach.",
    )


def task_for(person: User, public_id: str, query: dict[str, Any]) -> Task:
    """The rank that is asked for, when the person may read the job's logs."""
    job = job_for(person, public_id)
    require(person, Verb.READ_LOGS, job)
    tasks = Task.objects.filter(attempt__job=job, rank=query["rank"]).select_related("attempt")
    if "attempt" in query:
        tasks = tasks.filter(attempt__number=query["attempt"])
    task = tasks.order_by("-attempt__number").first()
    if task is None:
        raise NotThere("There is no such rank, or it has not been placed yet.", code="no_such_task")
    return task


def file_of(job: str, task: Task) -> Path | None:
    """The mirrored log of a rank; None before its first byte."""
    paths = (log_path(job, task.attempt.number, task.rank, form) for form in FORMATS)
    return next((path for path in paths if path.is_file()), None)


def read_piece(path: Path, offset: int, limit: int) -> tuple[bytes, int]:
    """Whole lines from ``offset`` on, at most ``limit`` bytes, and the size; a longer line comes in pieces."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(min(offset, size))
        data = file.read(limit)
    end = data.rfind(b"\n") + 1
    return data[: end or len(data)] if len(data) == limit else data, size


def read_tail(path: Path, lines: int) -> tuple[bytes, int]:
    """The last lines, as far as ``PIECE_BYTES`` reach, and the size."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = max(0, size - PIECE_BYTES)
        file.seek(start)
        data = file.read(PIECE_BYTES)
    if start:
        data = data[data.find(b"\n") + 1 :]
    return b"".join(data.splitlines(keepends=True)[-lines:]), size


def plain(line: bytes) -> bytes:
    """A line without time and stream; one that goes on loses its line end too."""
    found = STAMPED.match(line)
    if found is None:
        return line
    rest = line[found.end() :]
    return rest.rstrip(b"\n") if found[3] == b"P" else rest


@policy(Policy.SIGNED_IN)
class JobLogsRoute(Route):
    """The log in pieces."""

    @operation(
        "jobs_logs",
        "Read a job's log",
        tag="jobs",
        scope=Scope.READ,
        query=LogQuery,
        answer=LogPage,
        refusals=[404],
        detail="Without `offset` from the start. Ask again at `next_offset` until `complete`.",
    )
    def get(self, request: Request, job: str) -> HttpResponseBase:
        """Whole lines of one rank."""
        if "tail" in self.query and "offset" in self.query:
            raise Invalid(fields={"tail": "Ask for the last lines or for an offset, not both."})
        task = task_for(self.person, job, self.query)
        path = file_of(job, task)
        data, size, start = b"", 0, self.query.get("offset", 0)
        if path is not None and "tail" in self.query:
            data, size = read_tail(path, self.query["tail"])
            start = size - len(data)
        elif path is not None:
            data, size = read_piece(path, start, self.query["limit"])
            start = min(start, size)
        shown = data
        if path is not None and path.suffix == ".k8s" and not self.query["timestamps"]:
            shown = b"".join(plain(line) for line in data.splitlines(keepends=True))
        return self.answer(
            {
                "text": shown.decode("utf-8", "replace"),
                "offset": start,
                "next_offset": start + len(data),
                "size": size,
                "complete": task.log_complete and start + len(data) >= size,
                "attempt": task.attempt.number,
                "rank": task.rank,
            }
        )


@policy(Policy.SIGNED_IN)
class JobLogFileRoute(Route):
    """The log as a file."""

    @operation(
        "jobs_log_file",
        "Download a rank's log",
        tag="jobs",
        scope=Scope.READ,
        query=TaskQuery,
        answer=str,
        media_type="text/plain",
        refusals=[404],
    )
    def get(self, request: Request, job: str) -> HttpResponseBase:
        """Everything mirrored so far."""
        task = task_for(self.person, job, self.query)
        path = file_of(job, task)
        if path is None:
            raise NotThere("This rank has written no log yet.", code="no_log_yet")
        pieces = _pieces(path, stamps=self.query["timestamps"] or path.suffix != ".k8s")
        served = isinstance(request._request, ASGIRequest)
        answer = StreamingHttpResponse(
            awaited(pieces) if served else pieces, content_type="text/plain; charset=utf-8"
        )
        name = f"{job}-{task.attempt.number}-{task.rank}.log"
        answer["Content-Disposition"] = f'attachment; filename="{name}"'
        answer["Cache-Control"] = "no-store"
        return answer


def _pieces(path: Path, *, stamps: bool) -> Iterator[bytes]:
    with path.open("rb") as file:
        while lines := file.readlines(PIECE_BYTES):
            yield b"".join(lines if stamps else map(plain, lines))
