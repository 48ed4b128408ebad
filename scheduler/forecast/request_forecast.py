"""Start interval of a request that is not submitted: the simulation of the queue with the request in it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import NamedTuple

from portal.domain.reasons import (
    FORECAST_BEYOND_HORIZON,
    FORECAST_FINDS_NO_START,
    FORECAST_WITHOUT_GPUS,
    NO_FORECAST_REASONS,
)
from scheduler.core.forecast.calibration import WaitCalibration
from scheduler.core.forecast.queue_simulation import SIMULATION_RUNS
from scheduler.core.forecast.start_times import QueueForecast, has_forecast, queue_pool_of
from scheduler.core.model.plan import RequestPreview, StartInterval
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import PendingRow, Snapshot
from scheduler.forecast.duration_estimates import DurationEstimator
from scheduler.forecast.forecast_pass import absolute_interval, load_calibration

MAX_STEPS = 6_000
"""Steps of each run. The forecast pass continues further."""
JOB_RUNS = 4_200
MIN_RUNS = 3
"""A user waits for this forecast: the more jobs, the fewer runs. The ends of many jobs differ less between runs."""
CALIBRATION_MAX_AGE_S = 60.0

_cached_calibration: tuple[float, WaitCalibration] | None = None


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
    jobs = 1 + len(snapshot.pending) + len(snapshot.running)
    queue = QueueForecast(
        replace(snapshot, pending=(*snapshot.pending, request)),
        preview.plan,
        pool,
        expectations.durations,
        policy,
        template_of=expectations.template_of,
        runs=max(MIN_RUNS, min(SIMULATION_RUNS, JOB_RUNS // jobs)),
    )
    median_s = queue.median_starts_s([request.job], MAX_STEPS).get(request.job)
    if median_s is None:
        return RequestForecast(None, FORECAST_BEYOND_HORIZON)
    if median_s == math.inf:
        return RequestForecast(None, FORECAST_FINDS_NO_START)
    wait = _recent_calibration().interval(request.total_milli, median_s)
    return RequestForecast(absolute_interval(snapshot.now_s, wait, median_s, request.not_before_s or 0.0))


def _recent_calibration() -> WaitCalibration:
    global _cached_calibration
    if _cached_calibration is None or time.monotonic() - _cached_calibration[0] > CALIBRATION_MAX_AGE_S:
        _cached_calibration = (time.monotonic(), load_calibration())
    return _cached_calibration[1]
