"""Run times of jobs, learned from ended jobs, for pending and running ones.

A job is expected to run like finished jobs of the same user, template and size; with too few of these, like
those of its project and size; then like those of its size; else its duration is unknown. The remaining time
of a running job is that of finished jobs that ran longer than it has. Only the latest finished jobs count, so
that changes show.

Predictions are used only while they have proven better than none (``DurationHistory.is_informative``): where
durations are unrelated to user, template and size, ordering by them would only delay jobs.

Snapshots use steps (``QuantizedDurations``): a value changes when the prediction changes by a step (a fifth),
or when the job has outlived it, not with every ended job.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

MIN_SAMPLES = 5
"""Fewer finished jobs than this give no prediction."""

MAX_SAMPLES = 2_000
"""Number of latest finished jobs kept per level, and of latest predictions that are tested."""

TEST_INTERVAL_JOBS = 50
"""The comparison is made after this many ended jobs; a change concerns every row of a snapshot."""

MIN_STANDARD_ERRORS = 3.0
"""By how many standard errors predictions must have been better than one constant."""

MIN_DURATION_S = 60.0
STEPS_PER_DOUBLING = 4
"""Quantized durations start at a minute; each step is a fifth longer than the one below."""


class DurationKey(NamedTuple):
    """The properties of a job that predict its duration. ``template`` None is none or unknown."""

    project: str
    user: str
    template: str | None
    size_milli: int


class DurationHistory:
    """Durations of finished jobs in seconds; of the latest ``max_jobs`` jobs in total."""

    def __init__(self, max_jobs: int | None = None) -> None:
        self._max_jobs = max_jobs
        self._levels: dict[Hashable, _Level] = {}
        self._kinds: deque[DurationKey] = deque()
        self.learned_count = 0
        """Number of jobs learned from, including forgotten ones."""
        self.is_informative = False
        """Whether the latest predictions had a smaller mean ``|log(predicted / actual)|`` than the median of all."""
        self._all = _Level()
        self._gains: deque[float] = deque(maxlen=MAX_SAMPLES)

    def learn(self, kind: DurationKey, duration_s: float) -> None:
        """Add a job that ran for ``duration_s`` and ended."""
        self._test(kind, duration_s)
        self._all.add(self.learned_count, duration_s)
        for key in _keys(kind):
            self._levels.setdefault(key, _Level()).add(self.learned_count, duration_s)
        self.learned_count += 1
        if self._max_jobs is not None:
            self._kinds.append(kind)
            if len(self._kinds) > self._max_jobs:
                self._forget(self.learned_count - len(self._kinds), self._kinds.popleft())

    def _test(self, kind: DurationKey, duration_s: float) -> None:
        """Compare the prediction for a job that ended with its duration."""
        expected_s, medians_s = self.expected_s(kind), self._all.left_s(0.0, (0.5,))
        if expected_s is None or not medians_s:
            return
        actual, predicted, median = map(
            math.log, (max(MIN_DURATION_S, each) for each in (duration_s, expected_s, medians_s[0]))
        )
        self._gains.append(abs(median - actual) - abs(predicted - actual))
        count = len(self._gains)
        if self.learned_count % TEST_INTERVAL_JOBS == 0 and count >= TEST_INTERVAL_JOBS:
            mean = fmean(self._gains)
            variance = max(0.0, fmean(gain * gain for gain in self._gains) - mean * mean)
            self.is_informative = mean > MIN_STANDARD_ERRORS * math.sqrt(variance / count)

    def _forget(self, number: int, kind: DurationKey) -> None:
        for key in _keys(kind):
            level = self._levels[key]
            level.drop(number)
            if not level.arrivals:
                del self._levels[key]

    def expected_s(self, kind: DurationKey) -> float | None:
        """Return the median duration of such jobs; None if unknown."""
        return self.remaining_s(kind, 0.0)

    def remaining_s(
        self, kind: DurationKey, ran_s: float, time_limit_s: float | None = None, quantile: float = 0.5
    ) -> float | None:
        """Return the ``quantile`` (0 to 1) of the remaining time of a job that has run for ``ran_s``.

        The time limit caps it, and is returned if the duration is unknown.
        """
        return self.remaining_quantiles_s(kind, ran_s, time_limit_s, (quantile,))[0]

    def remaining_quantiles_s(
        self, kind: DurationKey, ran_s: float, time_limit_s: float | None, quantiles: Sequence[float]
    ) -> Sequence[float | None]:
        """Return ``remaining_s`` for each quantile."""
        limit_s = None if time_limit_s is None else max(0.0, time_limit_s - ran_s)
        for key in _keys(kind):
            level = self._levels.get(key)
            found_s = level.left_s(ran_s, quantiles) if level else ()
            if found_s:
                return found_s if limit_s is None else [min(each_s, limit_s) for each_s in found_s]
        return [limit_s] * len(quantiles)


class QuantizedDurations:
    """Total durations of jobs, in steps.

    The value is the prediction made at the start; once the job has run longer, the one made at the end of the
    first; and so on. If no similar job ran that long, it is expected to run as long again.
    """

    def __init__(self, durations: DurationHistory) -> None:
        self._durations = durations
        self._learned = durations.learned_count
        self._steps: dict[DurationKey, list[int]] = {}

    def total_s(self, kind: DurationKey, ran_s: float = 0.0) -> float | None:
        """Return the total duration of a job that has run for ``ran_s``; None if unknown.

        The result is more than ``ran_s`` and at least a minute.
        """
        if self._learned != self._durations.learned_count:
            self._learned, self._steps = self._durations.learned_count, {}
        reported = self._steps.get(kind)
        if reported is None:
            expected_s = self._durations.expected_s(kind)
            reported = self._steps[kind] = [] if expected_s is None else [_step(expected_s)]
        if not reported:
            return None
        for step in reported:
            if (in_all_s := _at(step)) > ran_s:
                return in_all_s
        while (in_all_s := _at(reported[-1])) <= ran_s:
            left_s = self._durations.remaining_s(kind, in_all_s)
            reported.append(max(reported[-1] + 1, _step(in_all_s + (in_all_s if left_s is None else left_s))))
        return in_all_s


def _at(step: int) -> float:
    return MIN_DURATION_S * math.exp2(step / STEPS_PER_DOUBLING)


def _step(seconds: float) -> int:
    """Return the first step that is not shorter."""
    return max(
        0, math.ceil(STEPS_PER_DOUBLING * math.log2(max(MIN_DURATION_S, seconds) / MIN_DURATION_S) - 1e-9)
    )


def _keys(kind: DurationKey) -> Iterator[Hashable]:
    """Yield the keys of the levels, most specific first."""
    if kind.template is not None:
        yield (kind.user, kind.template, kind.size_milli)
    yield (kind.project, kind.size_milli)
    yield kind.size_milli


class _Level:
    """Durations of one level: sorted for lookup, and in order of arrival to drop the oldest."""

    __slots__ = ("_ordered", "arrivals")

    def __init__(self) -> None:
        self.arrivals: deque[tuple[int, float]] = deque()
        self._ordered: list[float] = []

    def add(self, number: int, duration_s: float) -> None:
        """Add a job; numbers ascend."""
        self.arrivals.append((number, duration_s))
        insort(self._ordered, duration_s)
        if len(self.arrivals) > MAX_SAMPLES:
            self._drop_oldest()

    def drop(self, number: int) -> None:
        """Drop the job of this number if it is the oldest; otherwise it is gone already."""
        if self.arrivals and self.arrivals[0][0] == number:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        del self._ordered[bisect_left(self._ordered, self.arrivals.popleft()[1])]

    def left_s(self, ran_s: float, parts: Sequence[float]) -> list[float]:
        """Return quantiles of the remaining time; none if too few jobs ran longer than ``ran_s``."""
        first = bisect_right(self._ordered, ran_s)
        longer = len(self._ordered) - first
        if longer < MIN_SAMPLES:
            return []
        return [self._ordered[first + min(longer - 1, int(part * longer))] - ran_s for part in parts]
