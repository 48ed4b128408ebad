"""The log of a job: the page that follows it, the lines behind it by cursor, and the whole as a file."""

from __future__ import annotations

import re

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from portal.access import Policy, Verb, policy, require, signed_in
from portal.errors import FairwayError
from portal.log_download import log_download
from portal.models import Attempt
from portal.selectors import log_search
from portal.selectors import logs as log_lines
from portal.selectors.jobs import job_for
from portal.selectors.log_search import Place, Sought
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
            "dropped": log.dropped_bytes,
            "removed": log.removed,
            "lost": log.lost.sentence if log.lost else "",
            "since": log.lost.since.isoformat() if log.lost and log.lost.since else "",
        }
    )


@policy(Policy.SIGNED_IN)
@require_safe
def download(request: HttpRequest, public_id: str) -> HttpResponseBase:
    """One rank's log as a text file, whole or a range of it, without the engine's stamps."""
    return log_download(request, _log(request, public_id), job=public_id)


@policy(Policy.SIGNED_IN)
@require_safe
def search(request: HttpRequest, public_id: str) -> JsonResponse:
    """Lines of all ranks, or of one, that match; ``next`` is where to go on, blank at the end."""
    user = signed_in(request.user)
    job, asked = job_for(user, public_id), request.GET
    attempt, rank = whole_number(asked.get("attempt", "")), whole_number(asked.get("rank", ""))
    logs = log_lines.logs_for(user, job, attempt)
    after = [whole_number(part) for part in asked.get("after", "").split(":")]
    start = Place(after[0] or 0, after[1] or 0) if len(after) == 2 else None
    sought = Sought(asked.get("q", ""), asked.get("regex") == "1", stream=asked.get("stream", ""))
    try:
        found = log_search.search([log for log in logs if rank in (None, log.rank)], sought, start)
    except FairwayError as refusal:
        return JsonResponse({"refusal": refusal.sentence}, status=refusal.status)
    matches = [
        [match.rank, match.line.cursor, match.line.at or "", shown(match.line), match.line.stream == "stderr"]
        for match in found.matches
    ]
    return JsonResponse(
        {"matches": matches, "next": f"{found.next.rank}:{found.next.offset}" if found.next else ""}
    )


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


def _attempt(attempts: list[Attempt], wanted: str) -> Attempt | None:
    number = whole_number(wanted)
    if number is not None:
        return next((attempt for attempt in attempts if attempt.number == number), None)
    return attempts[0] if attempts else None
