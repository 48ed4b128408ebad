"""What people ask for and somebody has to decide: more time for running jobs, and why idle workspaces are kept."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from portal.access import Policy, decidable, policy, project_ids, signed_in
from portal.models import Extension, User
from portal.selectors.idle import excuses_for
from portal.selectors.jobs import seen_of
from portal.selectors.time_limits import extension_for, extensions_for
from portal.services.time_limits import do_decide_extension
from portal.web.acts import act_and_return
from portal.words.states import Role

DECIDED_SHOWN = 20
WAITING_SHOWN = 200


@dataclass(frozen=True)
class Asked:
    """A request for more time as its reader may see it."""

    row: Extension
    may_decide: bool
    delays: list[tuple[str, float | None]]
    """The delayed jobs that the reader may see, with seconds; None where nobody knows how long."""

    @property
    def unseen(self) -> int:
        """Delayed jobs that are not named."""
        return self.row.delayed_count - len(self.delays)


@policy(Policy.SIGNED_IN)
@require_safe
def requests(request: HttpRequest) -> HttpResponse:
    """What waits for a decision, what was decided lately, and the reasons that hold."""
    user = signed_in(request.user)
    waiting = list(extensions_for(user, waiting=True)[:WAITING_SHOWN])
    decided = list(extensions_for(user, waiting=False)[:DECIDED_SHOWN])
    may, seen = decidable(user, waiting), seen_of(user, {one["job"] for row in waiting for one in row.delays})
    asked = [
        Asked(row, row.pk in may, [(one["job"], one["by_s"]) for one in row.delays if one["job"] in seen])
        for row in waiting
    ]
    excuses = list(excuses_for(user)[:WAITING_SHOWN])
    managed = managed_projects(user)
    context = {
        "asked": asked,
        "decided": decided,
        "excuses": [(row, managed is None or row.job.project_id in managed) for row in excuses],
    }
    return render(request, "requests/page.html", context)


@policy(Policy.SIGNED_IN)
@require_POST
def decide_extension(request: HttpRequest, public_id: str) -> HttpResponse:
    """Grants or refuses more time."""
    user = signed_in(request.user)
    asked = extension_for(user, public_id)
    grant = request.POST.get("grant") == "1"

    def act() -> str:
        do_decide_extension(user, asked, grant=grant, answer=request.POST.get("answer", "").strip())
        return f"More time for {asked.job.name} is {'granted' if grant else 'refused'}."

    return act_and_return(request, act, reverse("requests"))


def managed_projects(user: User) -> set[int] | None:
    """Row numbers of the projects that the person manages; None: all, for administrators."""
    return None if user.is_admin else project_ids(user, Role.MANAGER)
