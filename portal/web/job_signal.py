"""The button of a job's page that sends a signal."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_POST

from portal.access import Policy, policy, signed_in
from portal.selectors.jobs import job_for
from portal.services.sent_signals import do_send_signal
from portal.web.acts import act_and_return


@policy(Policy.SIGNED_IN)
@require_POST
def send_signal(request: HttpRequest, public_id: str) -> HttpResponse:
    """Sends the chosen signal to every rank."""
    user, name = signed_in(request.user), request.POST.get("signal", "")
    job = job_for(user, public_id)

    def act() -> str:
        do_send_signal(user, job, name)
        return f"{name} is on its way to {job.name}."

    return act_and_return(request, act, reverse("job", args=[public_id]))
