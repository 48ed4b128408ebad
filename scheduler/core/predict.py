"""How long jobs run: learned from those that ended, told for those that wait or run.

A job is expected to run like the finished jobs of the same person, template and size; where too few of these
are known, like those of its project and size; then like those of its size; then nothing is known. What is
left of a job that runs already is that of the finished jobs which ran longer than it has so far. Only the
latest finished jobs count, so that habits may change.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Hashable, Iterator
from typing import NamedTuple

LEAST_KNOWN = 5
"""Fewer finished jobs than this say nothing."""

MOST_KNOWN = 2_000
"""So many of the latest finished jobs are remembered at each level."""


class Kind(NamedTuple):
    """What of a job is taken as telling how long it runs. ``template`` None is none or unknown."""

    project: str
    user: str
    template: str | None
    size_milli: int


class Durations:
    """What finished jobs tell; all in seconds."""

    def __init__(self) -> None:
        self._levels: dict[Hashable, _Level] = {}

    def learn(self, kind: Kind, duration_s: float) -> None:
        """Remembers a job that ended by itself after ``duration_s`` of work."""
        for key in _keys(kind):
            self._levels.setdefault(key, _Level()).add(duration_s)

    def expected_s(self, kind: Kind, time_limit_s: float | None = None) -> float | None:
        """How long a job of this kind runs, at the median and at most its limit; None where nothing is known."""
        return self.left_s(kind, 0.0, time_limit_s)

    def left_s(
        self, kind: Kind, ran_s: float, time_limit_s: float | None = None, part: float = 0.5
    ) -> float | None:
        """How long a job that ``ran_s`` already still runs: the value below which ``part`` of its like lie.

        A limit caps it, also where nothing is known. ``part`` is from 0 to 1.
        """
        limit_s = None if time_limit_s is None else max(0.0, time_limit_s - ran_s)
        for key in _keys(kind):
            level = self._levels.get(key)
            found_s = level.left_s(ran_s, part) if level else None
            if found_s is not None:
                return found_s if limit_s is None else min(found_s, limit_s)
        return limit_s


def _keys(kind: Kind) -> Iterator[Hashable]:
    """The levels, the most telling first."""
    if kind.template is not None:
        yield (kind.user, kind.template, kind.size_milli)
    yield (kind.project, kind.size_milli)
    yield kind.size_milli


class _Level:
    """Durations of one level: sorted to be asked, and in the order they came to forget the oldest."""

    __slots__ = ("_came", "_ordered")

    def __init__(self) -> None:
        self._came: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, duration_s: float) -> None:
        self._came.append(duration_s)
        insort(self._ordered, duration_s)
        if len(self._came) > MOST_KNOWN:
            del self._ordered[bisect_left(self._ordered, self._came.popleft())]

    def left_s(self, ran_s: float, part: float) -> float | None:
        first = bisect_right(self._ordered, ran_s)
        longer = len(self._ordered) - first
        if longer < LEAST_KNOWN:
            return None
        return self._ordered[first + min(longer - 1, int(part * longer))] - ran_s
