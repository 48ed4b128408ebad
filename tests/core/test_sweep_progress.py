"""Progress of a sweep: best trial, pruning, rungs, the best region, and the forecast of its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from portal.domain.jobs.parameters import read_parameters
from portal.domain.sweeps.sweep_progress import (
    SweepProgress,
    TrialUse,
    best_region,
    passing_count,
    rung_cut,
    rung_steps,
    sweep_progress,
)
from portal.domain.sweeps.sweeps import SweepSpec, TrialState

ASHA = SweepSpec(
    searcher="asha", metric="loss", max_trials=20, max_parallel=2, max_steps=27, reduction_factor=3, seed=1
)
COMPLETED, PRUNED, RUNNING, WAITING = (
    TrialState.COMPLETED,
    TrialState.PRUNED,
    TrialState.RUNNING,
    TrialState.WAITING,
)


def ended(number: int, value: float, hours: float = 1.0, state: TrialState = COMPLETED) -> TrialUse:
    return TrialUse(number, state, value, 27 if state is COMPLETED else 9, hours, 3600 * hours, (value,))


def progress(trials: list[TrialUse], spec: SweepSpec = ASHA, *, is_running: bool = True) -> SweepProgress:
    return sweep_progress(spec, trials, is_running=is_running)


def test_the_best_trial_is_compared_with_the_first_and_with_later_ones() -> None:
    best = progress([ended(0, 0.4), ended(1, 0.3), ended(2, 0.5, 2.0), ended(3, 0.3, 0.5)]).best
    assert best is not None and (best.number, best.later_trials, best.later_gpu_hours) == (1, 2, 2.5)
    assert best.change_percent == pytest.approx(-25)
    highest = progress([ended(0, 0.4), ended(1, 0.3)], replace(ASHA, direction="maximize")).best
    assert highest is not None and (highest.number, highest.change_percent) == (0, None)
    steep = progress([ended(0, 1e-300), ended(1, 0.3)], replace(ASHA, direction="maximize")).best
    assert steep is not None and (steep.number, steep.change_percent) == (1, None)
    assert progress([TrialUse(0, RUNNING, None, None, 0.0, None)]).best is None


def test_pruned_trials_save_what_they_had_used_until_their_last_step() -> None:
    pruned = [ended(0, 0.4, 1.0, PRUNED), TrialUse(1, PRUNED, None, None, 1.0, 60.0)]
    assert progress(pruned).saved_gpu_hours == pytest.approx(2.0)  # at step 9 of 27
    assert progress(pruned, replace(ASHA, searcher="random")).saved_gpu_hours is None


def test_rungs_are_a_factor_apart_and_end_before_the_last_step() -> None:
    assert rung_steps(ASHA) == [1, 3, 9]
    assert rung_steps(replace(ASHA, searcher="hyperband", min_steps=2)) == [2, 6, 18]
    assert rung_steps(replace(ASHA, searcher="tpe")) == rung_steps(replace(ASHA, max_steps=None)) == []


def test_the_cut_of_a_rung_is_the_worst_value_that_passes() -> None:
    assert [passing_count(reached, 3) for reached in (1, 3, 6, 8)] == [1, 1, 2, 2]
    assert rung_cut([0.5, 0.1, 0.3, 0.2, 0.6, 0.4], 3, "minimize") == 0.2
    assert rung_cut([0.5, 0.1, 0.3, 0.2, 0.6, 0.4], 3, "maximize") == 0.5
    first, second, _ = progress([ended(number, 0.1 * (number + 1)) for number in range(6)]).rungs
    assert (first.step, first.reached, first.best) == (1, 6, 0.1) and first.cut == pytest.approx(0.2)
    assert (second.step, second.reached, second.cut) == (3, 0, None)
    (bracket, *_) = progress([ended(0, 0.1)], replace(ASHA, searcher="hyperband")).rungs
    assert (bracket.reached, bracket.cut) == (1, None)


def test_the_end_is_forecast_from_ended_trials_on_the_slots_that_run() -> None:
    alike = [ended(number, 0.5) for number in range(4)]
    running = [TrialUse(4, RUNNING, 0.5, 1, 0.5, 1800.0), TrialUse(5, RUNNING, 0.5, 1, 0.5, 1800.0)]
    queued = [TrialUse(6, RUNNING, None, None, 0.0, None), TrialUse(7, WAITING, None, None, 0.0, None)]
    found = progress([*alike, *running, *queued], replace(ASHA, max_trials=8)).forecast
    assert found is not None and (found.low_s, found.high_s) == (5400.0, 5400.0)
    assert found.low_gpu_hours == pytest.approx(8.0)
    longer = progress([*alike, *running, *queued], replace(ASHA, max_trials=10)).forecast
    assert longer is not None and longer.low_s == 9000.0


def test_a_forecast_needs_three_ended_trials_and_a_running_one() -> None:
    running = TrialUse(3, RUNNING, 0.5, 1, 0.5, 1800.0)
    three = [ended(number, 0.5, number + 1.0) for number in range(3)]
    assert progress([*three[:2], running]).forecast is None and progress(three).forecast is None
    assert progress([*three, running], is_running=False).forecast is None
    found = progress([*three, running]).forecast
    assert found is not None and 0 < found.low_s < found.high_s and found.low_gpu_hours < found.high_gpu_hours


def test_a_trial_that_ran_longer_than_all_others_is_drawn_anew() -> None:
    trials = [*(ended(number, 0.5) for number in range(3)), TrialUse(3, RUNNING, 0.5, 1, 2.0, 7200.0)]
    found = progress(trials, replace(ASHA, max_trials=4)).forecast
    assert found is not None and found.low_s == 3600.0


def test_the_best_region_has_the_values_of_the_best_quarter() -> None:
    space = read_parameters(
        {
            "lr": {"low": 1e-5, "high": 1e-1, "log": True},
            "layers": {"low": 1, "high": 8},
            "opt": ["sgd", "adam", "lion"],
            "wide": {"low": 0.0, "high": 1.0},
        }
    )
    values = [(1.234e-4, 2, "sgd", 0.0), (3.21e-4, 2, "adam", 1.0), (2e-4, 2, "sgd", 0.5)]
    good = [(dict(zip(space, each, strict=True)), 0.1 + n / 100) for n, each in enumerate(values)]
    bad = [({"lr": 0.05, "layers": 8, "opt": "lion", "wide": 0.5}, 0.9)] * 9
    region = best_region(space, [*bad, *good], "minimize")
    assert set(region) == {"lr", "layers", "opt"}
    assert (region["lr"].low, region["lr"].high, region["lr"].log) == (1.2e-4, 3.3e-4, True)
    assert region["layers"].choices == (2,) and region["opt"].choices == ("sgd", "adam")
    assert best_region(space, good, "minimize") == {}  # too few
