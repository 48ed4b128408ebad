"""Decide whether a job is idle, and whether its countdown starts, is cancelled or has run out.

Inactive means measured and found unused, minute by minute without a gap, for GPUs and tool; a training job has no
tool. Metrics can be lost: a missing minute is unknown, and unknown is never taken for idle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

MINUTE_S = 60.0
STALE_AFTER_S = 180.0
"""Older data says nothing about now. A minute is written after its end; a tool is polled every minute."""
MIN_SAMPLES = 40
"""A minute with fewer samples (one per second) counts as not measured."""


@dataclass(frozen=True, slots=True)
class GpuUsageMinute:
    """One minute of a job's GPUs: mean use of the busiest one; None if one of them was not measured."""

    start_s: float
    samples: int
    use_percent: float | None


@dataclass(frozen=True, slots=True)
class InactivePeriod:
    """Consecutive measured minutes without use, from ``since_s`` to ``until_s``."""

    since_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class GpuActivity:
    """What is known of the GPUs: the current inactive period, and the last use."""

    inactive: InactivePeriod | None = None
    last_active_s: float | None = None

    def extended_by(self, minutes: Iterable[GpuUsageMinute], threshold_percent: float) -> GpuActivity:
        """Return the activity with these minutes (ascending) added; counted minutes are skipped."""
        quiet, used_s = self.inactive, self.last_active_s
        for minute in minutes:
            if quiet is not None and minute.start_s < quiet.until_s:
                continue
            end_s = minute.start_s + MINUTE_S
            if minute.samples < MIN_SAMPLES or minute.use_percent is None:
                quiet = None
            elif minute.use_percent >= threshold_percent:
                quiet, used_s = None, max(end_s, used_s or 0.0)
            elif quiet is not None and minute.start_s == quiet.until_s:
                quiet = InactivePeriod(quiet.since_s, end_s)
            else:
                quiet = InactivePeriod(minute.start_s, end_s)
        return GpuActivity(quiet, used_s)


@dataclass(frozen=True, slots=True)
class ToolActivity:
    """Polls of the tool, or of the requests to a service.

    Without a gap from ``since_s`` to ``last_polled_s``, and the last use found.
    """

    since_s: float
    last_polled_s: float
    last_active_s: float | None = None


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """The idle policy of a pool; ``action`` is off, notify or suspend."""

    action: str
    after_s: float


@dataclass(frozen=True, slots=True)
class IdleState:
    """A running job: ready since ``ready_s``, its activity, and its countdown. ``has_tool``: also its tool counts.

    Until ``exempt_until_s`` a snooze or exemption keeps it running. ``suspend_at_s`` None: its users were not
    notified of a suspension.
    """

    ready_s: float
    gpu: GpuActivity
    tool: ToolActivity | None
    exempt_until_s: float | None = None
    countdown_started: bool = False
    suspend_at_s: float | None = None
    has_tool: bool = True


class IdleStep(StrEnum):
    NOTHING = "nothing"
    START_COUNTDOWN = "start_countdown"  # notify its users, also of the suspension time if there is one
    CANCEL_COUNTDOWN = "cancel_countdown"  # it is active, exempt, or not known to be idle any more
    SUSPEND = "suspend"


def inactive_since_s(job: IdleState, now_s: float) -> float | None:
    """Return since when both GPUs and tool are known to be inactive; None if one is active or unknown."""
    quiet, tool = job.gpu.inactive, job.tool
    if quiet is None or now_s - quiet.until_s > STALE_AFTER_S:
        return None
    if not job.has_tool:
        return max(job.ready_s, quiet.since_s)
    if tool is None or now_s - tool.last_polled_s > STALE_AFTER_S:
        return None
    return max(job.ready_s, quiet.since_s, tool.since_s, tool.last_active_s or 0.0)


def next_step(job: IdleState, rule: IdlePolicy, now_s: float) -> IdleStep:
    """Return what to do with a job now."""
    quiet_s = inactive_since_s(job, now_s)
    kept = job.exempt_until_s is not None and job.exempt_until_s > now_s
    if rule.action == "off" or kept or quiet_s is None or now_s - quiet_s < rule.after_s:
        return IdleStep.CANCEL_COUNTDOWN if job.countdown_started else IdleStep.NOTHING
    if not job.countdown_started or (job.suspend_at_s is None) != (rule.action == "notify"):
        return IdleStep.START_COUNTDOWN  # also after a change of policy, so that users get a full countdown
    if job.suspend_at_s is not None and job.suspend_at_s <= now_s:
        return IdleStep.SUSPEND
    return IdleStep.NOTHING
