"""Step times of ranks from their progress reports, the rank that slows a gang down, and the likely cause. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import median, median_low
from typing import NamedTuple

SLOW_RATIO = 1.10
"""A rank is slow if a step takes it this much longer than the median rank."""
MIN_SPAN_S = 120.0
"""Time for which it must be slow."""
_HOT_C, _HOTTER_C, _LESS_BUSY_PERCENT, _LESS_POWER = 80.0, 10.0, 20.0, 0.8


class RankReport(NamedTuple):
    """One progress report of a rank: Unix time, units done, and seconds of its own work (None: not reported)."""

    at_s: float
    units: float
    busy_s: float | None


class StepTime(NamedTuple):
    """Seconds for one unit between two reports; ``at_s`` is the time of the later one."""

    at_s: float
    seconds: float


def step_times(reports: Sequence[RankReport]) -> list[StepTime]:
    """Return the time of a unit in each interval, without waiting for others where the rank reports its own work."""
    found = []
    for before, after in pairwise(reports):
        units = after.units - before.units
        own = before.busy_s is not None and after.busy_s is not None
        spent = (after.busy_s or 0.0) - (before.busy_s or 0.0) if own else after.at_s - before.at_s
        if units > 0 and spent >= 0:
            found.append(StepTime(after.at_s, spent / units))
    return found


class StepParts(NamedTuple):
    """Where a step of a rank goes, in seconds: its own work, and waiting for the other ranks."""

    own_s: float
    wait_s: float

    @property
    def step_s(self) -> float:
        return self.own_s + self.wait_s


def step_parts(reports: Sequence[RankReport]) -> StepParts | None:
    """Return the parts of a step over all reports; None unless the rank reports its own work."""
    known = [each for each in reports if each.busy_s is not None]
    if len(known) < 2:
        return None
    first, last = known[0], known[-1]
    units = last.units - first.units
    if units <= 0:
        return None
    own_s = max(0.0, (last.busy_s or 0.0) - (first.busy_s or 0.0)) / units
    return StepParts(own_s, max(0.0, (last.at_s - first.at_s) / units - own_s))


@dataclass(frozen=True)
class Straggler:
    """A slow rank; ``seconds`` is its median step time, ``median_s`` that of the median of the other ranks."""

    rank: int
    seconds: float
    median_s: float
    since_s: float

    @property
    def slower_percent(self) -> int:
        return round(100 * (self.seconds / self.median_s - 1))

    @property
    def waiting_fraction(self) -> float:
        """The part of a step in which the other ranks wait for it."""
        return max(0.0, 1 - self.median_s / self.seconds)


def find_straggler(times: Mapping[int, Sequence[StepTime]]) -> Straggler | None:
    """Return the slowest rank that was slow in all its latest intervals for ``MIN_SPAN_S``, or None."""
    medians = {rank: median(each.seconds for each in known) for rank, known in times.items() if known}
    found = []
    for rank in medians if len(medians) > 1 else ():
        usual = median_low([seconds for other, seconds in medians.items() if other != rank])
        slow = _latest_slow(times[rank], usual * SLOW_RATIO) if usual > 0 else []
        if slow and slow[0].at_s - slow[-1].at_s >= MIN_SPAN_S:
            found.append(Straggler(rank, median(each.seconds for each in slow), usual, slow[-1].at_s))
    return max(found, key=lambda each: (each.seconds, -each.rank), default=None)


def slow_count(known: Sequence[StepTime], median_s: float) -> int:
    """Return in how many intervals a rank was slow, if the median rank takes ``median_s``."""
    return sum(each.seconds >= median_s * SLOW_RATIO for each in known)


def _latest_slow(known: Sequence[StepTime], limit_s: float) -> list[StepTime]:
    """Return the latest intervals, newest first, up to the last that took less than the limit."""
    return list(takewhile(lambda each: each.seconds >= limit_s, reversed(known)))


class GpuState(NamedTuple):
    """Mean state of the GPUs of a rank over the last minutes; None: unknown."""

    utilisation_percent: float | None
    temperature_c: float | None
    power_watts: float | None
    problem: str = ""


def likely_cause(own: GpuState, others: Sequence[GpuState]) -> str:
    """Return why a rank is probably slow, by what its GPUs do differently from those of the other ranks."""
    if own.problem:
        return own.problem
    usual = GpuState(
        _median([each.utilisation_percent for each in others]),
        _median([each.temperature_c for each in others]),
        _median([each.power_watts for each in others]),
    )
    hot, rest = own.temperature_c, usual.temperature_c
    if hot is not None and rest is not None and hot >= max(_HOT_C, rest + _HOTTER_C):
        return f"Its GPU is at {hot:.0f} °C, the others at {rest:.0f} °C: its clock is probably reduced."
    busy, rest = own.utilisation_percent, usual.utilisation_percent
    if busy is not None and rest is not None and busy <= rest - _LESS_BUSY_PERCENT:
        return f"Its GPU is used {busy:.0f} %, the others {rest:.0f} %: it probably waits for data or for its CPU."
    watts, rest = own.power_watts, usual.power_watts
    if watts is not None and rest is not None and watts <= rest * _LESS_POWER:
        return f"Its GPU draws {watts:.0f} W, the others {rest:.0f} W: its clock is probably reduced."
    return "The metrics of its GPU show no cause."


def _median(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return median(known) if known else None
