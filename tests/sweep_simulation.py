"""Trials of a sweep on a synthetic objective: the real controller, without jobs and without a clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from portal.domain.jobs.parameters import Parameter, Value, read_parameters
from portal.domain.sweeps.sweeps import SweepSpec, TrialRecord, TrialState
from portal.services.sweeps.search import SearchDecision, decide

SPACE = {"lr": {"low": 1e-5, "high": 1e-1, "log": True}, "decay": {"low": 0.0, "high": 1.0}}
EPOCHS = 27


def loss(values: Mapping[str, Value], epoch: float) -> float:
    """A learning curve that falls to a floor, which is lowest at lr 0.01 and decay 0.3.

    Bad learning rates fall faster at first, so that early values mislead.
    """
    off = abs(math.log10(float(values["lr"])) + 2)
    floor = 0.05 + 0.2 * off + (float(values["decay"]) - 0.3) ** 2
    return floor + (1 - floor) * math.exp(-epoch / (7 - min(off, 3)))


@dataclass
class Outcome:
    """Epochs that a sweep used, and its trials."""

    epochs: int = 0
    trials: list[TrialRecord] = field(default_factory=list)
    decisions: list[SearchDecision] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Best final value of a trial that ran to its end."""
        values = [each.value for each in self.trials if each.state is TrialState.COMPLETED]
        return min(value for value in values if value is not None)

    def states(self) -> dict[TrialState, int]:
        return {state: n for state in TrialState if (n := sum(each.state is state for each in self.trials))}


def simulate(
    spec: SweepSpec,
    space: Mapping[str, object] = SPACE,
    *,
    epochs: int = EPOCHS,
    objective: Callable[[Mapping[str, Value], float], float | None] = loss,
) -> Outcome:
    """Run a sweep to its end; in each round every running trial does one epoch and reports its value."""
    parameters: Mapping[str, Parameter] = read_parameters(space)
    outcome = Outcome()
    trials = outcome.trials
    while True:
        decision = decide(spec, parameters, [], trials, len(trials))
        outcome.decisions.append(decision)
        for number, state in decision.search_states.items():
            trials[number] = replace(trials[number], search_state=state, reports=())
        for number in decision.prune:
            trials[number] = replace(trials[number], state=TrialState.PRUNED)
        for number in decision.pause:
            state = {**trials[number].search_state, "at_rung": True}
            trials[number] = replace(trials[number], state=TrialState.PAUSED, search_state=state)
        for number in decision.resume:
            state = {**trials[number].search_state, "at_rung": False}
            trials[number] = replace(trials[number], state=TrialState.RUNNING, search_state=state)
        for new in decision.start:
            assert new.number == len(trials)
            trials.append(
                TrialRecord(new.number, new.parameters, TrialState.RUNNING, search_state=new.search_state)
            )
        if decision.is_complete:
            return outcome
        assert sum(each.is_active for each in trials) <= spec.max_parallel
        for number, trial in enumerate(trials):
            if trial.state is TrialState.RUNNING:
                outcome.epochs += 1
                epoch = (trial.step or 0) + 1
                value = objective(trial.parameters, epoch)
                ended = TrialState.COMPLETED if epoch >= epochs else TrialState.RUNNING
                trials[number] = replace(
                    trial, state=ended, step=epoch, value=value, reports=((epoch, value),)
                )
