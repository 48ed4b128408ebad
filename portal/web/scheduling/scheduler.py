"""The scheduler page: alert, cycle durations, and the input of failed cycles."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse

from portal.access import AccessPolicy
from portal.models import User
from portal.selectors.scheduling.cycles import failed_cycles, latest_cycles, scheduler_alert
from portal.selectors.scheduling.forecasts import forecast_accuracy
from portal.services.scheduling.failed_cycles import do_export_failed_cycle
from portal.web.views import action, page, render_live

CYCLES_SHOWN = 20


@page(AccessPolicy.ADMIN)
def scheduler_page(request: HttpRequest, user: User) -> HttpResponse:
    cycles = latest_cycles(CYCLES_SHOWN)
    context = {
        "cluster": scheduler_alert(),
        "cycles": cycles,
        "last": cycles[0] if cycles else None,
        "failed": failed_cycles(),
        "measured": forecast_accuracy(),
    }
    return render_live(request, "scheduling/scheduler.html", "scheduling/scheduler_live.html", context)


@action(AccessPolicy.ADMIN)
def failed_cycle(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Return snapshot and policy of a failed cycle as a file; a POST, since it writes an audit row."""
    name, content = do_export_failed_cycle(user, public_id)
    answer = HttpResponse(content, content_type="application/gzip")
    answer["Content-Disposition"] = f'attachment; filename="{name}"'
    return answer
