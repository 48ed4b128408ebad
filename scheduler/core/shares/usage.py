"""Past usage: its decay, its ratio to the capacity, and the order of a project's users by it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import PoolId, ProjectId, Snapshot, UserId


class UsageInterval(NamedTuple):
    """An interval during which ``milli`` thousandths of a GPU were held."""

    start_s: float
    end_s: float
    milli: int


def decayed_gpu_seconds(intervals: Iterable[UsageInterval], now_s: float, usage_half_life_s: float) -> float:
    """Return GPU-seconds of ``intervals``, with each second weighted by ``0.5 ** (age / usage_half_life_s)``.

    The integral in closed form is ``milli / 1000 * tau * (exp(-a / tau) - exp(-b / tau))`` with
    ``tau = usage_half_life_s / ln 2`` and ages a <= b of an interval's end and start.
    """
    tau_s = usage_half_life_s / math.log(2)
    total = 0.0
    for start_s, end_s, milli in intervals:
        young_s, old_s = max(0.0, now_s - end_s), max(0.0, now_s - start_s)
        total += milli / 1000 * tau_s * (math.exp(-young_s / tau_s) - math.exp(-old_s / tau_s))
    return total


def usage_over_capacity(gpu_seconds: float, capacity_milli: int, usage_half_life_s: float) -> float:
    """Return ``u`` of the fair share: 1.0 is a project that has always held the whole pool."""
    if capacity_milli <= 0:
        return 0.0
    return gpu_seconds / (capacity_milli / 1000 * usage_half_life_s / math.log(2))


def project_usage(
    snapshot: Snapshot,
    pool: PoolId,
    ancestors: Mapping[ProjectId, tuple[ProjectId, ...]],
    capacity_milli: int,
    policy: Policy,
) -> dict[ProjectId, float]:
    """Return ``u`` of each project in ``pool``, with the usage of its descendants."""
    seconds: dict[ProjectId, list[float]] = defaultdict(list)
    for row in snapshot.usage:
        if row.pool == pool:
            for project in ancestors[row.project]:
                seconds[project].append(row.gpu_seconds)
    return {
        project: usage_over_capacity(math.fsum(rows), capacity_milli, policy.usage_half_life_s)
        for project, rows in seconds.items()
    }


class ProjectUsers:
    """The users of one project in one pool, least usage first (Slurm's fair tree with equal shares).

    Fair tree ranks by the level fairness ``LF = shares / usage``; with equal shares that is least usage
    first. A start adds a charge at once, so that many submissions by one user count immediately.
    """

    def __init__(self, gpu_seconds: Mapping[UserId, float], start_charge_s: float) -> None:
        self._gpu_seconds = dict(gpu_seconds)
        self._start_charge_s = start_charge_s

    def rank_key(self, user: UserId) -> tuple[float, UserId]:
        """Return the sort key of a user; smaller goes first."""
        return (self._gpu_seconds.get(user, 0.0), user)

    def charge_start(self, user: UserId, milli: int) -> None:
        """Add the start charge for a start of ``milli``."""
        self._gpu_seconds[user] = self._gpu_seconds.get(user, 0.0) + milli / 1000 * self._start_charge_s
