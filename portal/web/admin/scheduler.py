"""The scheduler's own page: its alarm, how long its cycles take, and what failed ones had to decide on."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST, require_safe

from portal.access import Policy, policy, signed_in
from portal.selectors.forecasts import measured
from portal.selectors.scheduler import alarm, failed_cycles, newest_cycles
from portal.services.failed_cycles import do_give_out_failed

CYCLES_SHOWN = 20


@policy(Policy.ADMIN)
@require_safe
def scheduler_page(request: HttpRequest) -> HttpResponse:
    """Everything, or its live part for htmx."""
    template = "admin/scheduler_live.html" if request.headers.get("HX-Request") else "admin/scheduler.html"
    cycles = newest_cycles(CYCLES_SHOWN)
    context = {
        "cluster": alarm(),
        "cycles": cycles,
        "last": cycles[0] if cycles else None,
        "failed": failed_cycles(),
        "measured": measured(),
    }
    return render(request, template, context)


@policy(Policy.ADMIN)
@require_POST
def failed_cycle(request: HttpRequest, public_id: str) -> HttpResponse:
    """The snapshot and policy of one failed cycle as a file; a POST, since it leaves an audit row."""
    name, content = do_give_out_failed(signed_in(request.user), public_id)
    answer = HttpResponse(content, content_type="application/gzip")
    answer["Content-Disposition"] = f'attachment; filename="{name}"'
    return answer
