"""How long jobs run: learned from those that ended, told for those that wait or run.

A job is expected to run like the finished jobs of the same person, template and size; where too few of these
are known, like those of its project and size; then like those of its size; then nothing is known. What is
left of a job that runs already is that of the finished jobs which ran longer than it has so far. Only the
latest finished jobs count, so that habits may change.

What a snapshot says of a job is told in steps (``Steps``): it changes when what is known of its like has
changed by a fifth, or when the job outlived it, and not with each job that ends.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Hashable, Iterator
from typing import NamedTuple

MIN_SAMPLES = 5
"""Fewer finished jobs than this say nothing."""

MAX_SAMPLES = 2_000
"""So many of the latest finished jobs are remembered at each level."""

MIN_DURATION_S = 60.0
STEPS_PER_DOUBLING = 4
"""Durations are told in steps from a minute up, each a fifth longer than the one below."""


class DurationKey(NamedTuple):
    """What of a job is taken as telling how long it runs. ``template`` None is none or unknown."""

    project: str
    user: str
    template: str | None
    size_milli: int


class DurationHistory:
    """What finished jobs tell; all in seconds. Beyond the latest ``most`` jobs of all kinds together it forgets."""

    def __init__(self, max_jobs: int | None = None) -> None:
        self._max_jobs = max_jobs
        self._levels: dict[Hashable, _Level] = {}
        self._kinds: deque[DurationKey] = deque()
        self._learned = 0

    @property
    def learned_count(self) -> int:
        """How many jobs it has learned from so far, those forgotten included."""
        return self._learned

    def learn(self, kind: DurationKey, duration_s: float) -> None:
        """Remembers a job that ran for ``duration_s`` and ended."""
        for key in _keys(kind):
            self._levels.setdefault(key, _Level()).add(self._learned, duration_s)
        self._learned += 1
        if self._max_jobs is not None:
            self._kinds.append(kind)
            if len(self._kinds) > self._max_jobs:
                self._forget(self._learned - len(self._kinds), self._kinds.popleft())

    def _forget(self, number: int, kind: DurationKey) -> None:
        for key in _keys(kind):
            level = self._levels[key]
            level.drop(number)
            if level.empty:
                del self._levels[key]

    def expected_s(self, kind: DurationKey, time_limit_s: float | None = None) -> float | None:
        """How long a job of this kind runs, at the median and at most its limit; None where nothing is known."""
        return self.remaining_s(kind, 0.0, time_limit_s)

    def remaining_s(
        self, kind: DurationKey, ran_s: float, time_limit_s: float | None = None, quantile: float = 0.5
    ) -> float | None:
        """How long a job that ``ran_s`` already still runs: the value below which ``part`` of its like lie.

        A limit caps it, also where nothing is known. ``part`` is from 0 to 1.
        """
        limit_s = None if time_limit_s is None else max(0.0, time_limit_s - ran_s)
        for key in _keys(kind):
            level = self._levels.get(key)
            found_s = level.left_s(ran_s, quantile) if level else None
            if found_s is not None:
                return found_s if limit_s is None else min(found_s, limit_s)
        return limit_s


class QuantizedDurations:
    """How long jobs run in all, told in steps.

    What is told of a job is the prediction made at its start; once it has run longer than that, the one made at the
    end of the first; and so on. Where nothing like it ran so long, it is expected to run as long again.
    """

    def __init__(self, durations: DurationHistory) -> None:
        self._durations = durations
        self._learned = durations.learned_count
        self._steps: dict[DurationKey, list[int]] = {}

    def total_s(self, kind: DurationKey, ran_s: float = 0.0) -> float | None:
        """How long a job of this kind runs that ran so long already, from its start; None where nothing is known.

        More than ``ran_s``, and at least a minute.
        """
        if self._learned != self._durations.learned_count:
            self._learned, self._steps = self._durations.learned_count, {}
        told = self._steps.get(kind)
        if told is None:
            expected_s = self._durations.expected_s(kind)
            told = self._steps[kind] = [] if expected_s is None else [_step(expected_s)]
        if not told:
            return None
        for step in told:
            if (in_all_s := _at(step)) > ran_s:
                return in_all_s
        while (in_all_s := _at(told[-1])) <= ran_s:
            left_s = self._durations.remaining_s(kind, in_all_s)
            told.append(max(told[-1] + 1, _step(in_all_s + (in_all_s if left_s is None else left_s))))
        return in_all_s


def _at(step: int) -> float:
    return MIN_DURATION_S * math.exp2(step / STEPS_PER_DOUBLING)


def _step(seconds: float) -> int:
    """The first step that is no shorter."""
    return max(
        0, math.ceil(STEPS_PER_DOUBLING * math.log2(max(MIN_DURATION_S, seconds) / MIN_DURATION_S) - 1e-9)
    )


def _keys(kind: DurationKey) -> Iterator[Hashable]:
    """The levels, the most telling first."""
    if kind.template is not None:
        yield (kind.user, kind.template, kind.size_milli)
    yield (kind.project, kind.size_milli)
    yield kind.size_milli


class _Level:
    """Durations of one level: sorted to be asked, and in the order they came to forget the oldest."""

    __slots__ = ("_came", "_ordered")

    def __init__(self) -> None:
        self._came: deque[tuple[int, float]] = deque()
        self._ordered: list[float] = []

    @property
    def empty(self) -> bool:
        return not self._came

    def add(self, number: int, duration_s: float) -> None:
        """Remembers a job; numbers ascend."""
        self._came.append((number, duration_s))
        insort(self._ordered, duration_s)
        if len(self._came) > MAX_SAMPLES:
            self._drop_oldest()

    def drop(self, number: int) -> None:
        """Forgets the job of this number, which is the oldest or gone already."""
        if self._came and self._came[0][0] == number:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        del self._ordered[bisect_left(self._ordered, self._came.popleft()[1])]

    def left_s(self, ran_s: float, part: float) -> float | None:
        first = bisect_right(self._ordered, ran_s)
        longer = len(self._ordered) - first
        if longer < MIN_SAMPLES:
            return None
        return self._ordered[first + min(longer - 1, int(part * longer))] - ran_s
