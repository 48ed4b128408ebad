"""Times of day on pages: two of one day show it once, and two of one minute are one time."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils.html import strip_tags

from portal.web.display.time_elements import clock_span_element

NOW = dt.datetime(2026, 5, 12, 13, 52, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("low_s", "high_s", "shown"),
    [
        (0, 3600, "13:52 – 14:52"),
        (0, 59, "13:52"),
        (59, 60, "13:52 – 13:53"),
        (86_400, 90_000, "tomorrow 13:52 – 14:52"),
    ],
)
def test_a_span_repeats_neither_day_nor_minute(low_s: int, high_s: int, shown: str) -> None:
    low, high = (NOW + dt.timedelta(seconds=each) for each in (low_s, high_s))
    assert strip_tags(clock_span_element(low, high, dt.UTC, NOW)).replace("\xa0", " ") == shown
