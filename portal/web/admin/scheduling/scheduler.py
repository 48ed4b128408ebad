"""The scheduler page: alarm, cycle durations, and the input of failed cycles."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST, require_safe

from portal.access import AccessPolicy, access_policy, require_user
from portal.selectors.scheduling.cycles import failed_cycles, latest_cycles, scheduler_alert
from portal.selectors.scheduling.forecasts import forecast_accuracy
from portal.services.cluster.failed_cycles import do_export_failed_cycle

CYCLES_SHOWN = 20


@access_policy(AccessPolicy.ADMIN)
@require_safe
def scheduler_page(request: HttpRequest) -> HttpResponse:
    """Render the page, or its live part for htmx."""
    template = "admin/scheduler_live.html" if request.headers.get("HX-Request") else "admin/scheduler.html"
    cycles = latest_cycles(CYCLES_SHOWN)
    context = {
        "cluster": scheduler_alert(),
        "cycles": cycles,
        "last": cycles[0] if cycles else None,
        "failed": failed_cycles(),
        "measured": forecast_accuracy(),
    }
    return render(request, template, context)


@access_policy(AccessPolicy.ADMIN)
@require_POST
def failed_cycle(request: HttpRequest, public_id: str) -> HttpResponse:
    """Return snapshot and policy of a failed cycle as a file; a POST, since it writes an audit row."""
    name, content = do_export_failed_cycle(require_user(request.user), public_id)
    answer = HttpResponse(content, content_type="application/gzip")
    answer["Content-Disposition"] = f'attachment; filename="{name}"'
    return answer
