"""A terminal in a running job: its page, and how it is asked for. What is typed passes the gateway alone."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from portal.access import Policy, Verb, policy, require, signed_in
from portal.errors import FairwayError
from portal.models import Terminal
from portal.selectors.jobs import job_for
from portal.services.terminals import do_open_terminal, terminal_for
from portal.web.job import heading
from portal.web.words import whole_number

COLS, ROWS = 80, 24
"""Where a page does not say its size."""


@policy(Policy.SIGNED_IN)
@require_safe
def terminal(request: HttpRequest, public_id: str) -> HttpResponse:
    """The page, for one rank."""
    user = signed_in(request.user)
    found = job_for(user, public_id)
    require(user, Verb.ENTER, found)
    context = heading(user, found)
    rank = whole_number(request.GET.get("rank", "")) or 0
    return render(request, "job/terminal.html", context | {"tab": "terminal", "rank": rank})


@policy(Policy.SIGNED_IN)
@require_POST
def open_terminal(request: HttpRequest, public_id: str) -> JsonResponse:
    """Asks for a terminal; where it is asked after, and where its socket will be."""
    user = signed_in(request.user)
    found = job_for(user, public_id)
    rank, cols, rows = (whole_number(request.POST.get(name, "")) for name in ("rank", "cols", "rows"))
    try:
        opened = do_open_terminal(
            user, found, rank or 0, request.session.session_key or "", cols=cols or COLS, rows=rows or ROWS
        )
    except FairwayError as refusal:
        return JsonResponse({"refusal": refusal.sentence}, status=refusal.status)
    return JsonResponse(
        _told(opened) | {"state": reverse("terminal-state", args=[opened.public_id])}, status=201
    )


@policy(Policy.SIGNED_IN)
@require_safe
def state(request: HttpRequest, public_id: str) -> JsonResponse:
    """How far it is."""
    return JsonResponse(_told(terminal_for(signed_in(request.user), public_id)))


def _told(row: Terminal) -> dict[str, Any]:
    return {
        "socket": f"/terminals/{row.public_id}/",
        "listens": row.port is not None,
        "refusal": row.refusal,
    }
