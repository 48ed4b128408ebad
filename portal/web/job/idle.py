"""Actions on an idle workspace: snooze, exempt, and revoke an exemption."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_POST

from portal.access import AccessPolicy, access_policy, require_user
from portal.selectors.jobs.idle import get_exemption
from portal.selectors.jobs.jobs import get_job
from portal.services.workspaces.idle import do_exempt_from_idle, do_revoke_exemption, do_snooze
from portal.web.actions import run_and_redirect


@access_policy(AccessPolicy.SIGNED_IN)
@require_POST
def snooze(request: HttpRequest, public_id: str) -> HttpResponse:
    user = require_user(request.user)
    found = get_job(user, public_id)
    home = request.POST.get("back") == "home"

    def act() -> str:
        do_snooze(user, found)
        return f"{found.name} is snoozed."

    return run_and_redirect(request, act, reverse("home") if home else reverse("job", args=[public_id]))


@access_policy(AccessPolicy.SIGNED_IN)
@require_POST
def exempt(request: HttpRequest, public_id: str) -> HttpResponse:
    user = require_user(request.user)
    found = get_job(user, public_id)

    def act() -> str:
        do_exempt_from_idle(user, found, request.POST.get("reason", ""))
        return f"{found.name} is exempt from idle suspension; the reason is visible to its project."

    return run_and_redirect(request, act, reverse("job", args=[public_id]))


@access_policy(AccessPolicy.SIGNED_IN)
@require_POST
def revoke_exemption(request: HttpRequest, public_id: str) -> HttpResponse:
    user = require_user(request.user)
    found = get_exemption(user, public_id)

    def act() -> str:
        do_revoke_exemption(user, found)
        return f"{found.job.name} is no longer exempt."

    return run_and_redirect(request, act, reverse("approvals"))
