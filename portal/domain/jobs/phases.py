"""The phases of an attempt from its queue to its run, from the times that are recorded of it."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Phase(StrEnum):
    QUEUED = "queued"
    RESERVED = "reserved"  # its GPUs are allocated, and its nodes have not begun
    PULLING = "pulling"  # an image
    STARTING = "starting"  # containers, and the checks of a gang before its ranks start
    STAGING = "staging"  # its container checks out the code
    SERVER = "server"  # of a workspace or replica, until it responds
    RUNNING = "running"


class PhaseSpan(NamedTuple):
    """A phase that was reached, or is to come (``started_at`` is None)."""

    phase: Phase
    started_at: dt.datetime | None
    ended_at: dt.datetime | None


@dataclass(frozen=True)
class PhaseTimes:
    """What is recorded; ``has_code`` and ``has_server`` say which phases the job has."""

    queued_at: dt.datetime
    placed_at: dt.datetime | None = None
    sent_at: dt.datetime | None = None
    pull_started_at: dt.datetime | None = None
    pulled_at: dt.datetime | None = None
    running_at: dt.datetime | None = None
    code_ready_at: dt.datetime | None = None
    ready_at: dt.datetime | None = None
    ended_at: dt.datetime | None = None
    has_code: bool = False
    has_server: bool = False


def phase_spans(times: PhaseTimes) -> list[PhaseSpan]:
    """Return the phases in their order; the last that was reached lasts until the end, those after it never came."""
    starts: list[tuple[Phase, dt.datetime | None]] = [
        (Phase.QUEUED, times.queued_at),
        (Phase.RESERVED, times.placed_at),
    ]
    if times.pull_started_at is not None:
        starts.append((Phase.PULLING, times.pull_started_at))
        starts.append((Phase.STARTING, times.pulled_at))
    else:
        starts.append((Phase.STARTING, times.sent_at))
    begin = times.running_at
    if times.has_code:
        starts.append((Phase.STAGING, begin))
        begin = times.code_ready_at
    if times.has_server:
        starts.append((Phase.SERVER, begin))
        begin = times.ready_at
    starts.append((Phase.RUNNING, begin))
    found: list[PhaseSpan] = []
    following: dt.datetime | None = None
    for phase, start in reversed(starts):
        found.append(PhaseSpan(phase, start, None if start is None else following or times.ended_at))
        following = start or following
    # a phase without a time of its own was passed when a later one began
    return [span for span in reversed(found) if span.started_at is not None or not _passed(span, starts)]


def _passed(span: PhaseSpan, starts: list[tuple[Phase, dt.datetime | None]]) -> bool:
    later = [phase for phase, _ in starts].index(span.phase) + 1
    return any(start is not None for _, start in starts[later:])
