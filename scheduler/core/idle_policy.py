"""Whether a workspace is idle, and what follows: a countdown begins, ends, or has run out. Pure, on told seconds.

Quiet is what was measured and found quiet, minute by minute without a gap, of the GPUs and of the tool. Metrics may
be lost: where a minute is missing nothing is known, and what is not known is never taken for idleness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

MINUTE_S = 60.0
STALE_AFTER_S = 180.0
"""What was last known longer ago says nothing of now; a minute is written once it is over, a tool asked in each."""
MIN_SAMPLES = 40
"""A minute with fewer samples (one a second) was not measured."""


@dataclass(frozen=True, slots=True)
class GpuUsageMinute:
    """One minute of a workspace's GPUs: the mean use of the busiest; None where one of them was not measured."""

    start_s: float
    samples: int
    use_percent: float | None


@dataclass(frozen=True, slots=True)
class InactivePeriod:
    """Measured minutes without use, one after the other, from ``since_s`` to ``until_s``."""

    since_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class GpuActivity:
    """What is known of the GPUs: the quiet minutes up to the newest, and when one was last used."""

    inactive: InactivePeriod | None = None
    last_active_s: float | None = None

    def extended_by(self, minutes: Iterable[GpuUsageMinute], threshold_percent: float) -> GpuActivity:
        """The same once these minutes (ascending) are known too; those that were counted already are passed over."""
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
    """What is known of the tool: looked at without a gap from ``since_s`` to ``seen_s``, and last used then."""

    since_s: float
    last_polled_s: float
    last_active_s: float | None = None


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """The policy of its pool; ``action`` is off, notify or suspend."""

    action: str
    after_s: float


@dataclass(frozen=True, slots=True)
class WorkspaceIdleState:
    """A running workspace: since when its server is ready, what is known of its use, and how far its countdown is.

    ``kept_until_s``: until then a snooze or a reason keeps it. ``stops_s`` None: no end was told to its people.
    """

    ready_s: float
    gpu: GpuActivity
    tool: ToolActivity | None
    exempt_until_s: float | None = None
    countdown_started: bool = False
    suspend_at_s: float | None = None


class IdleStep(StrEnum):
    """What is to be done."""

    NOTHING = "nothing"
    START_COUNTDOWN = "begin"  # tell its people that it is idle, and when it ends where it does
    CANCEL_COUNTDOWN = "end"  # it is used, kept, or not known to be idle any more
    SUSPEND = "suspend"


def inactive_since_s(workspace: WorkspaceIdleState, now_s: float) -> float | None:
    """Since when GPUs and tool are both known to be quiet; None: one is used, or not known now."""
    quiet, tool = workspace.gpu.inactive, workspace.tool
    if quiet is None or now_s - quiet.until_s > STALE_AFTER_S:
        return None
    if tool is None or now_s - tool.last_polled_s > STALE_AFTER_S:
        return None
    return max(workspace.ready_s, quiet.since_s, tool.since_s, tool.last_active_s or 0.0)


def next_step(workspace: WorkspaceIdleState, rule: IdlePolicy, now_s: float) -> IdleStep:
    """What follows for a workspace now."""
    quiet_s = inactive_since_s(workspace, now_s)
    kept = workspace.exempt_until_s is not None and workspace.exempt_until_s > now_s
    if rule.action == "off" or kept or quiet_s is None or now_s - quiet_s < rule.after_s:
        return IdleStep.CANCEL_COUNTDOWN if workspace.countdown_started else IdleStep.NOTHING
    if not workspace.countdown_started or (workspace.suspend_at_s is None) != (rule.action == "notify"):
        return (
            IdleStep.START_COUNTDOWN
        )  # also when the policy was turned meanwhile: an end is told a whole countdown before
    if workspace.suspend_at_s is not None and workspace.suspend_at_s <= now_s:
        return IdleStep.SUSPEND
    return IdleStep.NOTHING
