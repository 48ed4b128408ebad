"""A terminal in a running job: its page and its creation; the gateway carries the data."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse

from portal.access import AccessPolicy, Permission, require_permission
from portal.errors import FairwayError
from portal.models import Terminal, User
from portal.selectors.jobs.jobs import get_job
from portal.services.workspaces.terminals import do_open_terminal, get_terminal
from portal.web.display.formatting import parse_whole_number
from portal.web.jobs.job.overview import job_page_context
from portal.web.views import action, page

DEFAULT_COLUMNS, DEFAULT_ROWS = 80, 24
"""Size when the page sends none."""


@page(AccessPolicy.SIGNED_IN)
def terminal(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    found = get_job(user, public_id)
    require_permission(user, Permission.ENTER, found)
    context = job_page_context(user, found)
    rank = parse_whole_number(request.GET.get("rank", "")) or 0
    return render(request, "jobs/job/terminal.html", context | {"tab": "terminal", "rank": rank})


@action(AccessPolicy.SIGNED_IN)
def open_terminal(request: HttpRequest, user: User, public_id: str) -> JsonResponse:
    """Request a terminal; return the URLs of its state and its socket."""
    found = get_job(user, public_id)
    rank, cols, rows = (parse_whole_number(request.POST.get(name, "")) for name in ("rank", "cols", "rows"))
    try:
        opened = do_open_terminal(
            user,
            found,
            rank or 0,
            request.session.session_key or "",
            cols=cols or DEFAULT_COLUMNS,
            rows=rows or DEFAULT_ROWS,
        )
    except FairwayError as error:
        return JsonResponse({"refusal": error.message}, status=error.status)
    return JsonResponse(
        _terminal_json(opened) | {"state": reverse("terminal-state", args=[opened.public_id])}, status=201
    )


@page(AccessPolicy.SIGNED_IN)
def terminal_state(request: HttpRequest, user: User, public_id: str) -> JsonResponse:
    return JsonResponse(_terminal_json(get_terminal(user, public_id)))


def _terminal_json(row: Terminal) -> dict[str, Any]:
    return {
        "socket": f"/terminals/{row.public_id}/",
        "listens": row.port is not None,
        "refusal": row.error,
    }
