"""Predictions while a trace is replayed: learned only from jobs that have ended at that simulated time."""

from __future__ import annotations

import heapq
from dataclasses import replace

from scheduler.core.cluster import WHOLE_MILLI, JobId, PendingRow, RunningRow
from scheduler.core.predict import Durations, Kind
from scheduler.replay.clock import Watcher
from scheduler.replay.trace import TracedJob

SHORTEST_LEFT_S = 60.0
"""A job that outlived its prediction gets a new one, at least so far ahead: rows change rarely."""


def kind_of(job: TracedJob) -> Kind:
    """A trace tells no person and no template."""
    return Kind(job.project, job.project, None, job.gpus * WHOLE_MILLI)


class Predicting(Watcher):
    """Writes what is expected of each job into its rows; a row changes only when its prediction has passed."""

    def __init__(self) -> None:
        self.durations = Durations()
        self._had_s: dict[JobId, float] = {}
        self._job: dict[JobId, TracedJob] = {}
        self._passes: list[tuple[float, JobId]] = []

    def arrived(self, job: TracedJob, row: PendingRow, now_s: float) -> PendingRow:
        """With how long a job like this runs."""
        return replace(row, predicted_s=self.durations.expected_s(kind_of(job)))

    def started(self, job: TracedJob, row: RunningRow, had_s: float) -> RunningRow:
        """With when it is expected to end."""
        self._had_s[row.job], self._job[row.job] = had_s, job
        return self._expect(row, row.started_s)

    def ended(self, job: TracedJob, now_s: float) -> None:
        """Its duration is known from now on."""
        self.durations.learn(kind_of(job), job.duration_s)

    def looked(self, running: dict[JobId, RunningRow], now_s: float) -> None:
        """Makes passed predictions anew."""
        while self._passes and self._passes[0][0] <= now_s:
            ends_s, job = heapq.heappop(self._passes)
            row = running.get(job)
            if row is not None and row.predicted_end_s == ends_s:
                running[job] = self._expect(row, now_s)

    def _expect(self, row: RunningRow, now_s: float) -> RunningRow:
        had_s = self._had_s[row.job] + now_s - row.started_s
        left_s = self.durations.left_s(kind_of(self._job[row.job]), had_s)
        if left_s is None:
            left_s = had_s  # nothing like it ran so long: as long again
        ends_s = now_s + max(SHORTEST_LEFT_S, left_s)
        heapq.heappush(self._passes, (ends_s, row.job))
        return replace(row, predicted_end_s=ends_s)
