"""A sweep, declared once for form, REST and files: searcher, budget, and the parameters of its trials. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from portal.domain.jobs.job_spec import JobField, declare, job_fields
from portal.domain.jobs.parameters import MAX_TRIALS, Value, grid_points, read_parameters, read_points

MAX_PARALLEL = 1000
MAX_REPORTS = 1000
"""Reports stored of one trial; beyond, every second one is deleted."""


class Searcher(StrEnum):
    """How the parameters of the next trial are chosen. A sweep with ``list`` or ``grid`` is an array."""

    LIST = "list"
    GRID = "grid"
    RANDOM = "random"
    TPE = "tpe"
    ASHA = "asha"
    HYPERBAND = "hyperband"
    POPULATION = "population"


ARRAY_SEARCHERS = frozenset({Searcher.LIST, Searcher.GRID})
PRUNING_SEARCHERS = frozenset({Searcher.ASHA, Searcher.HYPERBAND})
METRIC_SEARCHERS = PRUNING_SEARCHERS | {Searcher.TPE, Searcher.POPULATION}
SEARCHER_LABELS = {
    Searcher.LIST: "List: each line is a trial",
    Searcher.GRID: "Grid: all combinations",
    Searcher.RANDOM: "Random",
    Searcher.TPE: "TPE: samples where the metric is good",
    Searcher.ASHA: "ASHA: random, stops bad trials early",
    Searcher.HYPERBAND: "Hyperband: ASHA with several first rungs",
    Searcher.POPULATION: "Population: bad trials continue from good ones",
}


class Direction(StrEnum):
    MINIMIZE = "minimize"
    MAXIMIZE = "maximize"


class SweepState(StrEnum):
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    STOPPED = "STOPPED"


class TrialState(StrEnum):
    """State of a trial. A WAITING trial has no job yet; a PAUSED one has a suspended job."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    PRUNED = "PRUNED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


ACTIVE_TRIAL_STATES = frozenset({TrialState.WAITING, TrialState.RUNNING})
LIVE_TRIAL_STATES = ACTIVE_TRIAL_STATES | {TrialState.PAUSED}
REPEATABLE_TRIAL_STATES = frozenset({TrialState.FAILED, TrialState.STOPPED, TrialState.PRUNED})


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """What a sweep searches and how much it may run, without its job."""

    searcher: str = declare(
        Searcher.RANDOM.value,
        JobField(
            choices=tuple(Searcher), label="Searcher", section="sweep",
            help="list and grid run each combination once, as an array of jobs; the others search.",
        ),
    )  # fmt: skip
    metric: str = declare(
        "",
        JobField(
            max_length=100,
            label="Metric",
            section="sweep",
            help="Name of the value that trials report, such as loss.",
        ),
    )
    direction: str = declare(
        Direction.MINIMIZE.value,
        JobField(choices=tuple(Direction), label="Direction", section="sweep", help="What is better."),
    )
    max_trials: int | None = declare(
        None,
        JobField(
            minimum=1, maximum=MAX_TRIALS, label="Trials", section="sweep", if_null="all",
            help="Budget of trials; lists and grids need none.",
        ),
    )  # fmt: skip
    max_parallel: int = declare(
        4,
        JobField(
            minimum=1,
            maximum=MAX_PARALLEL,
            label="In parallel",
            section="sweep",
            help="Trials that may run at once.",
        ),
    )
    max_steps: int | None = declare(
        None,
        JobField(
            minimum=1, maximum=1_000_000_000, label="Steps of a trial", section="sweep", if_null="unknown",
            help="Length of a trial in reported steps, such as epochs; of one generation for population.",
        ),
    )  # fmt: skip
    min_steps: int = declare(
        1,
        JobField(
            minimum=1, maximum=1_000_000_000, label="First rung", section="sweep",
            help="Steps after which ASHA and Hyperband first compare trials.",
        ),
    )  # fmt: skip
    reduction_factor: int = declare(
        4,
        JobField(
            minimum=2, maximum=100, label="Reduction factor", section="sweep",
            help="ASHA and Hyperband let the best of this many trials pass a rung; rungs are this factor apart.",
        ),
    )  # fmt: skip
    pause_pruned: bool = declare(
        False,
        JobField(
            label="Pause instead of stopping", section="sweep",
            help="ASHA suspends a trial that does not pass a rung, and resumes it if it passes later.",
        ),
    )  # fmt: skip
    population: int = declare(
        8,
        JobField(
            minimum=2, maximum=1000, label="Population", section="sweep", help="Members of a population."
        ),
    )
    seed: int | None = declare(
        None,
        JobField(
            minimum=0, maximum=2**31 - 1, label="Seed", section="sweep", if_null="chosen",
            help="The same seed and results give the same parameters.",
        ),
    )  # fmt: skip
    reads_environment: bool = declare(
        False,
        JobField(
            label="The program reads its parameters itself", section="sweep",
            help="From FAIRWAY_PARAM_NAME or FAIRWAY_PARAMETERS; otherwise the command must name each parameter.",
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class TrialRecord:
    """A trial as the search sees it. ``reports``: those (step, value) that are not judged yet, oldest first.

    A value of None is not a number. ``search_state`` is what earlier decisions remembered.
    """

    number: int
    parameters: Mapping[str, Value]
    state: TrialState
    step: float | None = None
    value: float | None = None
    search_state: Mapping[str, Any] = field(default_factory=dict)
    reports: Sequence[tuple[float, float | None]] = ()

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE_TRIAL_STATES


def sweep_errors(spec: SweepSpec, parameters: Any, points: Any) -> dict[str, str]:
    """Return what is wrong with a sweep, by field; its job is checked elsewhere."""
    wrong = {
        name: message
        for name, rule in job_fields(SweepSpec).items()
        if (message := rule.error_of(getattr(spec, name)))
    }
    if wrong:
        return wrong
    searcher = Searcher(spec.searcher)
    try:
        if searcher is Searcher.LIST:
            if parameters:
                wrong["parameters"] = "A list has points instead of parameters."
            read_points(points)
        elif points:
            wrong["points"] = "Only the searcher list has points."
    except ValueError as error:
        wrong["points"] = str(error)
    try:
        if searcher is not Searcher.LIST:
            found = read_parameters(parameters)
            if not found and searcher is not Searcher.RANDOM:
                wrong["parameters"] = "Name at least one parameter."
            if searcher is Searcher.GRID:
                grid_points(found)
    except ValueError as error:
        wrong["parameters"] = str(error)
    if searcher not in ARRAY_SEARCHERS and spec.max_trials is None:
        wrong["max_trials"] = f"The searcher {searcher} needs a number of trials."
    if searcher in METRIC_SEARCHERS and not spec.metric:
        wrong["metric"] = f"The searcher {searcher} needs a metric that the trials report."
    if searcher in METRIC_SEARCHERS - {Searcher.TPE} and spec.max_steps is None:
        wrong["max_steps"] = f"The searcher {searcher} needs the number of steps of a trial."
    elif searcher in PRUNING_SEARCHERS and spec.max_steps is not None and spec.min_steps >= spec.max_steps:
        wrong["min_steps"] = "The first rung must come before the last step."
    if spec.pause_pruned and searcher is not Searcher.ASHA:
        wrong["pause_pruned"] = "Only ASHA can pause trials."
    if searcher is Searcher.POPULATION and (spec.max_trials or 0) < spec.population:
        wrong["population"] = "The population must not be larger than the number of trials."
    return wrong
