"""Calibration of wait forecasts: intervals from the residuals of past waits against simulated medians.

The residual of a wait ``w`` with simulated median ``m`` is ``log((w + c) / (m + c))``: about a ratio above
``c`` and a difference below, since a wait simulated as zero may still take a while. The interval is the
middle 80 % of these residuals around a new median (split conformal prediction; Papadopoulos et al. 2002).

Until residuals are known, a prior stands for them: most waits are within a factor of 3 of the simulation. It
counts as much as the residuals of ``PRIOR_HOURS`` hours. In the same way the residuals of all jobs stand for those
of a job size until there are enough of that size (``SIZE_HOURS``).

Every forecast counts, however short the wait was: who sees an interval does not know yet how long the wait will be,
and intervals learned only from waits of a minute and more were too wide.

A short memory does not work: jobs submitted together wait alike, so the latest thousand are often one batch,
and unfinished waits are missing. So the memory is long and decays: the weight of a residual halves every week
since its forecast. All forecasts of one hour weigh as much as one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from statistics import NormalDist
from typing import NamedTuple

LOW, HIGH = 0.1, 0.9
ALPHA = 0.2
"""1 - ALPHA is the nominal coverage of an interval."""

SOFT_S = 100.0
"""``c`` in the module docstring."""
HALF_LIFE_HOURS = 7 * 24
MAX_RESIDUALS = 20_000
HOUR_S = 3_600.0

PRIOR_HOURS = 24.0
SIZE_HOURS = 6.0
_POINTS = tuple((i + 0.5) / 9 for i in range(9))
_PRIOR = tuple(NormalDist(0.0, 0.67).inv_cdf(part) for part in _POINTS)
"""Residuals at ``_POINTS`` of their distribution while none is known; they alone give -1.07 to 1.07."""


class WaitInterval(NamedTuple):
    """Seconds from now: nominal 80 % between ``p10_s`` and ``p90_s``."""

    p10_s: float
    p50_s: float
    p90_s: float


def interval_score(low: float, high: float, actual: float) -> float:
    """Return Winkler's interval score in the unit of its arguments: width plus 2 / alpha times the miss."""
    missed = max(0.0, low - actual) + max(0.0, actual - high)
    return high - low + 2.0 / ALPHA * missed


class WaitCalibration:
    """Residuals of waits against simulated medians, of all jobs and by job size."""

    def __init__(self) -> None:
        self._all = _Residuals()
        self._of_size: dict[int, _Residuals] = {}

    def learn(self, milli: int, made_s: float, median_s: float, waited_s: float) -> None:
        """Add a wait of ``waited_s`` from ``made_s``, when the forecast of a job of ``milli`` was made."""
        residual = math.log((max(0.0, waited_s) + SOFT_S) / (median_s + SOFT_S))
        for residuals in (self._all, self._of_size.setdefault(milli, _Residuals())):
            residuals.add(made_s, residual)

    def interval(self, milli: int, median_s: float) -> WaitInterval:
        """Return the interval around a simulated median for a job of ``milli``."""
        of_all = self._all.quantiles(_PRIOR, PRIOR_HOURS, _POINTS)
        of_size = self._of_size.get(milli, _Residuals()).quantiles(of_all, SIZE_HOURS, (LOW, 0.5, HIGH))
        return WaitInterval(*(_wait_s(residual, median_s) for residual in of_size))


def _wait_s(residual: float, median_s: float) -> float:
    return max(0.0, math.exp(residual) * (median_s + SOFT_S) - SOFT_S)


class _Residuals:
    """Residuals in ascending order, with the hour of each one's forecast."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, int]] = deque()
        self._ordered: list[float] = []
        self._hours: list[int] = []  # in the order of ``_ordered``
        self._in_hour: Counter[int] = Counter()
        self._found: tuple[object, tuple[float, ...]] | None = None

    def add(self, made_s: float, residual: float) -> None:
        """Add a residual, and drop the oldest if there are too many."""
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

    def quantiles(
        self, prior: Sequence[float], prior_hours: float, parts: Sequence[float]
    ) -> tuple[float, ...]:
        """Return quantiles of the residuals with ``prior``: equally likely values that weigh ``prior_hours``."""
        if self._found is None or self._found[0] != (prior, parts):
            newest = max(self._in_hour, default=0)
            weight = {
                hour: math.exp2((hour - newest) / HALF_LIFE_HOURS) / number
                for hour, number in self._in_hour.items()
            }
            known = zip(self._ordered, map(weight.__getitem__, self._hours), strict=True)
            weighted = sorted(
                [*known, *((each, prior_hours / len(prior)) for each in prior)], key=itemgetter(0)
            )
            below = list(accumulate(map(itemgetter(1), weighted)))
            last = len(below) - 1
            found = (weighted[min(last, bisect_left(below, part * below[-1]))][0] for part in parts)
            self._found = (prior, parts), tuple(found)
        return self._found[1]
