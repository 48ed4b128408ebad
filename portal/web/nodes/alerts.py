"""The alerts page: the portal's machine, unacknowledged and recent XIDs, foreign processes, invalid rows."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _

from portal.access import AccessPolicy
from portal.models import User
from portal.selectors.cluster.portal_alerts import portal_health
from portal.selectors.nodes.alerts import AlertView, alerts, invalid_rows
from portal.services.nodes.alerts import do_acknowledge_alert, do_acknowledge_invalid_row
from portal.web.views import action, page, refusals_as_messages, render_live

OPEN_ALERTS_LIMIT = 200
ACKNOWLEDGED_LIMIT = 30


@page(AccessPolicy.ADMIN)
def alerts_page(request: HttpRequest, user: User) -> HttpResponse:
    found = [AlertView(row) for row in alerts()[:OPEN_ALERTS_LIMIT]]
    context = {
        "portal_alerts": portal_health().alerts,
        "invalid": invalid_rows()[:OPEN_ALERTS_LIMIT],
        "alerts": [each for each in found if each.needs_attention],
        "notes": [each for each in found if not each.needs_attention],
        "seen": [AlertView(row) for row in alerts(acknowledged=True)[:ACKNOWLEDGED_LIMIT]],
    }
    return render_live(request, "nodes/alerts.html", "nodes/alerts_live.html", context)


@action(AccessPolicy.ADMIN)
def acknowledge(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    with refusals_as_messages(request):
        row = do_acknowledge_alert(user, public_id, request.POST.get("note", ""))
        where = _("{alert} on {node}").format(alert=AlertView(row).name, node=row.gpu.node.name)
        messages.success(
            request, _("{where} is acknowledged; the next one raises a new alert.").format(where=where)
        )
    return redirect("alerts")


@action(AccessPolicy.ADMIN)
def acknowledge_invalid_row(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Acknowledge an invalid row; it stays on the page until it is valid."""
    with refusals_as_messages(request):
        do_acknowledge_invalid_row(user, public_id, request.POST.get("note", ""))
        messages.success(request, _("Acknowledged. The alert ends once the row is valid again."))
    return redirect("alerts")
