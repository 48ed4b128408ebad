"""The alerts page: unacknowledged and recent XIDs, foreign processes and invalid rows."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from portal.access import AccessPolicy, access_policy, require_user
from portal.selectors.nodes.alerts import AlertView, alerts, invalid_rows
from portal.services.nodes.alerts import do_acknowledge_alert, do_acknowledge_invalid_row
from portal.web.actions import run_and_redirect

OPEN_ALERTS_LIMIT = 200
ACKNOWLEDGED_LIMIT = 30


@access_policy(AccessPolicy.ADMIN)
@require_safe
def alerts_page(request: HttpRequest) -> HttpResponse:
    """Render the page, or its live part for htmx."""
    template = "admin/alerts_live.html" if request.headers.get("HX-Request") else "admin/alerts.html"
    found = [AlertView(row) for row in alerts()[:OPEN_ALERTS_LIMIT]]
    context = {
        "invalid": invalid_rows()[:OPEN_ALERTS_LIMIT],
        "alerts": [each for each in found if each.needs_attention],
        "notes": [each for each in found if not each.needs_attention],
        "seen": [AlertView(row) for row in alerts(acknowledged=True)[:ACKNOWLEDGED_LIMIT]],
    }
    return render(request, template, context)


@access_policy(AccessPolicy.ADMIN)
@require_POST
def acknowledge(request: HttpRequest, public_id: str) -> HttpResponse:
    user = require_user(request.user)

    def act() -> str:
        row = do_acknowledge_alert(user, public_id, request.POST.get("note", ""))
        return (
            f"{AlertView(row).name} on {row.gpu.node.name} is acknowledged; the next one raises a new alert."
        )

    return run_and_redirect(request, act, reverse("alerts"))


@access_policy(AccessPolicy.ADMIN)
@require_POST
def acknowledge_invalid_row(request: HttpRequest, public_id: str) -> HttpResponse:
    """Acknowledge an invalid row; it stays on the page until it is valid."""
    user = require_user(request.user)

    def act() -> str:
        do_acknowledge_invalid_row(user, public_id, request.POST.get("note", ""))
        return "Acknowledged. The alert ends once the row is valid again."

    return run_and_redirect(request, act, reverse("alerts"))
