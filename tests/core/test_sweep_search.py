"""The sweep controller as a pure function: what it starts, stops, pauses and resumes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from portal.domain.jobs.parameters import read_parameters
from portal.domain.sweeps.sweep_progress import TrialUse, sweep_progress
from portal.domain.sweeps.sweeps import Direction, SweepSpec, TrialRecord, TrialState
from portal.services.sweeps.optuna_search import OptunaSearch
from portal.services.sweeps.search import decide
from tests.sweep_simulation import EPOCHS, SPACE, simulate

ASHA = SweepSpec(
    searcher="asha",
    metric="loss",
    max_trials=64,
    max_parallel=8,
    max_steps=EPOCHS,
    reduction_factor=3,
    seed=1,
)
RANDOM = replace(ASHA, searcher="random")
RUNNING, PAUSED, COMPLETED = TrialState.RUNNING, TrialState.PAUSED, TrialState.COMPLETED


def step(spec: SweepSpec, trials: list[TrialRecord], space: Any = None, points: Any = ()) -> Any:
    return decide(spec, read_parameters(space or SPACE), points, trials, len(trials))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("pause", [False, True])
def test_asha_finds_the_best_of_random_search_with_a_third_of_its_epochs(seed: int, pause: bool) -> None:
    random = simulate(replace(RANDOM, seed=seed))
    asha = simulate(replace(ASHA, seed=seed, pause_pruned=pause))
    assert random.epochs == 64 * EPOCHS
    assert [each.parameters for each in asha.trials] == [each.parameters for each in random.trials]
    assert asha.best == random.best
    assert asha.epochs <= 0.35 * random.epochs
    assert set(asha.states()) == {COMPLETED, TrialState.PRUNED} and len(asha.trials) == 64


def test_hyperband_prunes_and_keeps_the_best_trial() -> None:
    hyperband = simulate(replace(ASHA, searcher="hyperband"))
    assert hyperband.best == simulate(RANDOM).best
    assert hyperband.epochs < 0.5 * 64 * EPOCHS and TrialState.PRUNED in hyperband.states()


def test_tpe_learns_from_earlier_trials() -> None:
    better = [
        simulate(replace(RANDOM, searcher="tpe", seed=s)).best < simulate(replace(RANDOM, seed=s)).best
        for s in range(5)
    ]
    assert sum(better) >= 4


@pytest.mark.parametrize("searcher", ["random", "tpe", "asha", "hyperband", "population"])
def test_the_same_seed_repeats_a_sweep_and_another_does_not(searcher: str) -> None:
    spec = replace(ASHA, searcher=searcher, max_trials=24, population=6)
    first, again, other = simulate(spec), simulate(spec), simulate(replace(spec, seed=2))
    assert first.trials == again.trials
    assert [each.parameters for each in first.trials] != [each.parameters for each in other.trials]


def test_a_paused_trial_is_resumed_when_it_is_among_the_best_by_then() -> None:
    outcome = simulate(replace(ASHA, pause_pruned=True, seed=3))
    paused = {number for each in outcome.decisions for number in each.pause}
    resumed = {number for each in outcome.decisions for number in each.resume}
    assert resumed and resumed < paused
    assert any(outcome.trials[number].state is COMPLETED for number in paused)
    assert not any(each.state is PAUSED for each in outcome.trials)


def test_a_value_that_is_not_a_number_does_not_pass_a_rung() -> None:
    outcome = simulate(ASHA, objective=lambda values, epoch: None if values["lr"] > 1e-3 else epoch)
    reasons = [reason for each in outcome.decisions for reason in each.prune.values()]
    assert any(reason == "Its loss at step 1 is not a number." for reason in reasons)
    assert not any(each.value is None for each in outcome.trials if each.state is COMPLETED)


@pytest.mark.parametrize("direction", [Direction.MINIMIZE, Direction.MAXIMIZE])
@pytest.mark.parametrize("searcher", ["random", "tpe", "asha", "hyperband", "population"])
def test_a_trial_that_ends_without_a_number_never_wins(searcher: str, direction: Direction) -> None:
    spec = replace(ASHA, searcher=searcher, direction=direction, max_trials=24, population=6)
    outcome = simulate(
        spec, objective=lambda values, epoch: None if values["lr"] > 1e-3 and epoch > 5 else values["lr"]
    )
    parents = {new.parent for each in outcome.decisions for new in each.start if new.parent is not None}
    assert all(outcome.trials[number].value is not None for number in parents)
    uses = [TrialUse(each.number, each.state, each.value, each.step, 1.0, 1.0) for each in outcome.trials]
    best = sweep_progress(spec, uses, is_running=False).best
    assert best is not None and outcome.trials[best.number].value is not None
    assert any(each.value is None for each in outcome.trials)


def test_a_trial_that_has_done_all_its_steps_is_not_pruned() -> None:
    good = [
        TrialRecord(n, {"lr": 0.01, "decay": 0.3}, COMPLETED, 27, 0.1, {"rungs": [0.5, 0.3, 0.2]})
        for n in range(9)
    ]
    late = TrialRecord(
        9, {"lr": 0.1, "decay": 1.0}, RUNNING, 27, 9.0, {"rungs": [0.1, 0.1, 0.1]}, [(27, 9.0)]
    )
    assert not step(replace(ASHA, max_trials=10), [*good, late]).prune


@pytest.mark.parametrize(("last_step", "pruned"), [(26, {9}), (27, set())])
def test_late_reports_prune_a_trial_only_while_it_has_steps_left(last_step: int, pruned: set[int]) -> None:
    good = [
        TrialRecord(n, {"lr": 0.01, "decay": 0.3}, COMPLETED, 27, 0.1, {"rungs": [0.5, 0.3, 0.2]})
        for n in range(9)
    ]
    reports = [(1, 9.0), (last_step, 9.0)]
    late = TrialRecord(9, {"lr": 0.1, "decay": 1.0}, RUNNING, last_step, 9.0, {}, reports)
    assert set(step(replace(ASHA, max_trials=10), [*good, late]).prune) == pruned


@pytest.mark.parametrize(
    ("running", "total", "started"), [(0, 64, 8), (5, 64, 3), (8, 64, 0), (0, 3, 3), (2, 3, 1)]
)
def test_as_many_trials_start_as_the_limits_allow(running: int, total: int, started: int) -> None:
    trials = [TrialRecord(n, {"lr": 0.01, "decay": 0.3}, RUNNING) for n in range(running)]
    decision = step(replace(RANDOM, max_trials=total), trials)
    assert [each.number for each in decision.start] == list(range(running, running + started))
    assert not decision.is_complete


def test_an_array_runs_each_point_once_and_needs_only_its_live_trials() -> None:
    grid = SweepSpec(searcher="grid", max_trials=6, max_parallel=4, seed=0)
    space = {"a": {"low": 1, "high": 3}, "b": ["x", "y"]}
    begun = decide(grid, read_parameters(space), (), [], 0)
    assert [dict(each.parameters) for each in begun.start] == [
        {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"},
    ]  # fmt: skip
    live = [TrialRecord(3, {"a": 2, "b": "y"}, RUNNING)]
    rest = decide(grid, read_parameters(space), (), live, 4)
    assert [dict(each.parameters) for each in rest.start] == [{"a": 3, "b": "x"}, {"a": 3, "b": "y"}]
    assert decide(grid, read_parameters(space), (), [], 6).is_complete


def test_a_trial_suspended_by_a_user_keeps_the_sweep_open_and_suspended() -> None:
    trials = [TrialRecord(0, {"lr": 0.01, "decay": 0.3}, PAUSED)]
    decision = step(replace(ASHA, max_trials=1), trials)
    assert not decision.is_complete and not decision.resume and not decision.prune


def test_members_of_a_population_continue_from_their_own_or_a_better_checkpoint() -> None:
    spec = replace(ASHA, searcher="population", population=4, max_trials=8, max_parallel=4)
    space = {"lr": {"low": 1e-5, "high": 1e-1, "log": True}, "kind": ["a", "b", "c"]}
    values = [0.1, 0.2, 0.3, 0.9]
    trials = [
        TrialRecord(n, {"lr": 1e-2, "kind": "a"}, COMPLETED, 27, value, {"member": n, "generation": 0})
        for n, value in enumerate(values)
    ]
    begun = step(spec, trials, space).start
    assert [(each.number, each.parent) for each in begun] == [(4, 0), (5, 1), (6, 2), (7, 0)]
    assert all(each.parameters == trials[0].parameters for each in begun[:3])
    changed = begun[3].parameters
    assert changed["lr"] in (pytest.approx(0.8e-2), pytest.approx(1.2e-2))
    assert begun[3].search_state == {"member": 3, "generation": 1}


def test_a_member_whose_trial_failed_continues_from_a_good_one() -> None:
    spec = replace(ASHA, searcher="population", population=2, max_trials=4, max_parallel=2)
    trials = [
        TrialRecord(0, {"lr": 1e-2, "decay": 0.3}, COMPLETED, 27, 0.1, {"member": 0, "generation": 0}),
        TrialRecord(
            1, {"lr": 1e-2, "decay": 0.3}, TrialState.FAILED, None, None, {"member": 1, "generation": 0}
        ),
    ]
    assert [each.parent for each in step(spec, trials).start] == [0, 0]
    assert simulate(replace(spec, max_trials=12)).states() == {COMPLETED: 12}


def test_importance_names_the_parameter_that_matters() -> None:
    trials = simulate(replace(RANDOM, seed=4), {**SPACE, "unused": {"low": 0.0, "high": 1.0}}).trials
    search = OptunaSearch(RANDOM, read_parameters({**SPACE, "unused": {"low": 0.0, "high": 1.0}}), trials)
    found = search.importances()
    assert next(iter(found)) == "lr" and sum(found.values()) == pytest.approx(1.0)
    assert OptunaSearch(RANDOM, read_parameters(SPACE), []).importances() == {}
