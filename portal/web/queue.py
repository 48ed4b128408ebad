"""The queue page: the next hours as a plot with its table, and who comes next, project by project."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from django.core.paginator import Paginator
from django.db.models import Prefetch
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from portal.access import Policy, policy, signed_in, visible_nodes
from portal.models import Cycle, Gpu, Job, NodePool, Standing, User
from portal.selectors.forecasts import measured, why_none
from portal.selectors.policy import policy_sheet
from portal.selectors.queue import (
    LAST,
    QueueFilter,
    Share,
    asked_milli,
    past_parts,
    shares_by_project,
    waiting_for,
    with_rows,
)
from portal.selectors.timeline import Band, Bar, Lane, next_lanes, node_lanes
from portal.visibility import Visibility, visibility_of
from portal.web.job_row import WAIT_WORDS, standing_of
from portal.web.words import gpus as gpus_word
from portal.web.words import zone
from portal.words.reasons import VerdictCode

ROWS = 50
NODES = 30
SPANS = {"6h": ("6 h", 6), "12h": ("12 h", 12), "3d": ("3 days", 72)}
PAST = 0.15
"""The part of the plot that lies behind."""
TICKS = 6
CLOSE = 0.06


@dataclass(frozen=True)
class Asked:
    """What the address asks for; unknown words are ignored."""

    wanted: QueueFilter
    span: str
    page: str
    nodes: str

    @classmethod
    def read(cls, query: QueryDict, pools: list[str]) -> Asked:
        """From the query of the address."""
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
    def address(self) -> str:
        """The same as a query, for the live part."""
        words = {
            "pool": self.wanted.pool,
            "span": self.span if self.span != "12h" else "",
            "show": "mine" if self.wanted.mine else "",
            "q": self.wanted.search,
            "page": self.page if self.page != "1" else "",
            "nodes": self.nodes if self.nodes != "1" else "",
        }
        return urlencode({key: word for key, word in words.items() if word})


@dataclass(frozen=True)
class Drawn:
    """A bar with its place in percent of the plot; ``past`` is how much of it lies behind, percent."""

    bar: Bar
    x: float
    w: float
    past: float
    fade: tuple[float, float] | None

    @property
    def css(self) -> str:
        """Its custom properties."""
        return f"x:{self.x:.2f};w:{self.w:.2f};y:{self.bar.at};n:{self.bar.width};s:{self.past:.2f}"

    @property
    def fade_css(self) -> str:
        """Those of the stretch in which it starts."""
        if self.fade is None:
            return ""
        return f"x:{self.fade[0]:.2f};w:{self.fade[1]:.2f};y:{self.bar.at};n:{self.bar.width}"

    @property
    def look(self) -> str:
        """Its classes."""
        word = {"running": "run", "leaving": "run", "reserved": "hold", "predicted": "pred"}[self.bar.kind]
        endless = " open" if self.bar.until is None and word == "run" else ""
        return word + endless + (" mine" if self.bar.mine else "")


@dataclass
class Row:
    """A line of the tree. ``kind``: project, person or job; ``job`` None where the reader may not see it."""

    kind: str
    job: Job
    seen: bool
    shares: list[Share] = field(default_factory=list)
    past: float | None = None
    mine: bool = False

    @property
    def turn(self) -> int | None:
        """Its turn in the queue, 1 is next; None: it stands in no queue. 0: others make room for it now."""
        turn = int(getattr(self.job, "turn", LAST))
        return None if turn >= LAST else turn

    @property
    def standing(self) -> Standing | None:
        """Its verdict."""
        return standing_of(self.job)

    @property
    def word(self) -> str:
        """Its verdict in a word."""
        if self.job.held:
            return "Held"
        if self.standing is None:
            return "New"
        code = self.standing.code
        if code in set(VerdictCode) and (word := WAIT_WORDS.get(VerdictCode(code))):
            return word
        return code.replace("_", " ").capitalize()

    @property
    def unforeseen(self) -> bool:
        """True when nothing is said of when it starts, and that for a reason."""
        return why_none(self.job, self.standing) is not None

    @property
    def gpus(self) -> str:
        """What it asks for."""
        return gpus_word(self.job.total_milli)


@policy(Policy.SIGNED_IN)
@require_safe
def queue(request: HttpRequest) -> HttpResponse:
    """The whole page, or its live part for htmx; a fixed number of queries."""
    user = signed_in(request.user)
    pools = {pool.public_id: pool.name for pool in NodePool.objects.order_by("name")}
    asked = Asked.read(request.GET, list(pools.values()))
    visibility = visibility_of(user)
    page = Paginator(waiting_for(visibility, asked.wanted), ROWS).get_page(asked.page)
    jobs = with_rows(page.object_list)
    context = {
        "asked": asked,
        "pools": list(pools.values()),
        "spans": [(key, name) for key, (name, _) in SPANS.items()],
        "page": page,
        "rows": tree_of(visibility, jobs, pools),
        "asked_milli": asked_milli(),
        "measured": measured(),
        "decided_at": Cycle.objects.order_by("-id").values_list("started_at", flat=True).first(),
        "plot": plot_of(user, visibility, asked),
    }
    template = "queue/live.html" if request.headers.get("HX-Request") else "queue/page.html"
    return render(request, template, context)


def tree_of(visibility: Visibility, jobs: list[Job], pools: dict[str, str]) -> list[Row]:
    """The jobs of a page below their people and projects, which stand where their first job stands."""
    known = {job.project_id: job.project.public_id for job in jobs if visibility.sees(job)}
    shares = shares_by_project(pools, set(known.values()))
    half_life_s = next(knob.value for knob in policy_sheet(None).knobs if knob.name == "half_life_s")
    past = past_parts(float(half_life_s), set(known))
    rows: list[Row] = []
    project: int | None = None
    person: tuple[int, int] | None = None
    for job in jobs:
        seen, mine = visibility.sees(job), job.owner_id == visibility.user.pk
        if job.project_id != project:
            project = job.project_id
            rows.append(Row("project", job, seen, shares=shares.get(job.project.public_id, [])))
        key = (job.project_id, job.owner_id)
        if seen and key != person:
            rows.append(Row("person", job, seen, past=past.get(key), mine=mine))
        person = key
        rows.append(Row("job", job, seen, mine=mine))
    return rows


def plot_of(user: User, visibility: Visibility, asked: Asked) -> dict[str, Any]:
    """The lanes of the plot with every bar in its place, the ticks of its axis, and the page of nodes."""
    hours = SPANS[asked.span][1]
    start = timezone.now() - dt.timedelta(hours=hours * PAST)
    span_s = hours * 3600.0
    gpus = Prefetch("gpus", queryset=Gpu.objects.filter(present=True).order_by("index"))
    nodes = visible_nodes(user).order_by("pool__name", "name").prefetch_related(gpus)
    if asked.wanted.pool:
        nodes = nodes.filter(pool__name=asked.wanted.pool)
    page = Paginator(nodes, NODES).get_page(asked.nodes)
    lanes = [*node_lanes(visibility, list(page)), *next_lanes(visibility, asked.wanted.pool)]
    if asked.wanted.mine:
        for lane in lanes:
            lane.bars = [bar for bar in lane.bars if bar.mine]
    here = zone(user.timezone)
    form = "%a %H:%M" if hours > 24 else "%H:%M"
    ticks = []
    for at in range(TICKS):
        part = at / TICKS
        if abs(part - PAST) < CLOSE:
            continue  # the word "now" stands there
        ticks.append((100 * part, f"{(start + dt.timedelta(seconds=span_s * part)).astimezone(here):{form}}"))
    return {
        "lanes": [
            (
                lane,
                _line_px(lane),
                [_drawn(bar, start, span_s) for bar in lane.bars],
                [(band, css) for band in lane.bands if (css := _band_css(band, start, span_s))],
            )
            for lane in lanes
        ],
        "ticks": ticks,
        "now": 100 * PAST,
        "nodes": page,
        "bars": sum(len(lane.bars) for lane in lanes),
    }


def _line_px(lane: Lane) -> int:
    """How high a line of a lane is: enough for a name and a finger where bars are one line high."""
    if lane.gpus is not None and lane.lines > 3 and all(bar.width > 2 for bar in lane.bars):
        return 9
    return 26


def _band_css(band: Band, start: dt.datetime, span_s: float) -> str:
    """Where a reserved time stands in the plot; empty when it lies beyond."""
    x, end = (
        max(0.0, min(100.0, (at - start).total_seconds() / span_s * 100)) for at in (band.since, band.until)
    )
    return f"x:{x:.2f};w:{end - x:.2f}" if end > x else ""


def _drawn(bar: Bar, start: dt.datetime, span_s: float) -> Drawn:
    def at(moment: dt.datetime) -> float:
        return max(0.0, min(100.0, (moment - start).total_seconds() / span_s * 100))

    x = at(bar.since)
    end = 100.0 if bar.until is None else max(at(bar.until), x)
    width = max(0.6, end - x)
    past = max(0.0, min(100.0, (100 * PAST - x) / width * 100))
    fade = None
    if bar.low is not None and bar.high is not None and at(bar.low) < 100:
        fade = (at(bar.low), max(0.4, at(bar.high) - at(bar.low)))
    return Drawn(bar, x, width, past, fade)
