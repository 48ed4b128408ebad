"""Forecasts start times by simulation: a periodic pass for pending jobs, and single requests before submission.

The pass runs beside the cycle at low priority within a time budget. Each pool is simulated as a whole, the one
simulated longest ago first. It writes only intervals.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import NamedTuple

from django.db.models import F

from portal.domain.jobs.reasons import (
    FORECAST_BEYOND_HORIZON,
    FORECAST_FINDS_NO_START,
    FORECAST_WITHOUT_GPUS,
    NO_FORECAST_REASONS,
)
from portal.models import ClusterSettings, Forecast
from portal.models.jobs.jobs import total_milli
from scheduler.core.decide import decide
from scheduler.core.forecast.calibration import MAX_RESIDUALS, WaitCalibration, WaitInterval
from scheduler.core.forecast.queue_simulation import SIMULATION_RUNS
from scheduler.core.forecast.start_times import QueueForecast, has_forecast, queue_pool_of
from scheduler.core.model.plan import RequestPreview, StartInterval
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import JobId, PendingRow, PoolId, Snapshot
from scheduler.forecast.duration_estimates import DurationEstimator
from scheduler.forecast.forecast_store import ForecastResult, NoForecast, save_intervals
from scheduler.snapshot.decision_input import DecisionInput, take_snapshot
from scheduler.snapshot.invalid_rows import use_valid_rows

TIME_BUDGET_S = 20.0
"""No further pool is started after this time; skipped pools come first in the next pass."""
MAX_REQUEST_STEPS = 6_000
"""Steps of each run for a request. The pass continues further."""
MAX_REQUEST_JOB_RUNS = 4_200
MIN_REQUEST_RUNS = 3
"""A user waits for the forecast of a request, so that it has fewer runs when there are many jobs. The ends of many
jobs differ less between runs."""
CALIBRATION_MAX_AGE_S = 60.0

_cached_calibration: tuple[float, WaitCalibration] | None = None


class ForecastState:
    """State kept between passes. Losing it costs a slow pass."""

    def __init__(self) -> None:
        self.duration_estimator = DurationEstimator()
        self.pass_count = 0
        self.simulated_in_pass: dict[PoolId, int] = {}
        """The pass in which each pool was last simulated."""


def run_forecast_pass(time_budget_s: float = TIME_BUDGET_S, state: ForecastState | None = None) -> int:
    """Write the start intervals that are new or changed and return their number.

    Without ``state`` everything is learned again.
    """
    deadline_s = time.monotonic() + time_budget_s
    inputs = take_snapshot(ClusterSettings.objects.get_or_create(id=1)[0])
    if inputs.recovery_mode or not inputs.pending_row_ids:
        return 0
    return save_intervals(_forecast_intervals(inputs, state or ForecastState(), deadline_s))


def _forecast_intervals(
    inputs: DecisionInput, state: ForecastState, deadline_s: float
) -> dict[JobId, ForecastResult]:
    policy, expectations = inputs.policy, state.duration_estimator
    plan, inputs = use_valid_rows(
        replace(inputs, snapshot=expectations.fill(inputs.snapshot, policy)),
        lambda snapshot: decide(snapshot, policy),
    )
    snapshot = inputs.snapshot
    verdicts = {verdict.job: verdict for verdict in plan.verdicts}
    calibration = load_calibration()
    found: dict[JobId, ForecastResult] = {
        verdict.job: NoForecast.NOT_APPLICABLE for verdict in inputs.excluded
    }
    waiting: dict[PoolId, list[PendingRow]] = {}
    for row in snapshot.pending:
        if (verdict := verdicts.get(row.job)) is None or row.job not in inputs.pending_row_ids:
            continue
        if not has_forecast(row, verdict):
            if row.total_milli:
                found[row.job] = NoForecast.NOT_APPLICABLE
        elif (pool := queue_pool_of(row, verdict)) is not None:
            waiting.setdefault(pool, []).append(row)
    state.pass_count += 1
    state.simulated_in_pass = {pool: state.simulated_in_pass.get(pool, 0) for pool in waiting}
    for index, pool in enumerate(sorted(waiting, key=lambda pool: (state.simulated_in_pass[pool], pool))):
        if index and time.monotonic() > deadline_s:
            break
        state.simulated_in_pass[pool] = state.pass_count
        outlook = QueueForecast(
            snapshot, plan, pool, expectations.durations, policy, template_of=expectations.template_of
        )
        medians_s = outlook.median_starts_s(row.job for row in waiting[pool])
        for row in waiting[pool]:
            median_s = medians_s.get(row.job)
            if median_s is None:
                found[row.job] = NoForecast.BEYOND_HORIZON
            elif median_s == math.inf:
                found[row.job] = NoForecast.NO_START_FOUND
            else:
                interval = calibration.interval(row.total_milli, median_s)
                found[row.job] = absolute_interval(
                    snapshot.now_s, interval, median_s, row.not_before_s or 0.0
                )
    return found


def absolute_interval(
    now_s: float, interval: WaitInterval, median_s: float, not_before_s: float
) -> StartInterval:
    """Return the interval as times, none before ``not_before_s``, with the uncorrected simulated median."""
    p10_s, p50_s, p90_s = (
        max(not_before_s, now_s + s) for s in (interval.p10_s, interval.p50_s, interval.p90_s)
    )
    return StartInterval(p10_s, p50_s, p90_s, simulated_s=median_s)


def load_calibration() -> WaitCalibration:
    """Return the calibration from the first forecasts of jobs that have started."""
    rows = (
        Forecast.objects.filter(is_first=True, covered__isnull=False, simulated_s__isnull=False)
        .order_by("-started_at")
        .values_list(
            total_milli("job__"),
            "made_at",
            "simulated_s",
            F("started_at") - F("made_at"),
        )[:MAX_RESIDUALS]
    )
    calibration = WaitCalibration()
    for milli, made_at, simulated_s, waited in reversed(rows):
        calibration.learn(milli, made_at.timestamp(), simulated_s, waited.total_seconds())
    return calibration


class RequestForecast(NamedTuple):
    """The start interval, or the reason why there is none; neither for a request that starts now."""

    interval: StartInterval | None = None
    missing_reason: str | None = None


def forecast_request(
    snapshot: Snapshot,
    policy: Policy,
    request: PendingRow,
    preview: RequestPreview,
    expectations: DurationEstimator,
) -> RequestForecast:
    """Forecast when a request that does not start now would start, from the plan that ``preview`` made."""
    verdict = preview.verdict
    if preview.starts_now or verdict is None:
        return RequestForecast()
    pool = queue_pool_of(request, verdict)
    if not has_forecast(request, verdict) or pool is None:
        return RequestForecast(None, NO_FORECAST_REASONS.get(verdict.code, FORECAST_WITHOUT_GPUS))
    queue = QueueForecast(
        replace(snapshot, pending=(*snapshot.pending, request)),
        preview.plan,
        pool,
        expectations.durations,
        policy,
        template_of=expectations.template_of,
        runs=request_runs(snapshot),
    )
    median_s = queue.median_starts_s([request.job], MAX_REQUEST_STEPS).get(request.job)
    if median_s is None:
        return RequestForecast(None, FORECAST_BEYOND_HORIZON)
    if median_s == math.inf:
        return RequestForecast(None, FORECAST_FINDS_NO_START)
    wait = recent_calibration().interval(request.total_milli, median_s)
    return RequestForecast(absolute_interval(snapshot.now_s, wait, median_s, request.not_before_s or 0.0))


def request_runs(snapshot: Snapshot) -> int:
    """Return how many runs a simulation has for whose result a user waits."""
    jobs = 1 + len(snapshot.pending) + len(snapshot.running)
    return max(MIN_REQUEST_RUNS, min(SIMULATION_RUNS, MAX_REQUEST_JOB_RUNS // jobs))


def recent_calibration() -> WaitCalibration:
    global _cached_calibration
    if _cached_calibration is None or time.monotonic() - _cached_calibration[0] > CALIBRATION_MAX_AGE_S:
        _cached_calibration = (time.monotonic(), load_calibration())
    return _cached_calibration[1]
