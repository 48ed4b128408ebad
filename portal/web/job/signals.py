"""The action of a job's page that sends a signal."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_POST

from portal.access import AccessPolicy, access_policy, require_user
from portal.selectors.jobs.jobs import get_job
from portal.services.jobs.signals import do_send_signal
from portal.web.actions import run_and_redirect


@access_policy(AccessPolicy.SIGNED_IN)
@require_POST
def send_signal(request: HttpRequest, public_id: str) -> HttpResponse:
    """Send the chosen signal to every rank."""
    user, name = require_user(request.user), request.POST.get("signal", "")
    job = get_job(user, public_id)

    def act() -> str:
        do_send_signal(user, job, name)
        return f"{name} is being sent to {job.name}."

    return run_and_redirect(request, act, reverse("job", args=[public_id]))
