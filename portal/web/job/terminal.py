"""A terminal in a running job: its page and its creation; the gateway carries the data."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from portal.access import AccessPolicy, Permission, access_policy, require_permission, require_user
from portal.errors import FairwayError
from portal.models import Terminal
from portal.selectors.jobs.jobs import get_job
from portal.services.workspaces.terminals import do_open_terminal, get_terminal
from portal.web.display.formatting import parse_whole_number
from portal.web.job.overview import job_page_context

DEFAULT_COLUMNS, DEFAULT_ROWS = 80, 24
"""Size when the page sends none."""


@access_policy(AccessPolicy.SIGNED_IN)
@require_safe
def terminal(request: HttpRequest, public_id: str) -> HttpResponse:
    """Render the page for one rank."""
    user = require_user(request.user)
    found = get_job(user, public_id)
    require_permission(user, Permission.ENTER, found)
    context = job_page_context(user, found)
    rank = parse_whole_number(request.GET.get("rank", "")) or 0
    return render(request, "job/terminal.html", context | {"tab": "terminal", "rank": rank})


@access_policy(AccessPolicy.SIGNED_IN)
@require_POST
def open_terminal(request: HttpRequest, public_id: str) -> JsonResponse:
    """Request a terminal; return the URLs of its state and its socket."""
    user = require_user(request.user)
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
    except FairwayError as refusal:
        return JsonResponse({"refusal": refusal.message}, status=refusal.status)
    return JsonResponse(
        _terminal_json(opened) | {"state": reverse("terminal-state", args=[opened.public_id])}, status=201
    )


@access_policy(AccessPolicy.SIGNED_IN)
@require_safe
def terminal_state(request: HttpRequest, public_id: str) -> JsonResponse:
    return JsonResponse(_terminal_json(get_terminal(require_user(request.user), public_id)))


def _terminal_json(row: Terminal) -> dict[str, Any]:
    return {
        "socket": f"/terminals/{row.public_id}/",
        "listens": row.port is not None,
        "refusal": row.error,
    }
