"""Requests that need a decision: time limit extensions, and exemptions of idle workspaces."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from portal.access import AccessPolicy, approvable_extensions, project_ids
from portal.domain.states import Role
from portal.models import TimeLimitExtension, User
from portal.selectors.jobs.idle import active_exemptions
from portal.selectors.jobs.jobs import visible_job_ids
from portal.selectors.jobs.time_limits import get_extension, list_extensions
from portal.services.jobs.time_limits import do_decide_extension
from portal.web.views import action, page, refusals_as_messages

DECIDED_LIMIT = 20
PENDING_LIMIT = 200


@dataclass(frozen=True)
class ExtensionRequestRow:
    """A request for more time as its reader may see it."""

    row: TimeLimitExtension
    may_decide: bool
    delays: list[tuple[str, float | None]]
    """Delayed jobs visible to the reader, with seconds; None if unknown."""

    @property
    def hidden_delay_count(self) -> int:
        """Number of delayed jobs invisible to the reader."""
        return self.row.delayed_count - len(self.delays)


@page(AccessPolicy.SIGNED_IN)
def approvals(request: HttpRequest, user: User) -> HttpResponse:
    """List pending requests, recent decisions and current exemptions."""
    waiting = list(list_extensions(user, pending_only=True)[:PENDING_LIMIT])
    decided = list(list_extensions(user, pending_only=False)[:DECIDED_LIMIT])
    may = approvable_extensions(user, waiting)
    visible = visible_job_ids(user, {one["job"] for row in waiting for one in row.delays})
    requests = [
        ExtensionRequestRow(
            row, row.pk in may, [(one["job"], one["by_s"]) for one in row.delays if one["job"] in visible]
        )
        for row in waiting
    ]
    exemptions = list(active_exemptions(user)[:PENDING_LIMIT])
    managed = managed_projects(user)
    context = {
        "extension_requests": requests,
        "decided": decided,
        "exemptions": [(row, managed is None or row.job.project_id in managed) for row in exemptions],
    }
    return render(request, "approvals/page.html", context)


@action(AccessPolicy.SIGNED_IN)
def decide_extension(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    found = get_extension(user, public_id)
    grant = request.POST.get("grant") == "1"
    with refusals_as_messages(request):
        do_decide_extension(user, found, grant=grant, answer=request.POST.get("answer", "").strip())
        decided = "granted" if grant else "refused"
        messages.success(request, f"The extension of {found.job.name} is {decided}.")
    return redirect("approvals")


def managed_projects(user: User) -> set[int] | None:
    """Return primary keys of the projects that the user manages; None: all, for administrators."""
    return None if user.is_admin else project_ids(user, Role.MANAGER)
