"""What people do about an idle workspace: keep it for a while, or say why it is kept; and cut such a reason short."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_POST

from portal.access import Policy, policy, signed_in
from portal.selectors.idle import excuse_for
from portal.selectors.jobs import job_for
from portal.services.idle import do_cut_excuse, do_excuse, do_snooze
from portal.web.acts import act_and_return


@policy(Policy.SIGNED_IN)
@require_POST
def snooze(request: HttpRequest, public_id: str) -> HttpResponse:
    """Keeps it for a while."""
    user = signed_in(request.user)
    found = job_for(user, public_id)
    home = request.POST.get("back") == "home"

    def act() -> str:
        do_snooze(user, found)
        return f"{found.name} is kept for a while."

    return act_and_return(request, act, reverse("home") if home else reverse("job", args=[public_id]))


@policy(Policy.SIGNED_IN)
@require_POST
def excuse(request: HttpRequest, public_id: str) -> HttpResponse:
    """Keeps it for a reason."""
    user = signed_in(request.user)
    found = job_for(user, public_id)

    def act() -> str:
        do_excuse(user, found, request.POST.get("text", ""))
        return f"{found.name} is kept; others can read why."

    return act_and_return(request, act, reverse("job", args=[public_id]))


@policy(Policy.SIGNED_IN)
@require_POST
def cut(request: HttpRequest, public_id: str) -> HttpResponse:
    """Ends what a reason keeps."""
    user = signed_in(request.user)
    found = excuse_for(user, public_id)

    def act() -> str:
        do_cut_excuse(user, found)
        return f"{found.job.name} is kept for that reason no more."

    return act_and_return(request, act, reverse("requests"))
