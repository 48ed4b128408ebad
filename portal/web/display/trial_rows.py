"""Trials of a sweep as rows: state, values, why each is as it is, and what may be done with it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.domain.jobs.parameters import Value, format_value
from portal.domain.states import JobState
from portal.domain.sweeps.sweep_progress import Rung, SweepProgress, TrialUse
from portal.domain.sweeps.sweeps import (
    ARRAY_SEARCHERS,
    LIVE_TRIAL_STATES,
    REPEATABLE_TRIAL_STATES,
    Direction,
    SweepState,
    TrialState,
)
from portal.models import Sweep, Trial
from portal.stored_texts import translate_stored
from portal.web.display.formatting import metric_value
from portal.web.display.job_rows import current_verdict

TRIAL_DISPLAY = {
    TrialState.WAITING: ("waiting", gettext_noop("Next")),
    TrialState.RUNNING: ("running", gettext_noop("Active")),
    TrialState.PAUSED: ("stopped", gettext_noop("Paused")),
    TrialState.COMPLETED: ("done", gettext_noop("Completed")),
    TrialState.PRUNED: ("stopped", gettext_noop("Pruned")),
    TrialState.FAILED: ("failed", gettext_noop("Failed")),
    TrialState.STOPPED: ("stopped", gettext_noop("Stopped")),
}


@dataclass(frozen=True)
class TrialRow:
    trial: Trial
    symbol: tuple[str, str]
    values: list[tuple[str, str]]
    is_best: bool
    why: str
    starts: tuple[dt.datetime, dt.datetime] | None
    """p10 and p90 of the start of its job while it waits; None without a forecast."""
    is_live: bool
    may_repeat: bool

    @property
    def waits(self) -> bool:
        return self.symbol[0] == "waiting"


@dataclass(frozen=True)
class TrialContext:
    """What the rows of one sweep share."""

    sweep: Sweep
    names: Sequence[str]
    progress: SweepProgress
    places: dict[int, str]
    may_repeat: bool


def trial_context(
    sweep: Sweep, names: Sequence[str], progress: SweepProgress, uses: Sequence[TrialUse]
) -> TrialContext:
    sign = 1 if sweep.direction == Direction.MINIMIZE else -1
    ended = [each for each in uses if each.state is TrialState.COMPLETED and each.value is not None]
    ended.sort(key=lambda each: (sign * (each.value or 0.0), each.number))
    places = dict(zip([each.number for each in ended], ["", _("second best"), _("third best")], strict=False))
    all_created = sweep.searcher not in ARRAY_SEARCHERS or len(uses) >= sweep.max_trials
    return TrialContext(sweep, names, progress, places, all_created and sweep.state == SweepState.RUNNING)


def trial_row(trial: Trial, context: TrialContext) -> TrialRow:
    best, state = context.progress.best, TrialState(trial.state)
    waits = state is TrialState.RUNNING and trial.job is not None and trial.job.state == JobState.PENDING
    verdict = current_verdict(trial.job) if waits and trial.job else None
    is_best = best is not None and best.number == trial.number
    return TrialRow(
        trial,
        ("waiting", _("Queued")) if waits else TRIAL_DISPLAY[state],
        [(name, short_value(trial.parameters[name])) for name in context.names],
        is_best,
        _("best so far") if is_best else _reason(trial, context, verdict.message if verdict else ""),
        (verdict.p10_at, verdict.p90_at) if verdict and verdict.p10_at and verdict.p90_at else None,
        state in LIVE_TRIAL_STATES,
        context.may_repeat and state in REPEATABLE_TRIAL_STATES,
    )


def short_value(value: Value) -> str:
    return metric_value(value) if isinstance(value, float) else format_value(value)


def _reason(trial: Trial, context: TrialContext, verdict: str) -> str:
    if place := context.places.get(trial.number):
        return place
    if verdict:
        return translate_stored(verdict)
    if trial.message and trial.state != TrialState.COMPLETED:
        return translate_stored(trial.message)
    if trial.state == TrialState.RUNNING and (text := _next_rung(trial, context.progress.rungs)):
        return text
    return _("continues trial {number}").format(number=trial.parent.number) if trial.parent else ""


def _next_rung(trial: Trial, rungs: Sequence[Rung]) -> str:
    ahead = [each for each in rungs if each.step > (trial.step or 0.0)]
    if not ahead:
        return _("passed all rungs") if rungs else ""
    if ahead[0].cut is None:
        return _("next rung at step {step}").format(step=ahead[0].step)
    return _("next rung at step {step}, cut {cut:.4g}").format(step=ahead[0].step, cut=ahead[0].cut)
