"""Renders the bars of the timeline, and the same as rows of a table, in one string each: a page has hundreds."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass

from django.utils import timezone
from django.utils.html import escape
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from portal.selectors.nodes.timeline import TimelineBar, TimelineLane
from portal.web.display.formatting import gpus
from portal.web.display.time_elements import clock_element, start_span_element
from portal.web.display.urls import short_url

_KIND_CLASSES = {"running": "run", "leaving": "run", "reserved": "hold", "predicted": "pred"}


@dataclass(frozen=True)
class PositionedBar:
    """A bar with its position in percent of the plot; ``past_percent`` is its part before now."""

    bar: TimelineBar
    x: float
    width: float
    past_percent: float
    start_interval: tuple[float, float] | None

    @property
    def css(self) -> str:
        return (
            f"x:{self.x:.2f};w:{self.width:.2f};y:{self.bar.line_index};"
            f"n:{self.bar.line_count};s:{self.past_percent:.2f}"
        )

    @property
    def start_interval_css(self) -> str:
        if self.start_interval is None:
            return ""
        return (
            f"x:{self.start_interval[0]:.2f};w:{self.start_interval[1]:.2f};"
            f"y:{self.bar.line_index};n:{self.bar.line_count}"
        )

    @property
    def css_classes(self) -> str:
        word = _KIND_CLASSES[self.bar.kind]
        endless = " open" if self.bar.until is None and word == "run" else ""
        return word + endless + (" mine" if self.bar.is_own else "")


def render_bars(bars: Iterable[PositionedBar]) -> SafeString:
    """Render the bars of a lane."""
    yours, hidden = escape(_("yours")), escape(_("another project"))
    return SafeString("".join(_bar(each, yours, hidden) for each in bars))


def _bar(drawn: PositionedBar, yours: str, hidden: str) -> str:
    bar, interval, position = drawn.bar, "", f'data-css="{drawn.css}"'
    if drawn.start_interval:
        mine = " mine" if bar.is_own else ""
        interval = f'<span class="unc{mine}" aria-hidden="true" data-css="{drawn.start_interval_css}"></span>'
    if bar.job is None:
        title = escape(_("a job of another project, {gpus}").format(gpus=gpus(bar.milli)))
        return (
            f'{interval}<span class="{drawn.css_classes}" {position} title="{title}"><em>{hidden}</em></span>'
        )
    name, project = escape(bar.job.name), escape(bar.job.project)
    href = short_url("job", bar.job.public_id)
    description = f"{name}, {project}, {escape(gpus(bar.milli))}"
    label = f"{name}, {yours if bar.is_own else project}"
    look = f'class="{drawn.css_classes}" href="{href}" {position} title="{description}"'
    return f"{interval}<a {look}><em>{label}</em></a>"


def render_bar_rows(lane: TimelineLane, zone: dt.tzinfo) -> SafeString:
    """Render the bars of a lane as rows: where, job, GPUs, from and until."""
    where: str
    if lane.gpus is None:
        where = escape(_("next in {lane}").format(lane=lane.name))
    else:
        where = f'<span class="fw-mono">{escape(lane.name)}</span>'
    hidden, unknown, now = escape(_("a job of another project")), escape(_("unknown")), timezone.now()
    return SafeString("".join(_row(bar, where, hidden, unknown, zone, now) for bar in lane.bars))


def _row(bar: TimelineBar, where: str, hidden: str, unknown: str, zone: dt.tzinfo, now: dt.datetime) -> str:
    job = hidden
    if bar.job:
        href = short_url("job", bar.job.public_id)
        job = f'<a href="{href}">{escape(bar.job.name)}</a>, {escape(bar.job.project)}'
    begin = clock_element(bar.since, zone, now)
    if bar.low and bar.high:
        begin = start_span_element(bar.low, bar.high, zone, now)
    end = clock_element(bar.until, zone, now) if bar.until else unknown
    cells = (f'<td class="fw-nowrap">{cell}</td>' for cell in (escape(gpus(bar.milli)), begin, end))
    return f'<tr><td class="fw-nowrap">{where}</td><td>{job}</td>{"".join(cells)}</tr>'
