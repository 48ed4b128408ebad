"""The log of a job: the page that follows it, the lines behind it by cursor, and the whole as a file."""

from __future__ import annotations

import re
from collections.abc import Iterator

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from portal.access import Policy, Verb, policy, require, signed_in
from portal.models import Attempt
from portal.selectors import logs as log_lines
from portal.selectors.jobs import job_for
from portal.selectors.log_files import awaited
from portal.selectors.logs import LogFile, LogLine
from portal.web.job import heading
from portal.web.words import whole_number

FIRST_LINES = 1000
SHOWN_CHARACTERS = 4000
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")
"""Escapes of terminals. None reaches past the next escape, so a line full of broken ones costs one pass."""


@policy(Policy.SIGNED_IN)
@require_safe
def logs(request: HttpRequest, public_id: str) -> HttpResponse:
    """The page."""
    user = signed_in(request.user)
    found = job_for(user, public_id)
    require(user, Verb.READ_LOGS, found)
    context = heading(user, found)
    rank = request.GET.get("rank", "")
    return render(
        request,
        "job/logs.html",
        context
        | {
            "tab": "logs",
            "last": _attempt(context["attempts"], request.GET.get("attempt", "")),
            "rank": rank if whole_number(rank) is not None else "",
        },
    )


@policy(Policy.SIGNED_IN)
@require_safe
def lines(request: HttpRequest, public_id: str) -> JsonResponse:
    """Lines of one rank from a cursor on; without one the end of the log."""
    log = _log(request, public_id)
    cursor = whole_number(request.GET.get("cursor", ""))
    page = (
        log_lines.read_lines(log, cursor, FIRST_LINES)
        if cursor is not None
        else log_lines.tail(log, FIRST_LINES)
    )
    return JsonResponse(
        {
            "lines": [[line.at or "", shown(line), line.stream == "stderr"] for line in page.lines],
            "from": page.start,
            "cursor": page.cursor,
            "size": page.size_bytes,
            "complete": page.complete,
            "lost": log.lost.sentence if log.lost else "",
            "since": log.lost.since.isoformat() if log.lost and log.lost.since else "",
        }
    )


@policy(Policy.SIGNED_IN)
@require_safe
def download(request: HttpRequest, public_id: str) -> StreamingHttpResponse:
    """One rank's whole log as a text file, without the engine's stamps."""
    log = _log(request, public_id)
    pieces = _plain(log)
    served = isinstance(request, ASGIRequest)
    response = StreamingHttpResponse(
        awaited(pieces) if served else pieces, content_type="text/plain; charset=utf-8"
    )
    name = f"{public_id}-{log.attempt}-{log.rank}.log"
    response.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def shown(line: LogLine) -> str:
    """What a terminal would show of a line: after its last carriage return, without escapes."""
    text = line.text.rstrip("\r").rsplit("\r", 1)[-1]
    return _ESCAPES.sub("", text)[:SHOWN_CHARACTERS]


def _log(request: HttpRequest, public_id: str) -> LogFile:
    user = signed_in(request.user)
    rank, attempt = request.GET.get("rank", ""), request.GET.get("attempt", "")
    return log_lines.log_for(
        user,
        job_for(user, public_id),
        whole_number(rank) or 0,
        whole_number(attempt),
    )


def _plain(log: LogFile) -> Iterator[bytes]:
    cursor = 0
    while True:
        page = log_lines.read_lines(log, cursor, log_lines.MAX_LINES)
        yield b"".join(line.text.encode() + b"\n" for line in page.lines)
        if page.cursor == cursor:
            return
        cursor = page.cursor


def _attempt(attempts: list[Attempt], wanted: str) -> Attempt | None:
    number = whole_number(wanted)
    if number is not None:
        return next((attempt for attempt in attempts if attempt.number == number), None)
    return attempts[0] if attempts else None
