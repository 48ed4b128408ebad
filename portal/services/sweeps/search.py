"""What a sweep does next: which trials to stop, pause, resume and start. Pure and repeatable."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portal.domain.jobs.parameters import Parameter, Value, grid_points
from portal.domain.sweeps.sweeps import (
    ARRAY_SEARCHERS,
    LIVE_TRIAL_STATES,
    METRIC_SEARCHERS,
    PRUNING_SEARCHERS,
    Direction,
    Searcher,
    SweepSpec,
    TrialRecord,
    TrialState,
)

if TYPE_CHECKING:
    from portal.services.sweeps.optuna_search import OptunaSearch

AT_RUNG = "at_rung"
"""Key of the search state of a trial that is paused until it passes its rung."""
_PERTURBATIONS = (0.8, 1.2)
_RESAMPLE_PROBABILITY = 0.25


@dataclass(frozen=True)
class NewTrial:
    """A trial to start; ``parent`` is the number of the trial from whose checkpoint it starts."""

    number: int
    parameters: Mapping[str, Value]
    parent: int | None = None
    search_state: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class SearchDecision:
    """The next steps, by trial number; the values of ``prune`` and ``pause`` are the reasons."""

    prune: dict[int, str] = field(default_factory=dict)
    pause: dict[int, str] = field(default_factory=dict)
    resume: list[int] = field(default_factory=list)
    start: list[NewTrial] = field(default_factory=list)
    search_states: dict[int, dict[str, Any]] = field(default_factory=dict)
    is_complete: bool = False


def decide(
    spec: SweepSpec,
    parameters: Mapping[str, Parameter],
    points: Sequence[Mapping[str, Value]],
    trials: Sequence[TrialRecord],
    count: int,
) -> SearchDecision:
    """Return the next steps of a running sweep with ``count`` trials so far.

    ``trials`` are all of them by number, or at least the live ones if ``needs_history`` is False.
    ``spec.max_trials`` and ``spec.seed`` must be set. A trial paused at a rung that passes it by now comes
    before a new one. When nothing is left to start, such trials are pruned.
    """
    decision = SearchDecision()
    search = None
    if spec.searcher not in ARRAY_SEARCHERS:
        from portal.services.sweeps.optuna_search import OptunaSearch

        search = OptunaSearch(spec, parameters, trials if needs_history(spec) else ())
    active = 0
    for trial in trials:
        if not trial.is_active:
            continue
        active += 1
        if search is not None and spec.searcher in PRUNING_SEARCHERS and trial.reports:
            reason, decision.search_states[trial.number] = search.judge(trial)
            if reason is not None:
                (decision.pause if spec.pause_pruned else decision.prune)[trial.number] = reason
                active -= 1
    free = max(0, spec.max_parallel - active)
    waiting = [each for each in trials if each.state is TrialState.PAUSED and each.search_state.get(AT_RUNG)]
    if search is not None:
        decision.resume = [each.number for each in waiting if search.passes_now(each)][:free]
        free -= len(decision.resume)
    numbers = range(count, min(count + free, spec.max_trials or 0))
    decision.start = _new_trials(spec, parameters, points, trials, search, numbers)
    if not active and not decision.resume and not decision.start:
        decision.prune |= decision.pause
        decision.prune |= {
            each.number: "It did not pass its rung before the sweep ended." for each in waiting
        }
        decision.pause = {}
        suspended = sum(each.state is TrialState.PAUSED for each in trials) - len(waiting)
        decision.is_complete = not suspended
    return decision


def needs_history(spec: SweepSpec) -> bool:
    """Return True if the next trial depends on earlier ones."""
    return spec.searcher in METRIC_SEARCHERS


def _new_trials(
    spec: SweepSpec,
    parameters: Mapping[str, Parameter],
    points: Sequence[Mapping[str, Value]],
    trials: Sequence[TrialRecord],
    search: OptunaSearch | None,
    numbers: range,
) -> list[NewTrial]:
    if search is None:
        known = grid_points(parameters) if spec.searcher == Searcher.GRID else points
        return [NewTrial(number, known[number]) for number in numbers]
    if spec.searcher == Searcher.POPULATION:
        return _next_members(spec, parameters, trials, search, numbers)
    return [NewTrial(number, search.suggest(number)) for number in numbers]


# -- population based training ---------------------------------------------------------------------------


def _next_members(
    spec: SweepSpec,
    parameters: Mapping[str, Parameter],
    trials: Sequence[TrialRecord],
    search: OptunaSearch,
    numbers: range,
) -> list[NewTrial]:
    """Return the next generation of members whose trial has ended (Jaderberg et al. 2017, asynchronous).

    A member among the worst quarter continues from a random one of the best quarter with changed parameters
    (exploit and explore); others continue from their own checkpoint.
    """
    last: dict[int, TrialRecord] = {}
    for trial in trials:
        last[trial.search_state["member"]] = trial
    started: list[NewTrial] = []
    for number in numbers:
        begun = {each.search_state["member"] for each in started}
        missing = [each for each in range(spec.population) if each not in last and each not in begun]
        if missing:
            state = {"member": missing[0], "generation": 0}
            started.append(NewTrial(number, search.suggest(number), search_state=state))
            continue
        ended = [
            each
            for member, each in last.items()
            if member not in begun and each.state not in LIVE_TRIAL_STATES
        ]
        if not ended:
            break
        mine = min(ended, key=lambda each: (each.search_state["generation"], each.number))
        started.append(_next_generation(spec, parameters, list(last.values()), mine, number, search))
    return started


def _next_generation(
    spec: SweepSpec,
    parameters: Mapping[str, Parameter],
    members: Sequence[TrialRecord],
    mine: TrialRecord,
    number: int,
    search: OptunaSearch,
) -> NewTrial:
    rng = random.Random(f"{spec.seed}/{number}")  # noqa: S311 - no secret
    state = {"member": mine.search_state["member"], "generation": mine.search_state["generation"] + 1}
    sign = 1 if spec.direction == Direction.MINIMIZE else -1
    valued = [each for each in members if each.value is not None]
    ranked = sorted(valued, key=lambda each: (sign * (each.value or 0.0), each.number))
    quarter = max(1, len(ranked) // 4)
    if not ranked:
        return NewTrial(number, search.suggest(number), search_state=state)
    is_bad = mine.value is None or (len(ranked) > 1 and mine in ranked[-quarter:])
    if not is_bad:
        return NewTrial(number, mine.parameters, mine.number, state)
    donor = rng.choice(ranked[:quarter])
    return NewTrial(number, _explore(parameters, donor.parameters, rng), donor.number, state)


def _explore(
    parameters: Mapping[str, Parameter], values: Mapping[str, Value], rng: random.Random
) -> dict[str, Value]:
    """Return the values, each number changed by a fifth, each choice drawn again with probability 1/4."""
    found: dict[str, Value] = {}
    for name, parameter in parameters.items():
        value = values[name]
        if parameter.is_range and isinstance(value, int | float):
            found[name] = parameter.number(value * rng.choice(_PERTURBATIONS))
        else:
            found[name] = rng.choice(parameter.choices) if rng.random() < _RESAMPLE_PROBABILITY else value
    return found
