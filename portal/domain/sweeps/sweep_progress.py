"""How far a sweep is: its trials by state, what pruning saved, the rungs, and a forecast of its end. Pure."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import NamedTuple

from portal.domain.jobs.parameters import Parameter, Value
from portal.domain.sweeps.sweeps import (
    LIVE_TRIAL_STATES,
    PRUNING_SEARCHERS,
    Direction,
    Searcher,
    SweepSpec,
    TrialState,
)

MIN_ENDED = 3
"""Ended trials that a forecast needs."""
MAX_DRAWS, MIN_DRAWS, DRAWN_TRIALS = 200, 20, 20_000
"""A forecast is drawn that often, less often when many trials are left: its work is bounded."""
MAX_CHANGE_PERCENT = 10_000
MIN_COMPLETED = 6
"""Completed trials that the best region needs."""
BEST_FRACTION, MIN_BEST = 4, 3
"""The best region is that of the best quarter, at least three."""


class TrialUse(NamedTuple):
    """What a trial has used. ``runtime_s`` is from its first start to its end or now; None: it has not started."""

    number: int
    state: TrialState
    value: float | None
    step: float | None
    gpu_hours: float
    runtime_s: float | None
    rungs: Sequence[float] = ()
    """Its values at the rungs that it reached."""


@dataclass(frozen=True)
class BestTrial:
    """The best trial, and what later ones have used without a better value."""

    number: int
    value: float
    change_percent: float | None
    """Relative to the first trial with a value; None if that is this one, or the change exceeds 10,000 %."""
    later_trials: int
    later_gpu_hours: float


@dataclass(frozen=True)
class Rung:
    """A step at which trials are compared. ``cut`` is the worst value that passes now, None if unknown."""

    step: int
    reached: int
    cut: float | None
    best: float | None


@dataclass(frozen=True)
class SweepForecast:
    """p10 and p90 of the seconds until the sweep ends, and of its GPU-hours in all."""

    low_s: float
    high_s: float
    low_gpu_hours: float
    high_gpu_hours: float


@dataclass(frozen=True)
class SweepProgress:
    counts: Mapping[TrialState, int]
    started: int
    """Trials that have started, ended ones included."""
    gpu_hours: float
    best: BestTrial | None
    saved_gpu_hours: float | None
    """What pruned trials would have used until their last step, at their own rate; None without pruning."""
    median_gpu_hours: float | None
    """Of a completed trial; None before the first one, or if trials use no GPUs."""
    rungs: list[Rung]
    forecast: SweepForecast | None

    @property
    def live_count(self) -> int:
        return sum(self.counts[each] for each in LIVE_TRIAL_STATES)

    @property
    def ended_count(self) -> int:
        return sum(self.counts.values()) - self.live_count


def sweep_progress(spec: SweepSpec, trials: Sequence[TrialUse], *, is_running: bool) -> SweepProgress:
    """Return the progress of a sweep with these trials, in the order of their numbers."""
    gpu_hours = sum(each.gpu_hours for each in trials)
    completed = [each.gpu_hours for each in trials if each.state is TrialState.COMPLETED and each.gpu_hours]
    return SweepProgress(
        counts=Counter(each.state for each in trials),
        started=sum(each.runtime_s is not None for each in trials),
        gpu_hours=gpu_hours,
        best=_best(spec, trials),
        saved_gpu_hours=_saved_gpu_hours(spec, trials),
        median_gpu_hours=median(completed) if completed else None,
        rungs=_rungs(spec, trials),
        forecast=_forecast(spec, trials, gpu_hours) if is_running else None,
    )


def rung_steps(spec: SweepSpec) -> list[int]:
    """Return the steps at which ASHA and Hyperband compare trials; a bracket of Hyperband uses the last ones."""
    found: list[int] = []
    step = spec.min_steps
    while spec.searcher in PRUNING_SEARCHERS and step < (spec.max_steps or 0):
        found.append(step)
        step *= spec.reduction_factor
    return found


def passing_count(reached: int, reduction_factor: int) -> int:
    """Return how many of the trials that reached a rung pass it."""
    return max(1, reached // reduction_factor)


def rung_cut(values: Sequence[float], reduction_factor: int, direction: str) -> float:
    """Return the worst value that passes a rung which trials reached with ``values``, at least one."""
    ordered = sorted(values, reverse=direction == Direction.MAXIMIZE)
    return ordered[passing_count(len(ordered), reduction_factor) - 1]


def best_region(
    parameters: Mapping[str, Parameter], trials: Sequence[tuple[Mapping[str, Value], float]], direction: str
) -> dict[str, Parameter]:
    """Return the parameters narrowed to the values of the best quarter of completed trials, at least three.

    ``trials`` are parameters and value of each. Only narrower parameters are returned; none before six trials.
    """
    if len(trials) < MIN_COMPLETED:
        return {}
    ordered = sorted(trials, key=lambda each: each[1], reverse=direction == Direction.MAXIMIZE)
    best = [values for values, _ in ordered[: max(MIN_BEST, len(ordered) // BEST_FRACTION)]]
    narrowed = {name: _narrowed(each, [values[name] for values in best]) for name, each in parameters.items()}
    return {name: each for name, each in narrowed.items() if each != parameters[name]}


def _narrowed(parameter: Parameter, values: Sequence[Value]) -> Parameter:
    if parameter.choices:
        return replace(parameter, choices=tuple(each for each in parameter.choices if each in values))
    low, high = min(map(float, values)), max(map(float, values))
    if parameter.step is None and not parameter.is_integer:
        low, high = _two_digits(low, math.floor), _two_digits(high, math.ceil)
    low, high = max(low, parameter.low), min(high, parameter.high)
    if low == high:
        return Parameter(parameter.name, choices=(parameter.number(low),))
    if parameter.is_integer:
        low, high = round(low), round(high)
    return replace(parameter, low=low, high=high)


def _two_digits(value: float, to_whole: Callable[[float], int]) -> float:
    """Return the value rounded to two digits by ``math.floor`` or ``math.ceil``."""
    if not value:
        return value
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
    return float(f"{to_whole(round(value / unit, 6)) * unit:.6g}")


def _best(spec: SweepSpec, trials: Sequence[TrialUse]) -> BestTrial | None:
    valued = [(each.number, each.value) for each in trials if each.value is not None]
    if not valued:
        return None
    sign = 1 if spec.direction == Direction.MINIMIZE else -1
    (first, start), (number, value) = valued[0], min(valued, key=lambda each: (sign * each[1], each[0]))
    later = [each for each in trials if each.number > number and each.value is not None]
    change = 100 * (value - start) / abs(start) if start and number != first else None
    return BestTrial(
        number,
        value,
        change if change is not None and abs(change) <= MAX_CHANGE_PERCENT else None,
        len(later),
        sum(each.gpu_hours for each in later),
    )


def _saved_gpu_hours(spec: SweepSpec, trials: Sequence[TrialUse]) -> float | None:
    end = spec.max_steps
    if spec.searcher not in PRUNING_SEARCHERS or not end:
        return None
    pruned = [(each.gpu_hours, each.step) for each in trials if each.state is TrialState.PRUNED and each.step]
    return sum(hours * max(0.0, end / step - 1) for hours, step in pruned)


def _rungs(spec: SweepSpec, trials: Sequence[TrialUse]) -> list[Rung]:
    best_of = min if spec.direction == Direction.MINIMIZE else max
    found = []
    for index, step in enumerate(rung_steps(spec)):
        if spec.searcher == Searcher.HYPERBAND:  # its brackets have rungs of their own
            found.append(Rung(step, sum((each.step or 0) >= step for each in trials), None, None))
            continue
        values = [each.rungs[index] for each in trials if len(each.rungs) > index]
        cut = rung_cut(values, spec.reduction_factor, spec.direction) if values else None
        found.append(Rung(step, len(values), cut, best_of(values) if values else None))
    return found


def _forecast(spec: SweepSpec, trials: Sequence[TrialUse], gpu_hours: float) -> SweepForecast | None:
    """Return when the remaining trials have ended, on as many slots as trials run now; None if unknown.

    Run times are drawn from those of ended trials; of a running one from those that are longer than it ran so far.
    """
    ended = [
        (each.runtime_s, each.gpu_hours)
        for each in trials
        if each.state in (TrialState.COMPLETED, TrialState.PRUNED) and each.runtime_s
    ]
    running = [
        each.runtime_s for each in trials if each.state is TrialState.RUNNING and each.runtime_s is not None
    ]
    waits = sum(each.runtime_s is None and each.state in LIVE_TRIAL_STATES for each in trials)
    waits += max(0, (spec.max_trials or 0) - len(trials))
    if len(ended) < MIN_ENDED or not running:
        return None
    rng = random.Random(spec.seed)  # noqa: S311 - no secret
    draws = max(MIN_DRAWS, min(MAX_DRAWS, DRAWN_TRIALS // (waits + len(running))))
    ends, used = zip(*(_draw(ended, running, waits, rng) for _ in range(draws)), strict=True)
    low_s, high_s = _p10_p90(ends)
    low_hours, high_hours = _p10_p90(used)
    return SweepForecast(low_s, high_s, gpu_hours + low_hours, gpu_hours + high_hours)


def _draw(
    ended: Sequence[tuple[float, float]], running: Sequence[float], waits: int, rng: random.Random
) -> tuple[float, float]:
    """Return the seconds until the last trial ends, and the GPU-hours until then."""
    free_s, gpu_hours = [], 0.0
    for elapsed_s in running:
        longer = [each for each in ended if each[0] > elapsed_s]
        runtime_s, hours = rng.choice(longer or ended)
        left_s = runtime_s - elapsed_s if longer else runtime_s
        free_s.append(left_s)
        gpu_hours += hours * left_s / runtime_s
    heapq.heapify(free_s)
    for _ in range(waits):
        runtime_s, hours = rng.choice(ended)
        heapq.heapreplace(free_s, free_s[0] + runtime_s)
        gpu_hours += hours
    return max(free_s), gpu_hours


def _p10_p90(values: Sequence[float]) -> tuple[float, float]:
    found = quantiles(values, n=10, method="inclusive")
    return found[0], found[-1]
