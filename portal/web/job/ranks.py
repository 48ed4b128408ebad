"""The tab of a gang with the step time of each rank over time, and the rank that slows it down."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from portal.access import AccessPolicy
from portal.domain.stragglers import SLOW_RATIO
from portal.models import User
from portal.selectors.jobs.jobs import get_job
from portal.selectors.jobs.ranks import RankRow, rank_overview
from portal.web.job.overview import job_page_context
from portal.web.views import page

COLUMNS = 60
COLUMN_S = 30.0
"""A strip shows 30 minutes, one report about every 30 s."""


@page(AccessPolicy.SIGNED_IN)
def ranks(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    found = get_job(user, public_id)
    context = job_page_context(user, found)
    overview = rank_overview(context["last"]) if context["last"] else None
    shown: dict[str, Any] = {"tab": "ranks", "overview": overview, "strips": []}
    if overview is not None:
        newest = max((each.at_s for row in overview.rows for each in row.times), default=0.0)
        shown["strips"] = [(row, strip(row, overview.median_s, newest)) for row in overview.rows]
    return render(request, "job/ranks.html", context | shown)


@dataclass(frozen=True)
class StripPath:
    """The columns of one colour of a heat strip, as the data of an SVG path in a box of 60 by 10."""

    level: str
    path: str


def strip(row: RankRow, usual_s: float | None, newest_s: float) -> list[StripPath]:
    """Return the step times of a rank by column, the newest at the right; ``w`` is slow."""
    levels: dict[int, str] = {}
    for each in row.times:
        column = COLUMNS - 1 - int((newest_s - each.at_s) / COLUMN_S)
        if column >= 0 and usual_s:
            levels[column] = _level(each.seconds / usual_s)
    paths: dict[str, list[str]] = defaultdict(list)
    for column, level in sorted(levels.items()):
        paths[level].append(f"M{column} 0h.92v10h-.92z")
    return [StripPath(level, "".join(parts)) for level, parts in sorted(paths.items())]


def _level(ratio: float) -> str:
    return "w" if ratio >= SLOW_RATIO else "u1" if ratio < 0.95 else "u2" if ratio < 1.05 else "u3"
