"""The tab of a workspace on which its owner shares it with members of its project."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _

from portal.access import AccessPolicy, Permission, can
from portal.domain.workspaces.sharing import DURATIONS_S, VIEWABLE_TOOLS
from portal.errors import InvalidRequest
from portal.models import User
from portal.selectors.jobs.jobs import get_job
from portal.selectors.lookup import get_first
from portal.services.workspaces.secret_replacement import unreplaced_secret
from portal.services.workspaces.sharing import (
    do_revoke_share,
    do_share_workspace,
    get_share,
    list_shares,
    list_visitors,
    open_port_warning,
    project_members,
    remaining_risk,
)
from portal.web.display.formatting import parse_whole_number
from portal.web.jobs.job.overview import job_page_context
from portal.web.views import action, page, refusals_as_messages


@page(AccessPolicy.SIGNED_IN)
def shares(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    job = get_job(user, public_id)
    may_share = can(user, Permission.ENTER, job)
    context = {
        "tab": "shares",
        "shares": list_shares(user, job),
        "visitors": list_visitors(job),
        "may_share": may_share,
        "members": project_members(job) if may_share else [],
        "durations": DURATIONS_S,
        "warning": open_port_warning(job) if may_share else "",
        "risk": unreplaced_secret(job),
        "may_view": job.environment.tool in VIEWABLE_TOOLS,
    }
    return render(request, "jobs/job/shares.html", job_page_context(user, job) | context)


@action(AccessPolicy.SIGNED_IN)
def share(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    job = get_job(user, public_id)
    with refusals_as_messages(request):
        try:
            guest = get_first(
                User.objects.filter(public_id=request.POST.get("user", "")), _("Choose a member.")
            )
            duration_s = parse_whole_number(request.POST.get("duration_s", "")) or 0
            made = do_share_workspace(user, job, guest, request.POST.get("access", ""), duration_s)
        except InvalidRequest as error:
            messages.error(request, " ".join(error.fields.values()) or error.message)
        else:
            messages.success(
                request,
                _("{name} is shared with {display_name}.").format(
                    name=job.name, display_name=made.user.display_name
                ),
            )
    return redirect("job-shares", public_id)


@action(AccessPolicy.SIGNED_IN)
def revoke(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = do_revoke_share(user, get_share(user, public_id))
    messages.success(
        request,
        _("{name} is no longer shared with {display_name}.").format(
            name=row.job.name, display_name=row.user.display_name
        ),
    )
    if risk := remaining_risk(row):
        messages.warning(request, risk)
    return redirect("job-shares", row.job.public_id)
