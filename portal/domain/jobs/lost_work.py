"""How the GPU time of an ended attempt divides into start-up, useful and lost work. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from portal.domain.jobs.end_states import PREEMPTION_REASONS
from portal.domain.jobs.reasons import EndReason


class LossCause(StrEnum):
    """Why an attempt ended other than by completion."""

    FAILURE = "failure"
    PREEMPTION = "preemption"
    NODE = "node"
    STOP = "stop"
    STALL = "stall"


_CAUSES: dict[EndReason, LossCause] = (
    dict.fromkeys(EndReason, LossCause.FAILURE)
    | dict.fromkeys(PREEMPTION_REASONS, LossCause.PREEMPTION)
    | dict.fromkeys(
        (
            EndReason.NODE_REBOOTED,
            EndReason.NODE_FENCED,
            EndReason.CONTAINER_LOST,
            EndReason.GPU_LOST,
            EndReason.MPS_DAEMON_LOST,
            EndReason.RENDEZVOUS_UNREACHABLE,
            EndReason.CLOCK_SKEW,
            EndReason.DISK_FULL,
        ),
        LossCause.NODE,
    )
    | dict.fromkeys(
        (
            EndReason.CANCELLED_BY_USER,
            EndReason.CANCELLED_BY_ADMIN,
            EndReason.SUSPENDED,
            EndReason.DEPENDENCY_FAILED,
            EndReason.OWNER_NOT_PERMITTED,
        ),
        LossCause.STOP,
    )
    | {EndReason.STALLED: LossCause.STALL}
)


def loss_cause(reason: EndReason) -> LossCause:
    return _CAUSES[reason]


class HeldGpu(NamedTuple):
    """A period for which an attempt held ``milli`` of one GPU."""

    milli: int
    started_at: dt.datetime
    ended_at: dt.datetime


class WorkSplit(NamedTuple):
    """GPU-seconds of an attempt."""

    startup: float
    useful: float
    lost: float


def split_work(
    held: Iterable[HeldGpu], running_at: dt.datetime | None, useful_until: dt.datetime | None
) -> WorkSplit:
    """Divide GPU time at ``running_at`` (None: it never ran) and at ``useful_until`` (None: nothing is kept)."""
    startup = useful = lost = 0.0
    for gpu in held:
        share = gpu.milli / 1000
        began = _clamp(running_at or gpu.ended_at, gpu)
        saved = max(began, _clamp(useful_until or began, gpu))
        startup += share * (began - gpu.started_at).total_seconds()
        useful += share * (saved - began).total_seconds()
        lost += share * (gpu.ended_at - saved).total_seconds()
    return WorkSplit(startup, useful, lost)


def _clamp(at: dt.datetime, gpu: HeldGpu) -> dt.datetime:
    return min(max(at, gpu.started_at), gpu.ended_at)
