"""Forecasts during a trace replay: made at submit, scored at the start against a baseline.

Each job that does not start in the decision after its submit is scored once, with the Winkler score. The baseline is
p10 to p90 of the last 500 scored waits of the same size. The same figures of jobs that waited at least a minute are
returned beside them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bench.replay.prediction_hook import kind_of
from scheduler.core.forecast.calibration import (
    HIGH,
    LOW,
    WaitCalibration,
    WaitInterval,
    interval_score,
)
from scheduler.core.forecast.durations import DurationHistory
from scheduler.core.forecast.start_times import QueueForecast
from scheduler.core.model.plan import Plan
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import WHOLE_MILLI, JobId, PendingRow, RunningRow, Snapshot
from scheduler.replay.simulator import POOL, SimulationHook
from scheduler.replay.trace import TraceJob

BASELINE_WAITS = 500
MINUTE_S = 60.0


class ForecastScore(NamedTuple):
    """How a forecast compares with the start; scores are Winkler's, in seconds."""

    score_s: float
    baseline_score_s: float
    covered: bool
    width_s: float
    waited_s: float


class ForecastHook(SimulationHook):
    """Forecasts each job that does not start at once, and forwards all calls to ``inner``."""

    def __init__(self, inner: SimulationHook, policy: Policy) -> None:
        self._inner = inner
        self._policy = policy
        self._durations = DurationHistory()
        self._calibration = WaitCalibration()
        self._jobs: dict[JobId, TraceJob] = {}
        self._new: list[JobId] = []
        self._ran_s: dict[JobId, float] = {}
        self._forecasts: dict[JobId, tuple[float, float, WaitInterval, tuple[float, float]]] = {}
        self._waits: dict[int, deque[float]] = {}
        self._scores: list[ForecastScore] = []

    def on_submit(self, job: TraceJob, row: PendingRow, now_s: float) -> PendingRow:
        """Mark the job for a forecast after the next decision."""
        self._jobs[row.job] = job
        self._new.append(row.job)
        return self._inner.on_submit(job, row, now_s)

    def on_decision(self, snapshot: Snapshot, plan: Plan) -> None:
        """Forecast new jobs that are pending."""
        self._inner.on_decision(snapshot, plan)
        started = {start.job for start in plan.starts}
        waiting = [job for job in self._new if job not in started]
        self._new = []
        if waiting:
            running = tuple(
                replace(row, submitted_s=self._jobs[row.job].submitted_s) for row in snapshot.running
            )
            snapshot = replace(snapshot, running=running)
            outlook = QueueForecast(snapshot, plan, POOL, self._durations, self._policy, self._ran_s)
            for job in waiting:
                median_s = outlook.median_starts_s([job]).get(job, math.inf)
                if median_s == math.inf:
                    continue
                gpus = self._jobs[job].gpus
                interval = self._calibration.interval(gpus * WHOLE_MILLI, median_s)
                self._forecasts[job] = (snapshot.now_s, median_s, interval, self._baseline(gpus))

    def on_start(self, job: TraceJob, row: RunningRow, ran_s: float) -> RunningRow:
        """Score the forecast at the first start."""
        waited_s = row.started_s - job.submitted_s
        if ran_s == 0.0 and (forecast := self._forecasts.pop(row.job, None)):
            made_s, median_s, (low_s, _, high_s), baseline = forecast
            covered = low_s <= waited_s <= high_s
            ours, theirs = interval_score(low_s, high_s, waited_s), interval_score(*baseline, waited_s)
            self._scores.append(ForecastScore(ours, theirs, covered, high_s - low_s, waited_s))
            self._calibration.learn(job.gpus * WHOLE_MILLI, made_s, median_s, waited_s)
            self._waits.setdefault(job.gpus, deque(maxlen=BASELINE_WAITS)).append(waited_s)
        self._ran_s[row.job] = ran_s
        return self._inner.on_start(job, row, ran_s)

    def on_preempt(self, job: TraceJob, row: RunningRow, ran_s: float) -> None:
        self._ran_s[row.job] = ran_s
        self._inner.on_preempt(job, row, ran_s)

    def on_end(self, job: TraceJob, now_s: float) -> None:
        """Learn the duration."""
        self._durations.learn(kind_of(job), job.duration_s)
        self._inner.on_end(job, now_s)

    def before_decision(self, running: dict[JobId, RunningRow], now_s: float) -> None:
        self._inner.before_decision(running, now_s)

    def _baseline(self, gpus: int) -> tuple[float, float]:
        waits = sorted(self._waits.get(gpus, ()))
        if not waits:
            return (0.0, 0.0)
        low, high = (waits[min(len(waits) - 1, int(part * len(waits)))] for part in (LOW, HIGH))
        return (low, high)

    def summary(self) -> dict[str, Any]:
        """Return the scores; None when none was scored."""
        waited_a_minute = [score for score in self._scores if score.waited_s >= MINUTE_S]
        return _summarize(self._scores) | {"waited_a_minute": _summarize(waited_a_minute)}


def _summarize(scores: Sequence[ForecastScore]) -> dict[str, Any]:
    scored = len(scores)
    if not scored:
        return {"forecasts": 0, "coverage": None, "winkler": None, "baseline_winkler": None}
    return {
        "forecasts": scored,
        "coverage": round(sum(score.covered for score in scores) / scored, 4),
        "winkler": round(math.fsum(score.score_s for score in scores) / scored, 1),
        "baseline_winkler": round(math.fsum(score.baseline_score_s for score in scores) / scored, 1),
        "median_width_s": round(sorted(score.width_s for score in scores)[scored // 2], 1),
        "median_wait_s": round(sorted(score.waited_s for score in scores)[scored // 2], 1),
    }
