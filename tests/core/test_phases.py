"""The phases of an attempt: which there are, in which order, and when each ended."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from portal.domain.jobs.phases import PhaseTimes, phase_spans

ZERO = dt.datetime(2026, 5, 12, 13, 0, tzinfo=dt.UTC)
KNOWN = (
    "placed_at",
    "sent_at",
    "pull_started_at",
    "pulled_at",
    "running_at",
    "code_ready_at",
    "ready_at",
    "ended_at",
)


def spans(**given: Any) -> str:
    """As "queued 0-5": minutes of begin and end; "-" for one that lasts, nothing for one to come."""
    times = {
        key: ZERO + dt.timedelta(minutes=value) if key in KNOWN else value for key, value in given.items()
    }
    written = []
    for phase, start, end in phase_spans(PhaseTimes(ZERO, **times)):
        first, last = ("" if at is None else f"{(at - ZERO).seconds // 60}" for at in (start, end))
        written.append(f"{phase} {first}-{last}" if first else str(phase))
    return ", ".join(written)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "queued 0-, reserved, starting, running"),
        ({"placed_at": 5}, "queued 0-5, reserved 5-, starting, running"),
        ({"placed_at": 5, "sent_at": 6}, "queued 0-5, reserved 5-6, starting 6-, running"),
        (
            {"placed_at": 5, "sent_at": 6, "pull_started_at": 7},
            "queued 0-5, reserved 5-7, pulling 7-, starting, running",
        ),
        (
            {"placed_at": 5, "sent_at": 6, "pull_started_at": 7, "pulled_at": 20, "running_at": 21},
            "queued 0-5, reserved 5-7, pulling 7-20, starting 20-21, running 21-",
        ),
        (
            {"placed_at": 5, "sent_at": 6, "running_at": 8, "has_code": True},
            "queued 0-5, reserved 5-6, starting 6-8, staging 8-, running",
        ),
        (
            {
                "placed_at": 5,
                "sent_at": 6,
                "running_at": 8,
                "code_ready_at": 9,
                "ended_at": 30,
                "has_code": True,
            },
            "queued 0-5, reserved 5-6, starting 6-8, staging 8-9, running 9-30",
        ),
        (
            {"placed_at": 5, "sent_at": 6, "running_at": 8, "ready_at": 9, "has_server": True},
            "queued 0-5, reserved 5-6, starting 6-8, server 8-9, running 9-",
        ),
        # it failed while its image was pulled
        (
            {"placed_at": 5, "sent_at": 6, "pull_started_at": 7, "ended_at": 9},
            "queued 0-5, reserved 5-7, pulling 7-9, starting, running",
        ),
        # adopted after a restore: nothing but its run is known
        ({"placed_at": 0, "running_at": 3}, "queued 0-0, reserved 0-3, running 3-"),
        ({"ended_at": 4}, "queued 0-4, reserved, starting, running"),
    ],
)
def test_phases_follow_the_recorded_times(given: dict[str, Any], expected: str) -> None:
    assert spans(**given) == expected
