"""The log of a job: the page that follows it, its lines by cursor, search, and download."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render

from portal.access import AccessPolicy, Permission, require_permission
from portal.downloads import log_archive_response, log_download_response
from portal.errors import FairwayError
from portal.models import Attempt, User
from portal.selectors.jobs.jobs import get_job
from portal.selectors.jobs.logs import lines as log_lines
from portal.selectors.jobs.logs import search as log_search
from portal.selectors.jobs.logs.line_assembly import CUT, LogLine
from portal.selectors.jobs.logs.lines import LogFile, displayed_text
from portal.selectors.jobs.logs.search import LogSearchQuery, SearchCursor
from portal.stored_texts import translate_stored
from portal.web.display.formatting import parse_whole_number
from portal.web.jobs.job.overview import job_page_context
from portal.web.views import page

MAX_LINES = 1000
MAX_LINE_CHARACTERS = 4000


@page(AccessPolicy.SIGNED_IN)
def logs(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    found = get_job(user, public_id)
    require_permission(user, Permission.READ_LOGS, found)
    context = job_page_context(user, found)
    rank, role = request.GET.get("rank", ""), request.GET.get("role", "")
    shown = {
        "tab": "logs",
        "last": _get_attempt(context["attempts"], request.GET.get("attempt", "")),
        "rank": rank if parse_whole_number(rank) is not None else dict(context["role_ranks"]).get(role, ""),
    }
    return render(request, "jobs/job/logs.html", context | shown)


@page(AccessPolicy.SIGNED_IN)
def lines(request: HttpRequest, user: User, public_id: str) -> JsonResponse:
    """Return lines of one rank from a cursor on; without a cursor, the end of the log."""
    log = _get_log(request, user, public_id)
    cursor = parse_whole_number(request.GET.get("cursor", ""))
    found = (
        log_lines.read_lines(log, cursor, MAX_LINES) if cursor is not None else log_lines.tail(log, MAX_LINES)
    )
    loss = log.connection_loss
    return JsonResponse(
        {
            "lines": [_line_json(line) for line in found.lines if not line.is_overwritten],
            "unfinished": [_line_json(line) for line in found.unfinished if not line.is_overwritten],
            "from": found.start,
            "cursor": found.cursor,
            "size": found.size_bytes,
            "complete": found.complete,
            "dropped": log.truncated_bytes,
            "removed": log.is_expired,
            "lost": loss.message if loss else "",
            "since": loss.since.isoformat() if loss and loss.since else "",
        }
    )


@page(AccessPolicy.SIGNED_IN)
def download(request: HttpRequest, user: User, public_id: str) -> HttpResponseBase:
    """Return one rank's log as a text file or a range of it; of several ranks (blank: all) a ZIP file."""
    job, attempt = get_job(user, public_id), parse_whole_number(request.GET.get("attempt", ""))
    logs = log_lines.list_logs(user, job, attempt, _ranks(request))
    if len(logs) == 1:
        return log_download_response(request, logs[0], job=public_id)
    return log_archive_response(request, logs, job=public_id)


@page(AccessPolicy.SIGNED_IN)
def search(request: HttpRequest, user: User, public_id: str) -> JsonResponse:
    """Return matching lines of one or all ranks; ``next`` is the next cursor, blank at the end."""
    job, query = get_job(user, public_id), request.GET
    attempt = parse_whole_number(query.get("attempt", ""))
    logs = log_lines.list_logs(user, job, attempt, _ranks(request))
    after = [parse_whole_number(part) for part in query.get("after", "").split(":")]
    start = SearchCursor(after[0] or 0, after[1] or 0) if len(after) == 2 else None
    pattern = LogSearchQuery(query.get("q", ""), query.get("regex") == "1", stream=query.get("stream", ""))
    try:
        found = log_search.search(logs, pattern, start)
    except FairwayError as error:
        return JsonResponse({"refusal": error.message}, status=error.status)
    matches = [[match.rank, match.line.cursor, *_line_json(match.line)] for match in found.matches]
    return JsonResponse(
        {
            "matches": matches,
            "next": f"{found.next.rank}:{found.next.offset}" if found.next else "",
            "gaps": [f"{translate_stored(gap.label)}: {gap.message}" for gap in found.gaps],
        }
    )


def _line_json(line: LogLine) -> list[Any]:
    """Return time, text, and whether it is an error message, as the page reads them."""
    text = displayed_text(line)
    if len(text) > MAX_LINE_CHARACTERS:
        text = f"{text[:MAX_LINE_CHARACTERS]} {CUT}"
    return [line.at or "", text, line.stream == "stderr"]


def _ranks(request: HttpRequest) -> list[int] | None:
    """Return the ranks of the query, or None for all."""
    given = [parse_whole_number(rank) for rank in request.GET.get("rank", "").split(",")]
    return [rank for rank in given if rank is not None] or None


def _get_log(request: HttpRequest, user: User, public_id: str) -> LogFile:
    rank, attempt = (parse_whole_number(request.GET.get(name, "")) for name in ("rank", "attempt"))
    return log_lines.get_log(user, get_job(user, public_id), rank or 0, attempt)


def _get_attempt(attempts: list[Attempt], wanted: str) -> Attempt | None:
    number = parse_whole_number(wanted)
    if number is not None:
        return next((attempt for attempt in attempts if attempt.number == number), None)
    return attempts[0] if attempts else None
