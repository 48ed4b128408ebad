"""Calibration of wait forecasts: intervals from the residuals of past waits against simulated medians.

The residual of a wait ``w`` with simulated median ``m`` is ``log((w + c) / (m + c))``: about a ratio above
``c`` and a difference below, since a wait simulated as zero may still take a while. The interval is the
middle 80 % of these residuals around a new median (split conformal prediction; Papadopoulos et al. 2002).

A short memory does not work: jobs submitted together wait alike, so the latest thousand are often one batch,
and unfinished waits are missing. So the memory is long and decays: the weight of a residual halves every week
since its forecast. A batch counts more than one job but less than all of them: forecasts of the same hour are
weighted by one over the square root of their number. A job size uses its own residuals once they come from
several hours; until then those of all sizes from its own up (in doublings of GPUs), then from half its size
up, and so on.
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
"""``c`` in the module docstring."""
HALF_LIFE_HOURS = 7 * 24
MAX_RESIDUALS = 20_000
MIN_HOURS = 9
HOUR_S = 3_600.0

DEFAULT_QUANTILES = (math.log(0.2), 0.0, math.log(5.0))
"""Residual quantiles used while nothing was learned yet."""


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
    """Residuals of waits against simulated medians, for each job size and from each size up."""

    def __init__(self) -> None:
        self._of_size: dict[int, _Residuals] = {}
        self._from_size_up: dict[int, _Residuals] = {}  # by doublings of GPUs

    def learn(self, milli: int, made_s: float, median_s: float, waited_s: float) -> None:
        """Add a wait of ``waited_s`` from ``made_s``, when the forecast of a job of ``milli`` was made."""
        residual = math.log((max(0.0, waited_s) + SOFT_S) / (median_s + SOFT_S))
        self._of_size.setdefault(milli, _Residuals()).add(made_s, residual)
        for doublings in _down_from(milli):
            self._from_size_up.setdefault(doublings, _Residuals()).add(made_s, residual)

    def interval(self, milli: int, median_s: float) -> WaitInterval:
        """Return the interval around a simulated median for a job of ``milli``."""
        low, middle, high = next(
            (found for each in self._alike(milli) if (found := each.quantiles())), DEFAULT_QUANTILES
        )
        return WaitInterval(_wait_s(low, median_s), _wait_s(middle, median_s), _wait_s(high, median_s))

    def _alike(self, milli: int) -> Iterator[_Residuals]:
        """Yield the residuals to use for jobs of this size, most specific first."""
        if milli in self._of_size:
            yield self._of_size[milli]
        for doublings in _down_from(milli):
            if doublings in self._from_size_up:
                yield self._from_size_up[doublings]


def _down_from(milli: int) -> range:
    """Return the doublings up to a size, descending: 3, 2, 1, 0 for 5 to 8 GPUs, 0 for one GPU or a share."""
    gpus = -(-milli // WHOLE_MILLI)
    return range(max(0, gpus - 1).bit_length(), -1, -1)


def _wait_s(residual: float, median_s: float) -> float:
    return max(0.0, math.exp(residual) * (median_s + SOFT_S) - SOFT_S)


class _Residuals:
    """Residuals in ascending order, with the hour of each one's forecast."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, int]] = deque()
        self._ordered: list[float] = []
        self._hours: list[int] = []  # in the order of ``_ordered``
        self._in_hour: Counter[int] = Counter()
        self._found: tuple[float, ...] | None = None

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

    def quantiles(self) -> tuple[float, ...] | None:
        """Return the weighted 10th, 50th and 90th percentile; None while they come from too few hours."""
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
