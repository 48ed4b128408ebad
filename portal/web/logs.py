"""The log of a job: the page that follows it, the lines behind it by byte offset, and the whole as a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.http import FileResponse, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from portal.access import Policy, Verb, policy, require, signed_in
from portal.errors import NotThere
from portal.models import Attempt, Job, Task
from portal.selectors.jobs import job_for
from portal.web.job import heading

CHUNK_BYTES = 256 * 1024
LINE_CHARACTERS = 4000
_STAMPED = re.compile(r"^(\d{4}-\d\d-\d\dT[0-9:.]+(?:Z|[+-]\d\d:\d\d)) (stdout|stderr) ([FP]) ?(.*)$")


@policy(Policy.SIGNED_IN)
@require_safe
def logs(request: HttpRequest, public_id: str) -> HttpResponse:
    """The page."""
    user = signed_in(request.user)
    found = job_for(user, public_id)
    require(user, Verb.READ_LOGS, found)
    context = heading(user, found)
    attempt = _attempt(context["attempts"], request.GET.get("attempt", ""))
    rank = request.GET.get("rank", "")
    return render(
        request,
        "job/logs.html",
        context | {"tab": "logs", "last": attempt, "rank": rank if rank.isdigit() else ""},
    )


@policy(Policy.SIGNED_IN)
@require_safe
def lines(request: HttpRequest, public_id: str) -> JsonResponse:
    """Lines of one rank from a byte offset on; without an offset the end of the log."""
    user = signed_in(request.user)
    found = job_for(user, public_id)
    require(user, Verb.READ_LOGS, found)
    task = _task(found, request)
    offset = request.GET.get("offset", "")
    chunk = read_chunk(log_file(found, task), int(offset) if offset.isdigit() else None)
    return JsonResponse(
        {
            "lines": chunk.lines,
            "offset": chunk.offset,
            "from": chunk.start,
            "size": chunk.size,
            "complete": task.log_complete and chunk.offset >= chunk.size,
        }
    )


@policy(Policy.SIGNED_IN)
@require_safe
def download(request: HttpRequest, public_id: str) -> HttpResponse | StreamingHttpResponse:
    """One rank's whole log as a text file."""
    user = signed_in(request.user)
    found = job_for(user, public_id)
    require(user, Verb.READ_LOGS, found)
    task = _task(found, request)
    path = log_file(found, task)
    if path is None:
        raise NotThere("This rank has written no log yet.")
    name = f"{found.public_id}-{task.attempt.number}-{task.rank}.log"
    response: HttpResponse | StreamingHttpResponse = (
        FileResponse(path.open("rb")) if path.suffix == ".raw" else StreamingHttpResponse(_plain(path))
    )
    response.headers["Content-Type"] = "text/plain; charset=utf-8"
    response.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


@dataclass(frozen=True)
class Chunk:
    """Whole lines of a log file: (time or empty, text, is it stderr), and the offset after them."""

    lines: list[tuple[str, str, bool]]
    start: int
    offset: int
    size: int


def log_file(job: Job, task: Task) -> Path | None:
    """The mirrored file of a rank, in either format; None before its first byte."""
    folder = Path(settings.LOG_DIR) / job.public_id / str(task.attempt.number)
    for form in ("k8s", "raw"):
        path = folder / f"{task.rank}.{form}"
        if path.is_file():
            return path
    return None


def read_chunk(path: Path | None, offset: int | None) -> Chunk:
    """At most ``CHUNK_BYTES`` of whole lines. Without an offset: the last ones."""
    if path is None:
        return Chunk([], 0, 0, 0)
    size = path.stat().st_size
    start = max(0, size - CHUNK_BYTES) if offset is None else min(offset, size)
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(CHUNK_BYTES)
    if offset is None and start:
        skipped = data.find(b"\n") + 1
        start, data = start + skipped, data[skipped:]
    end = data.rfind(b"\n") + 1
    if end == 0 and len(data) == CHUNK_BYTES:
        end = len(data)  # one endless line: show it in pieces
    whole = data[:end].decode("utf-8", "replace")
    stamped = path.suffix == ".k8s"
    return Chunk([line_of(line, stamped) for line in whole.splitlines()], start, start + end, size)


def line_of(line: str, stamped: bool) -> tuple[str, str, bool]:
    """One line as time, text and whether it is stderr; carriage returns keep what a terminal would show."""
    time, error = "", False
    if stamped and (found := _STAMPED.match(line)):
        time, error, line = found[1], found[2] == "stderr", found[4]
    shown = line.rstrip("\r").rsplit("\r", 1)[-1]
    return time, _ESCAPES.sub("", shown)[:LINE_CHARACTERS], error


_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f]")


def _plain(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            found = _STAMPED.match(line.decode("utf-8", "replace").rstrip("\n"))
            yield (found[4] + "\n").encode() if found else line


def _attempt(attempts: list[Attempt], wanted: str) -> Attempt | None:
    if wanted.isdigit():
        return next((attempt for attempt in attempts if attempt.number == int(wanted)), None)
    return attempts[0] if attempts else None


def _task(found: Job, request: HttpRequest) -> Task:
    """The rank that is asked for; of the newest attempt unless one is named."""
    wanted: dict[str, Any] = {"attempt__job": found}
    attempt, rank = request.GET.get("attempt", ""), request.GET.get("rank", "0")
    if attempt.isdigit():
        wanted["attempt__number"] = int(attempt)
    if not rank.isdigit():
        raise NotThere("There is no such rank.")
    task = (
        Task.objects.select_related("attempt")
        .filter(rank=int(rank), **wanted)
        .order_by("-attempt__number")
        .first()
    )
    if task is None:
        raise NotThere("There is no such rank.")
    return task
