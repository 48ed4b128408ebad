"""The page of alarms about GPUs: XIDs and foreign programs that nobody has acknowledged, and what was of late."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from portal.access import Policy, policy, signed_in
from portal.selectors.alarms import Alarm, alarms, invalid_rows
from portal.services.alarms import do_acknowledge_alarm, do_acknowledge_invalid_row
from portal.web.acts import act_and_return

SHOWN = 200
ACKNOWLEDGED_SHOWN = 30


@policy(Policy.ADMIN)
@require_safe
def alarms_page(request: HttpRequest) -> HttpResponse:
    """Everything, or its live part for htmx."""
    template = "admin/alarms_live.html" if request.headers.get("HX-Request") else "admin/alarms.html"
    found = [Alarm(row) for row in alarms()[:SHOWN]]
    context = {
        "invalid": invalid_rows()[:SHOWN],
        "alarms": [each for each in found if each.is_alarm],
        "notes": [each for each in found if not each.is_alarm],
        "seen": [Alarm(row) for row in alarms(acknowledged=True)[:ACKNOWLEDGED_SHOWN]],
    }
    return render(request, template, context)


@policy(Policy.ADMIN)
@require_POST
def acknowledge(request: HttpRequest, public_id: str) -> HttpResponse:
    """Somebody has looked at it."""
    user = signed_in(request.user)

    def act() -> str:
        row = do_acknowledge_alarm(user, public_id, request.POST.get("note", ""))
        return f"{Alarm(row).name} on {row.gpu.node.name} is acknowledged; the next one is told anew."

    return act_and_return(request, act, reverse("alarms"))


@policy(Policy.ADMIN)
@require_POST
def acknowledge_invalid_row(request: HttpRequest, public_id: str) -> HttpResponse:
    """Somebody looks after it; it stays on the page until the row is valid."""
    user = signed_in(request.user)

    def act() -> str:
        do_acknowledge_invalid_row(user, public_id, request.POST.get("note", ""))
        return "Acknowledged. The alarm ends once the row is valid again."

    return act_and_return(request, act, reverse("alarms"))
