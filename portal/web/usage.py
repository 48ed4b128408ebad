"""How the GPU time of ended attempts was used: start-up, useful work, and work lost by cause."""

from __future__ import annotations

import datetime as dt

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from portal.access import AccessPolicy
from portal.domain.lost_work import LossCause
from portal.models import User
from portal.selectors.projects.usage import UsageGrouping, work_by
from portal.web.views import page

PERIODS = {"7d": 7, "30d": 30, "90d": 90}
GROUPINGS = {each.value: each for each in UsageGrouping}


@page(AccessPolicy.SIGNED_IN)
def usage(request: HttpRequest, user: User) -> HttpResponse:
    period = request.GET.get("period", "30d")
    period = period if period in PERIODS else "30d"
    by = GROUPINGS.get(request.GET.get("by", ""), UsageGrouping.PROJECT)
    now = timezone.now()
    rows = work_by(user, now - dt.timedelta(days=PERIODS[period]), now, by)
    context = {
        "rows": [(row, [row.lost_by_cause.get(cause.value) for cause in LossCause]) for row in rows],
        "causes": [cause.value for cause in LossCause],
        "period": period,
        "periods": PERIODS,
        "by": by.value,
        "groupings": list(GROUPINGS),
        "useful": sum(row.useful_gpu_hours for row in rows),
        "startup": sum(row.startup_gpu_hours for row in rows),
        "lost": sum(row.lost_gpu_hours for row in rows),
    }
    return render(request, "usage/page.html", context)
