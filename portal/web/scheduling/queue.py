"""The queue page: a timeline of the next hours with its table, and pending jobs by project."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, QueryDict
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext

from portal.access import AccessPolicy, visible_nodes
from portal.hidden_fields import NameVisibility, visibility_of
from portal.models import Cycle, Job, JobVerdict, NodePool, User
from portal.selectors.nodes.timeline import ReservationBand, TimelineBar, TimelineLane, next_lanes, node_lanes
from portal.selectors.scheduling.forecasts import forecast_accuracy, no_forecast_reason
from portal.selectors.scheduling.queue import (
    NO_POSITION,
    PendingJobs,
    ProjectPoolShare,
    QueueFilter,
    shares_by_project,
    usage_fractions,
    with_job_rows,
)
from portal.selectors.scheduling.settings import settings_sheet
from portal.services.jobs.changes import applicable_suggestion
from portal.web.display.formatting import format_date, time_zone
from portal.web.display.formatting import gpus as gpus_word
from portal.web.display.job_rows import current_verdict, verdict_label
from portal.web.display.timeline_bars import PositionedBar, render_bar_rows, render_bars
from portal.web.views import page, render_live

JOBS_PER_PAGE = 50
NODES_PER_PAGE = 30
SPANS = {"6h": ("6 h", 6, 1), "12h": ("12 h", 12, 2), "3d": (gettext_lazy("3 days"), 72, 12)}
"""Label, hours, and hours between ticks of the axis."""
PAST_FRACTION = 0.15
"""Part of the plot before now."""
NOW_LABEL_PERCENT = 6
"""Part of the axis with the label "now"; it has no tick."""


@dataclass(frozen=True)
class QueuePageQuery:
    """Parameters in the URL; unknown values are ignored."""

    filter: QueueFilter
    span: str
    page: str
    nodes: str

    @classmethod
    def read(cls, query: QueryDict, pools: list[str]) -> QueuePageQuery:
        pool, span = query.get("pool", ""), query.get("span", "12h")
        return cls(
            QueueFilter(
                pool=pool if pool in pools else "",
                mine=query.get("show") == "mine",
                search=query.get("q", "").replace("\0", "").strip()[:100],
            ),
            span if span in SPANS else "12h",
            query.get("page", "1"),
            query.get("nodes", "1"),
        )

    @property
    def query_string(self) -> str:
        """The same as a query string, for the live part."""
        parameters = {
            "pool": self.filter.pool,
            "span": self.span if self.span != "12h" else "",
            "show": "mine" if self.filter.mine else "",
            "q": self.filter.search,
            "page": self.page if self.page != "1" else "",
            "nodes": self.nodes if self.nodes != "1" else "",
        }
        return urlencode({key: word for key, word in parameters.items() if word})


@dataclass
class QueueRow:
    """A row of the tree. ``kind``: project, user or job; ``is_visible``: the reader may see the job."""

    kind: str
    job: Job
    is_visible: bool
    shares: list[ProjectPoolShare] = field(default_factory=list)
    past_usage_share: float | None = None
    mine: bool = False

    @property
    def position(self) -> int | None:
        """Queue position, 1 is next; None: not queued; 0: a preemption for it is in progress."""
        turn = int(getattr(self.job, "turn", NO_POSITION))
        return None if turn >= NO_POSITION else turn

    @property
    def verdict(self) -> JobVerdict | None:
        return current_verdict(self.job)

    @property
    def label(self) -> str:
        if self.job.held:
            return pgettext("state of a job", "Held")
        return _("New") if self.verdict is None else verdict_label(self.verdict.code)

    @property
    def suggestion_json(self) -> str:
        """The suggested change of an own job as JSON; blank if it cannot be made in place."""
        fields = applicable_suggestion(self.job, self.verdict) if self.mine else {}
        return json.dumps(fields) if fields else ""

    @property
    def has_no_forecast(self) -> bool:
        """True when there is no forecast for a known reason."""
        return no_forecast_reason(self.job, self.verdict) is not None

    @property
    def gpus(self) -> str:
        return gpus_word(self.job.total_milli)


@page(AccessPolicy.SIGNED_IN)
def queue(request: HttpRequest, user: User) -> HttpResponse:
    """Render the page in a fixed number of queries."""
    pools = {pool.public_id: pool.name for pool in NodePool.objects.order_by("name")}
    query = QueuePageQuery.read(request.GET, list(pools.values()))
    visibility = visibility_of(user)
    pending = PendingJobs(visibility, query.filter)
    listed = Paginator(pending, JOBS_PER_PAGE).get_page(query.page)
    jobs = with_job_rows(listed.object_list)
    context = {
        "filters": query,
        "pools": list(pools.values()),
        "spans": [(key, name) for key, (name, *_) in SPANS.items()],
        "page": listed,
        "rows": queue_tree(visibility, jobs, pools),
        "requested_milli": pending.requested_milli,
        "measured": forecast_accuracy(),
        "decided_at": Cycle.objects.order_by("-id").values_list("started_at", flat=True).first(),
        "plot": timeline_plot(user, visibility, query),
    }
    return render_live(request, "scheduling/queue/page.html", "scheduling/queue/live.html", context)


def queue_tree(visibility: NameVisibility, jobs: list[Job], pools: dict[str, str]) -> list[QueueRow]:
    """Return the jobs of a page below users and projects, each at the position of its first job."""
    known = {job.project_id: job.project.public_id for job in jobs if visibility.can_name_job(job)}
    shares = shares_by_project(pools, set(known.values()))
    usage_half_life_s = next(
        setting.value for setting in settings_sheet(None).settings if setting.name == "usage_half_life_s"
    )
    past = usage_fractions(float(usage_half_life_s), set(known))
    rows: list[QueueRow] = []
    project: int | None = None
    user: tuple[int, int] | None = None
    for job in jobs:
        visible, mine = visibility.can_name_job(job), job.owner_id == visibility.user.pk
        if job.project_id != project:
            project = job.project_id
            rows.append(QueueRow("project", job, visible, shares=shares.get(job.project.public_id, [])))
        key = (job.project_id, job.owner_id)
        if visible and key != user:
            rows.append(QueueRow("user", job, visible, past_usage_share=past.get(key), mine=mine))
        user = key
        rows.append(QueueRow("job", job, visible, mine=mine))
    return rows


def timeline_plot(user: User, visibility: NameVisibility, query: QueuePageQuery) -> dict[str, Any]:
    """Return lanes with positioned bars, axis ticks, and the page of nodes."""
    _, hours, tick_hours = SPANS[query.span]
    start = timezone.now() - dt.timedelta(hours=hours * PAST_FRACTION)
    span_s = hours * 3600.0
    nodes = visible_nodes(user).order_by("pool__name", "name").only("name", "reachable")
    if query.filter.pool:
        nodes = nodes.filter(pool__name=query.filter.pool)
    page = Paginator(nodes, NODES_PER_PAGE).get_page(query.nodes)
    lanes = [*node_lanes(visibility, list(page)), *next_lanes(visibility, query.filter.pool)]
    if query.filter.mine:
        for lane in lanes:
            lane.bars = [bar for bar in lane.bars if bar.is_own]
    form = "D H:i" if hours > 24 else "H:i"
    zone = time_zone(user.timezone)
    here = start.astimezone(zone)
    tick = here.replace(hour=here.hour // tick_hours * tick_hours, minute=0, second=0, microsecond=0)
    ticks = []
    for __ in range(hours // tick_hours):
        tick += dt.timedelta(hours=tick_hours)
        ticks.append((_percent(tick, start, span_s), format_date(tick, form)))
    return {
        "lanes": [
            (
                lane,
                _row_height_px(lane),
                render_bars(_position_bar(bar, start, span_s) for bar in lane.bars),
                render_bar_rows(lane, zone),
                [(band, css) for band in lane.bands if (css := _band_css(band, start, span_s))],
            )
            for lane in lanes
        ],
        "ticks": [each for each in ticks if not -1 < each[0] - 100 * PAST_FRACTION < NOW_LABEL_PERCENT],
        "first_tick": ticks[0][0],
        "tick_width": 100 * tick_hours / hours,
        "now": 100 * PAST_FRACTION,
        "nodes": page,
        "bars": sum(len(lane.bars) for lane in lanes),
    }


def _row_height_px(lane: TimelineLane) -> int:
    """Return the row height of a lane: enough for a name and a touch target where bars are one row high."""
    if lane.gpus is not None and lane.lines > 3 and all(bar.line_count > 2 for bar in lane.bars):
        return 9
    return 26


def _band_css(band: ReservationBand, start: dt.datetime, span_s: float) -> str:
    """Return the position of a reservation in the plot; empty when it is outside."""
    x, end = (_percent(at, start, span_s) for at in (band.since, band.until))
    return f"x:{x:.2f};w:{end - x:.2f}" if end > x else ""


def _percent(at: dt.datetime, start: dt.datetime, span_s: float) -> float:
    """Return the position of a moment in the plot."""
    return max(0.0, min(100.0, (at - start).total_seconds() / span_s * 100))


def _position_bar(bar: TimelineBar, start: dt.datetime, span_s: float) -> PositionedBar:
    x = _percent(bar.since, start, span_s)
    end = 100.0 if bar.until is None else max(_percent(bar.until, start, span_s), x)
    width = max(0.6, end - x)
    past = max(0.0, min(100.0, (100 * PAST_FRACTION - x) / width * 100))
    fade = None
    if bar.low is not None and bar.high is not None:
        low, high = (_percent(at, start, span_s) for at in (bar.low, bar.high))
        fade = (low, max(0.4, high - low)) if low < 100 else None
    return PositionedBar(bar, x, width, past, fade)
