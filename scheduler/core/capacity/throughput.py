"""Relative throughput of layouts, learned from ended attempts for pending jobs of the same work.

As in ``forecast/durations.py``, results depend only on the latest attempts and change in steps, so that all
processes agree and snapshot rows rarely change. ``portal/domain/throughput.py`` defines which jobs do the
same *work* and how attempts are combined.
"""

from __future__ import annotations

from collections import deque

from portal.domain.throughput import Layout, LayoutSpeed, compare_layouts, median_rates


class ThroughputHistory:
    """Throughput of ended attempts. Job numbers ascend; ``forget_before`` drops the oldest."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[int, str]] = deque()
        self._by_work: dict[str, deque[tuple[int, Layout, float]]] = {}
        self._speeds: dict[str, tuple[LayoutSpeed, ...]] = {}
        self._changed: set[str] = set()  # works to compare again

    @property
    def has_differences(self) -> bool:
        """True if the layouts of some work are known to differ."""
        self._compare()
        return bool(self._speeds)

    def learn(self, job: int, work: str, layout: Layout, rate_per_s: float) -> None:
        """Add an attempt of job number ``job`` that ran at ``rate_per_s`` units per second."""
        self._arrivals.append((job, work))
        self._by_work.setdefault(work, deque()).append((job, layout, rate_per_s))
        self._changed.add(work)

    def forget_before(self, first: int) -> None:
        """Drop attempts of jobs with numbers below ``first``."""
        while self._arrivals and self._arrivals[0][0] < first:
            _, work = self._arrivals.popleft()
            mine = self._by_work[work]
            mine.popleft()
            if not mine:
                del self._by_work[work]
            self._changed.add(work)

    def speeds(self, work: str) -> tuple[LayoutSpeed, ...]:
        """Return the relative speeds of known layouts, fastest first; empty if none are known to differ."""
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
