"""On which layouts jobs run faster: learned from attempts that ended, told for those that wait.

Like ``predict.py`` for durations: what is told of a work follows from the latest attempts alone, in steps, so that
every process tells the same and a row of a snapshot rarely changes. Which jobs do the same *work*, how many
attempts say something and how they are put together stands in ``portal/domain/throughput.py``.
"""

from __future__ import annotations

from collections import deque

from portal.domain.throughput import Layout, LayoutSpeed, compare_layouts, median_rates


class ThroughputHistory:
    """What attempts that ended tell. Numbers of jobs ascend; those below the last ``forget`` are forgotten."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[int, str]] = deque()
        self._by_work: dict[str, deque[tuple[int, Layout, float]]] = {}
        self._speeds: dict[str, tuple[LayoutSpeed, ...]] = {}
        self._changed: set[str] = set()  # works of which others are known than were compared

    @property
    def has_differences(self) -> bool:
        """True when the layouts of some work are known to differ."""
        self._compare()
        return bool(self._speeds)

    def learn(self, job: int, work: str, layout: Layout, rate_per_s: float) -> None:
        """Remembers an attempt of the job of this number that ran at ``per_s`` units a second."""
        self._arrivals.append((job, work))
        self._by_work.setdefault(work, deque()).append((job, layout, rate_per_s))
        self._changed.add(work)

    def forget_before(self, first: int) -> None:
        """Forgets the attempts of jobs with numbers below ``first``."""
        while self._arrivals and self._arrivals[0][0] < first:
            _, work = self._arrivals.popleft()
            mine = self._by_work[work]
            mine.popleft()
            if not mine:
                del self._by_work[work]
            self._changed.add(work)

    def speeds(self, work: str) -> tuple[LayoutSpeed, ...]:
        """How fast each known layout is for a work, the fastest first; none where no two are known to differ."""
        self._compare()
        return self._speeds.get(work, ())

    def _compare(self) -> None:
        for work in self._changed:
            latest = reversed(self._by_work.get(work, ()))
            speeds = compare_layouts(median_rates((layout, per_s) for _, layout, per_s in latest))
            self._speeds.pop(work, None)
            if speeds:
                self._speeds[work] = speeds
        self._changed.clear()
