"""Sampling, pruning and importance by Optuna, on a study that is rebuilt from our trials: they alone are stored.

Pure: the same trials and seed give the same answers. The only module that imports Optuna, and itself imported only
where a study is needed: Optuna adds a tenth to the start of a worker.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.study import StudyDirection
from optuna.trial import TrialState as OptunaState

from portal.domain.jobs.parameters import Parameter, Value
from portal.domain.stored_texts import stored_text
from portal.domain.sweeps.sweep_progress import passing_count, rung_cut
from portal.domain.sweeps.sweeps import Direction, Searcher, SweepSpec, TrialRecord, TrialState

optuna.logging.set_verbosity(optuna.logging.WARNING)

_RUNG = "completed_rung_"
"""Prefix of Optuna's trial attributes that hold the value at a rung."""


class OptunaSearch:
    """One sweep as a study of Optuna. Trials have the same numbers in both."""

    def __init__(
        self, spec: SweepSpec, parameters: Mapping[str, Parameter], trials: Sequence[TrialRecord]
    ) -> None:
        self._spec = spec
        self._distributions = {name: _distribution(each) for name, each in parameters.items()}
        self._study = optuna.create_study(
            study_name=f"seed {spec.seed}",  # Hyperband assigns brackets by name and number
            direction=StudyDirection[spec.direction.upper()],
            pruner=self._pruner(),
        )
        for trial in trials:
            self._study.add_trial(self._frozen(trial))

    def suggest(self, number: int) -> dict[str, Value]:
        """Return the parameters of the next trial."""
        seed = random.Random(f"{self._spec.seed}/{number}").getrandbits(31)  # noqa: S311 - no secret
        if self._spec.searcher == Searcher.TPE:
            self._study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        else:
            self._study.sampler = optuna.samplers.RandomSampler(seed=seed)
        found = self._study.ask(self._distributions).params
        return {name: found[name] for name in self._distributions}

    def judge(self, trial: TrialRecord) -> tuple[str | None, dict[str, Any]]:
        """Return why an active trial does not pass a rung, or None, and its new search state.

        A trial whose reports came so late that it has done all its steps is not pruned.
        """
        failed_at = None
        end = self._spec.max_steps or math.inf
        for step, value in trial.reports:
            if step >= end:
                break
            frozen = copy.copy(self._study.get_trials(deepcopy=False)[trial.number])
            frozen.intermediate_values = {int(step): math.nan if value is None else value}
            if self._study.pruner.prune(self._study, frozen) and trial.reports[-1][0] < end:
                failed_at = step, value
                break
        rungs = _rungs(self._study.get_trials(deepcopy=False)[trial.number].system_attrs)
        state = {**trial.search_state, "rungs": rungs}
        if trial.reports:
            state["judged"] = failed_at[0] if failed_at else trial.reports[-1][0]
        if failed_at is None:
            return None, state
        step, value = failed_at
        if value is None:
            return stored_text(f"Its {self._spec.metric} at step {step:g} is not a number."), state
        rivals = sum(
            f"{_RUNG}{len(rungs) - 1}" in each.system_attrs for each in self._study.get_trials(deepcopy=False)
        )
        best = passing_count(rivals, self._spec.reduction_factor)
        return (
            stored_text(
                f"Its {self._spec.metric} of {value:.6g} at step {step:g} is not among the best {best} of {rivals}."
            ),
            state,
        )

    def passes_now(self, trial: TrialRecord) -> bool:
        """Return True if a paused trial is among the best of its rung by now."""
        rungs = trial.search_state.get("rungs", [])
        if not rungs:
            return True
        key, sign = f"{_RUNG}{len(rungs) - 1}", 1 if self._spec.direction == Direction.MINIMIZE else -1
        rivals = [
            each.system_attrs[key]
            for each in self._study.get_trials(deepcopy=False)
            if key in each.system_attrs
        ]
        cut = rung_cut(rivals, self._spec.reduction_factor, self._spec.direction)
        return bool(sign * rungs[-1] <= sign * cut)

    def importances(self) -> dict[str, float]:
        """Return the share of each parameter in the differences of the metric (PED-ANOVA), greatest first.

        Empty until enough trials have a value.
        """
        complete = self._study.get_trials(deepcopy=False, states=(OptunaState.COMPLETE,))
        names = [name for name, each in self._distributions.items() if not each.single()]
        if len(complete) < 4 or not names:
            return {}
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return optuna.importance.get_param_importances(self._study, evaluator=evaluator, params=names)

    def _pruner(self) -> optuna.pruners.BasePruner:
        spec = self._spec
        if spec.searcher == Searcher.ASHA:
            return optuna.pruners.SuccessiveHalvingPruner(
                min_resource=spec.min_steps, reduction_factor=spec.reduction_factor
            )
        if spec.searcher == Searcher.HYPERBAND:
            return optuna.pruners.HyperbandPruner(
                min_resource=spec.min_steps,
                max_resource=spec.max_steps or spec.min_steps,
                reduction_factor=spec.reduction_factor,
            )
        return optuna.pruners.NopPruner()

    def _frozen(self, trial: TrialRecord) -> optuna.trial.FrozenTrial:
        state = {
            TrialState.COMPLETED: OptunaState.COMPLETE if trial.value is not None else OptunaState.FAIL,
            TrialState.PRUNED: OptunaState.PRUNED,
            TrialState.FAILED: OptunaState.FAIL,
            TrialState.STOPPED: OptunaState.FAIL,
        }.get(trial.state, OptunaState.RUNNING)
        values = {} if trial.step is None or trial.value is None else {int(trial.step): trial.value}
        return optuna.trial.create_trial(
            state=state,
            value=trial.value if state == OptunaState.COMPLETE else None,
            params=dict(trial.parameters),
            distributions=self._distributions,
            intermediate_values=values,
            system_attrs={
                f"{_RUNG}{rung}": value for rung, value in enumerate(trial.search_state.get("rungs", []))
            },
        )


def _distribution(parameter: Parameter) -> BaseDistribution:
    if parameter.choices:
        return CategoricalDistribution(parameter.choices)
    if parameter.is_integer:
        step = int(parameter.step or 1)
        return IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log, step=step)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log, step=parameter.step)


def _rungs(attributes: Mapping[str, Any]) -> list[float]:
    count = sum(name.startswith(_RUNG) for name in attributes)
    return [attributes[f"{_RUNG}{rung}"] for rung in range(count)]
