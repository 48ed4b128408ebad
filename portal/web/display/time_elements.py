"""Renders times as elements of a page: a short text, and the exact time in the reader's zone on hover."""

from __future__ import annotations

import datetime as dt

from django.utils.html import conditional_escape, escape, format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from portal.web.display import formatting


def time_element(at: dt.datetime, zone: dt.tzinfo, text: str, habit: str = "") -> SafeString:
    """Render a time; ``habit`` is the attribute with which the page updates the text."""
    machine_readable = at.astimezone(dt.UTC).isoformat(timespec="seconds")
    attribute = f" {habit}" if habit else ""
    title = escape(formatting.full_time(at, zone))
    return SafeString(
        f'<time datetime="{machine_readable}" title="{title}"{attribute}>{conditional_escape(text)}</time>'
    )


def clock_element(at: dt.datetime, zone: dt.tzinfo, now: dt.datetime) -> SafeString:
    """Render the time of day, with the day when it is not today."""
    return time_element(at, zone, formatting.short_time(at, zone, now))


def clock_span_element(low: dt.datetime, high: dt.datetime, zone: dt.tzinfo, now: dt.datetime) -> SafeString:
    """Render two times of day; a common day appears once, and so does a common minute."""
    earlier, later = low.astimezone(zone), high.astimezone(zone)
    is_same_day = earlier.date() == later.date()
    if is_same_day and f"{earlier:%H:%M}" == f"{later:%H:%M}":
        return clock_element(high, zone, now)
    last = time_element(high, zone, f"{later:%H:%M}") if is_same_day else clock_element(high, zone, now)
    return SafeString(f"{clock_element(low, zone, now)} – {last}")


def start_span_element(low: dt.datetime, high: dt.datetime, zone: dt.tzinfo, now: dt.datetime) -> SafeString:
    """Render when a job is expected to start; times that have passed are not shown.

    A start that may already have been is not said to be now: the job waits until the scheduler finds a place.
    """
    if high < now:
        overdue = format_html(_("overdue since {}"), clock_element(high, zone, now))
        return SafeString(f'<span class="fw-warn-t">{overdue}</span>')
    if low > now:
        return clock_span_element(low, high, zone, now)
    return format_html(_("by {}"), clock_element(high, zone, now))
