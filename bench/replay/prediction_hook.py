"""Duration predictions during a trace replay, learned only from jobs ended at the simulated time."""

from __future__ import annotations

import heapq
from dataclasses import replace

from scheduler.core.forecast.durations import DurationHistory, DurationKey
from scheduler.core.model.snapshot import WHOLE_MILLI, JobId, PendingRow, RunningRow
from scheduler.replay.simulator import SimulationHook
from scheduler.replay.trace import TraceJob

MIN_REMAINING_S = 60.0
"""A job that exceeded its prediction gets a new one at least this far ahead, so that rows change rarely."""


def kind_of(job: TraceJob) -> DurationKey:
    """Return the duration key of a job; a trace has no users or templates."""
    return DurationKey(job.project, job.project, None, job.gpus * WHOLE_MILLI)


class PredictionHook(SimulationHook):
    """Sets predictions in snapshot rows; a running row changes only when its prediction has passed."""

    def __init__(self) -> None:
        self.durations = DurationHistory()
        self._ran_s: dict[JobId, float] = {}
        self._jobs: dict[JobId, TraceJob] = {}
        self._expiring: list[tuple[float, JobId]] = []

    def on_submit(self, job: TraceJob, row: PendingRow, now_s: float) -> PendingRow:
        """Set the predicted duration."""
        if not self.durations.is_informative:
            return row
        return replace(row, predicted_duration_s=self.durations.expected_s(kind_of(job)))

    def on_start(self, job: TraceJob, row: RunningRow, ran_s: float) -> RunningRow:
        """Set the predicted end."""
        self._ran_s[row.job], self._jobs[row.job] = ran_s, job
        return self._predict(row, row.started_s)

    def on_end(self, job: TraceJob, now_s: float) -> None:
        """Learn the duration."""
        self.durations.learn(kind_of(job), job.duration_s)

    def before_decision(self, running: dict[JobId, RunningRow], now_s: float) -> None:
        """Renew predictions that have passed."""
        while self._expiring and self._expiring[0][0] <= now_s:
            ends_s, job = heapq.heappop(self._expiring)
            row = running.get(job)
            if row is not None and row.predicted_end_s == ends_s:
                running[job] = self._predict(row, now_s)

    def _predict(self, row: RunningRow, now_s: float) -> RunningRow:
        if not self.durations.is_informative:
            return replace(row, predicted_end_s=None)
        had_s = self._ran_s[row.job] + now_s - row.started_s
        left_s = self.durations.remaining_s(kind_of(self._jobs[row.job]), had_s)
        if left_s is None:
            left_s = had_s  # no similar job ran that long: assume as long again
        ends_s = now_s + max(MIN_REMAINING_S, left_s)
        heapq.heappush(self._expiring, (ends_s, row.job))
        return replace(row, predicted_end_s=ends_s)
