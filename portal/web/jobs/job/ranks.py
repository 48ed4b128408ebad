"""The tab of a gang with what each rank did over time, and the rank that slows it down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from portal.access import AccessPolicy
from portal.domain.jobs.stragglers import SLOW_RATIO
from portal.domain.states import AttemptState
from portal.errors import NotFound
from portal.models import Attempt, User
from portal.selectors.jobs.checkpoints import last_checkpoint, loss_now
from portal.selectors.jobs.jobs import get_job, job_events
from portal.selectors.jobs.ranks import RankOverview, RankRow, rank_overview
from portal.services.jobs.retries import do_restart_elsewhere
from portal.web.display.formatting import parse_whole_number
from portal.web.display.job_rows import ATTEMPT_ICONS, state_label
from portal.web.jobs.job.overview import dedupe_events, job_page_context
from portal.web.views import action, page, refusals_as_messages

COLUMNS = 60
COLUMN_S = 30.0
"""A strip shows 30 minutes, one report about every 30 s."""
MINUTE_COLUMNS = 2
USE_LEVELS, PERCENT_PER_LEVEL = 5, 20
EVENTS_SHOWN = 12
STRIPS = {
    "steps": gettext_lazy("Step time"),
    "gpu": gettext_lazy("GPU use"),
    "memory": gettext_lazy("Memory"),
}


@dataclass(frozen=True)
class StripPath:
    """The columns of one colour of a heat strip, as the data of an SVG path in a box of 60 by 10."""

    level: str
    path: str


@dataclass(frozen=True)
class RankLine:
    """A rank as a row of the table: its state and its strip."""

    row: RankRow
    icon: str
    label: str
    strip: list[StripPath]
    step_percent: int
    """Its median step in percent of the slowest rank."""


@dataclass(frozen=True)
class NodeRanks:
    """The ranks on one node."""

    node: str
    lines: list[RankLine]

    @property
    def ranks(self) -> str:
        """Its ranks: 0–7, or 0, 2, 4."""
        numbers = [line.row.rank for line in self.lines]
        if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
            return f"{numbers[0]}–{numbers[-1]}"
        return ", ".join(map(str, numbers))


@page(AccessPolicy.SIGNED_IN)
def ranks(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    found = get_job(user, public_id)
    context = job_page_context(user, found)
    last: Attempt | None = context["last"]
    overview = rank_overview(last) if last else None
    by = request.GET.get("by", "")
    if by not in STRIPS:
        by = "steps" if overview and overview.median_s else "gpu"
    shown: dict[str, Any] = {"tab": "ranks", "overview": overview, "by": by, "strip_names": STRIPS.items()}
    if overview is not None and last is not None:
        saved = last_checkpoint(last) if overview.straggler else None
        events = job_events(found).filter(attempt=last).order_by("-id")[: 2 * EVENTS_SHOWN]
        shown |= {
            "nodes": node_ranks(overview, by),
            "until": last.ended_at or timezone.now(),
            "lost_gpu_s": overview.lost_gpu_s(last.ended_at or timezone.now()),
            "loss": loss_now(found, last, saved.at if saved else None) if overview.straggler else None,
            "may_restart": context["may_control"] and last.state == AttemptState.RUNNING,
            "events": dedupe_events(list(events))[:EVENTS_SHOWN],
        }
    return render(request, "jobs/job/ranks.html", context | shown)


@action(AccessPolicy.SIGNED_IN)
def restart_elsewhere(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Restart the job without the node of a rank."""
    job = get_job(user, public_id)
    rank = parse_whole_number(request.POST.get("rank", ""))
    if rank is None:
        raise NotFound(_("There is no such rank."))
    with refusals_as_messages(request):
        node = do_restart_elsewhere(user, job, rank)
        messages.success(request, _("{name} restarts without {node}.").format(name=job.name, node=node.name))
    return redirect("job", public_id)


def node_ranks(overview: RankOverview, by: str) -> list[NodeRanks]:
    """Return the ranks by node, with strips of step times, GPU use or memory."""
    newest_s = max((each.at_s for row in overview.rows for each in row.times), default=0.0)
    minutes = [each.at_s for row in overview.rows for each in row.minutes]
    slowest_s = max((row.median_s or 0.0 for row in overview.rows), default=0.0)

    def line(row: RankRow) -> RankLine:
        state = AttemptState(row.task.state)
        icon, label = ATTEMPT_ICONS.get(state, "stopped"), state_label(state.value)
        if row.is_straggler and state is AttemptState.RUNNING:
            icon, label = "warning", _("Slow")
        strip = (
            step_strip(row, overview.median_s, newest_s)
            if by == "steps"
            else use_strip(row, by, max(minutes, default=0.0))
        )
        percent = round(100 * row.median_s / slowest_s) if row.median_s and slowest_s else 0
        return RankLine(row, icon, label, strip, percent)

    grouped = groupby(sorted(overview.rows, key=lambda row: (row.node, row.rank)), key=lambda row: row.node)
    found = [NodeRanks(node, [line(row) for row in rows]) for node, rows in grouped]
    return sorted(found, key=lambda each: each.lines[0].row.rank)


def step_strip(row: RankRow, usual_s: float | None, newest_s: float) -> list[StripPath]:
    """Return the step times of a rank by column, the newest at the right; ``w`` is slow."""
    levels: dict[int, str] = {}
    for each in row.times:
        column = COLUMNS - 1 - int((newest_s - each.at_s) / COLUMN_S)
        if column >= 0 and usual_s:
            levels[column] = _level(each.seconds / usual_s)
    return _paths(levels.items())


def use_strip(row: RankRow, by: str, newest_s: float) -> list[StripPath]:
    """Return use or memory of the GPUs of a rank by minute, the newest at the right."""
    cells = []
    for each in row.minutes:
        percent = each.memory_percent if by == "memory" else each.utilisation_percent
        column = COLUMNS - MINUTE_COLUMNS * (1 + round((newest_s - each.at_s) / 60))
        if column >= 0 and percent is not None:
            cells.append((column, f"u{min(USE_LEVELS - 1, int(percent / PERCENT_PER_LEVEL))}"))
    return _paths(cells, MINUTE_COLUMNS)


def _paths(cells: Iterable[tuple[int, str]], columns: int = 1) -> list[StripPath]:
    paths: dict[str, list[str]] = defaultdict(list)
    width = columns - 0.08
    for column, level in sorted(cells):
        paths[level].append(f"M{column} 0h{width:.2f}v10h-{width:.2f}z")
    return [StripPath(level, "".join(parts)) for level, parts in sorted(paths.items())]


def _level(ratio: float) -> str:
    return "w" if ratio >= SLOW_RATIO else "u1" if ratio < 0.95 else "u2" if ratio < 1.05 else "u3"
