"""Fair share of the user's projects in words: how each share was computed, and how the user ranks in it."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from portal.access import AccessPolicy
from portal.models import Project, User
from portal.selectors.scheduling.fair_share_breakdown import project_breakdowns
from portal.selectors.scheduling.user_shares import list_user_shares
from portal.web.jobs.job.fair_share_breakdown import fair_share_texts
from portal.web.views import page


@page(AccessPolicy.SIGNED_IN)
def fair_share(request: HttpRequest, user: User) -> HttpResponse:
    projects = list(Project.objects.filter(memberships__user=user, archived_at__isnull=True).order_by("name"))
    context = {
        "projects": projects,
        "shares": list_user_shares(user, projects),
        "breakdowns": fair_share_texts(project_breakdowns(projects)),
    }
    return render(request, "reports/fair_share.html", context)
