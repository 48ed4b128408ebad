"""How far past waits lay from what was played for them, and the interval that follows for the next.

A wait ``w`` is held against the median ``m`` that was played for it by ``log((w + c) / (m + c))``: above ``c`` by
their ratio, below by their difference, since a wait that was played as nothing may still take a while. The interval
is the middle 80 % of these residuals around a new median (split conformal prediction; Papadopoulos et al. 2002).

A short memory does not work: jobs that are submitted together wait alike, so the latest thousand are often one
crowd, and of the waits that go on nobody has learned yet. So the memory is long, and fades: a residual counts half
as much for every week since its forecast was made. A crowd counts more than one job and less than as many: the
forecasts of an hour count together by the root of their number. And a size of job speaks for itself only once its
forecasts come from several hours; until then all jobs from its size up do, in doublings of GPUs, then those from
half its size up, and so on, and before that nobody.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from scheduler.core.model.snapshot import WHOLE_MILLI

LOW, HIGH = 0.1, 0.9
ALPHA = 0.2
"""1 - ALPHA is the nominal coverage of an interval."""
SCORED_FROM_S = 60.0
"""Shorter waits are neither scored nor learned from."""

SOFT_S = 1_000.0
"""``c`` above."""
HALF_LIFE_HOURS = 7 * 24
MAX_RESIDUALS = 20_000
MIN_HOURS = 9
HOUR_S = 3_600.0

DEFAULT_QUANTILES = (math.log(0.2), 0.0, math.log(5.0))
"""The residuals taken while nothing was learned yet."""


class WaitInterval(NamedTuple):
    """Seconds from now: nominal 80 % between ``p10_s`` and ``p90_s``."""

    p10_s: float
    p50_s: float
    p90_s: float


def interval_score(low: float, high: float, actual: float) -> float:
    """Winkler's score, in the unit of its arguments: the width, and 2 / alpha times how far it was missed."""
    missed = max(0.0, low - actual) + max(0.0, actual - high)
    return high - low + 2.0 / ALPHA * missed


class WaitCalibration:
    """How waits came out against the medians played for them, for each size of job and from each size up."""

    def __init__(self) -> None:
        self._of_size: dict[int, _Residuals] = {}
        self._from_size_up: dict[int, _Residuals] = {}  # by doublings of GPUs

    def learn(self, milli: int, made_s: float, median_s: float, waited_s: float) -> None:
        """Remembers that a job of ``milli`` for which a forecast was made at ``made_s`` waited so long from then."""
        residual = math.log((max(0.0, waited_s) + SOFT_S) / (median_s + SOFT_S))
        self._of_size.setdefault(milli, _Residuals()).add(made_s, residual)
        for doublings in _down_from(milli):
            self._from_size_up.setdefault(doublings, _Residuals()).add(made_s, residual)

    def interval(self, milli: int, median_s: float) -> WaitInterval:
        """The interval around a median that was played for a job of ``milli``."""
        low, middle, high = next(
            (found for each in self._alike(milli) if (found := each.quantiles())), DEFAULT_QUANTILES
        )
        return WaitInterval(_wait_s(low, median_s), _wait_s(middle, median_s), _wait_s(high, median_s))

    def _alike(self, milli: int) -> Iterator[_Residuals]:
        """Who speaks for jobs of this size, the most telling first."""
        if milli in self._of_size:
            yield self._of_size[milli]
        for doublings in _down_from(milli):
            if doublings in self._from_size_up:
                yield self._from_size_up[doublings]


def _down_from(milli: int) -> range:
    """The doublings that lead up to a size: 3, 2, 1, 0 for 5 to 8 GPUs, 0 for one GPU or a part of it."""
    gpus = -(-milli // WHOLE_MILLI)
    return range(max(0, gpus - 1).bit_length(), -1, -1)


def _wait_s(residual: float, median_s: float) -> float:
    return max(0.0, math.exp(residual) * (median_s + SOFT_S) - SOFT_S)


class _Residuals:
    """The residuals remembered, ascending, and in which hour the forecast of each was made."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, int]] = deque()
        self._ordered: list[float] = []
        self._hours: list[int] = []  # of the ordered
        self._in_hour: Counter[int] = Counter()
        self._found: tuple[float, ...] | None = None

    def add(self, made_s: float, residual: float) -> None:
        """Remembers one more, and forgets the first where it would be too many."""
        if len(self._arrivals) == MAX_RESIDUALS:
            self._forget(*self._arrivals.popleft())
        hour = int(made_s // HOUR_S)
        self._arrivals.append((residual, hour))
        at = bisect_left(self._ordered, residual)
        self._ordered.insert(at, residual)
        self._hours.insert(at, hour)
        self._in_hour[hour] += 1
        self._found = None

    def _forget(self, residual: float, hour: int) -> None:
        at = self._hours.index(hour, bisect_left(self._ordered, residual))
        del self._ordered[at], self._hours[at]
        self._in_hour[hour] -= 1
        if not self._in_hour[hour]:
            del self._in_hour[hour]

    def quantiles(self) -> tuple[float, ...] | None:
        """The 10th, 50th and 90th percentile by weight; None while they come from too few hours."""
        if len(self._in_hour) < MIN_HOURS:
            return None
        if self._found is None:
            newest = max(self._in_hour)
            weight = {
                hour: math.exp2((hour - newest) / HALF_LIFE_HOURS) / math.sqrt(number)
                for hour, number in self._in_hour.items()
            }
            below = list(accumulate(map(weight.__getitem__, self._hours)))
            last = len(below) - 1
            self._found = tuple(
                self._ordered[min(last, bisect_left(below, part * below[-1]))] for part in (LOW, 0.5, HIGH)
            )
        return self._found
