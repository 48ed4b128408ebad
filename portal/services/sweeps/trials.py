"""Stops, resumes and repeats single trials of a sweep for users."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.domain.jobs.parameters import MAX_TRIALS
from portal.domain.jobs.reasons import EndReason
from portal.domain.stored_texts import stored_text
from portal.domain.sweeps.sweeps import (
    ARRAY_SEARCHERS,
    LIVE_TRIAL_STATES,
    REPEATABLE_TRIAL_STATES,
    SweepState,
    TrialState,
)
from portal.errors import Conflict
from portal.models import Sweep, Trial, User
from portal.selectors.lookup import get_first
from portal.services.audit import record_action
from portal.services.lifecycle import job_control
from portal.services.sweeps.sweeps import announce_sweep, end_trial, lock_sweep, resume_trial

_AT_RUNGS = ("rungs", "judged")
_OF_MEMBER = ("member", "generation")


def do_stop_trial(user: User, sweep: Sweep, number: int) -> Trial:
    """Stop a trial and its job; the sweep goes on. Repeatable."""
    require_permission(user, Permission.CONTROL, sweep)
    reason = EndReason.CANCELLED_BY_USER if sweep.owner_id == user.pk else EndReason.CANCELLED_BY_ADMIN
    with transaction.atomic():
        sweep = lock_sweep(sweep.pk)
        trial = _get_trial(sweep, number)
        if TrialState(trial.state) not in LIVE_TRIAL_STATES:
            return trial
        if trial.job_id is not None:
            job_control.cancel_job(trial.job_id, reason, actor=user.username)
        end_trial(trial, TrialState.STOPPED, stored_text(f"Stopped by {user.username}."))
        record_action(user, "sweep.stop_trial", sweep, after={"trial": number})
        announce_sweep(sweep)
    return trial


def do_resume_trial(user: User, sweep: Sweep, number: int) -> Trial:
    """Resume a paused trial, also one that did not pass its rung."""
    require_permission(user, Permission.CONTROL, sweep)
    with transaction.atomic():
        sweep = lock_sweep(sweep.pk)
        _require_running(sweep)
        trial = _get_trial(sweep, number)
        if trial.state != TrialState.PAUSED:
            raise Conflict(
                _("Trial {number} is {state}, not paused.").format(number=number, state=trial.state.lower()),
                code="trial_not_paused",
            )
        resume_trial(trial, user.username)
        record_action(user, "sweep.resume_trial", sweep, after={"trial": number})
        announce_sweep(sweep)
    return trial


def do_repeat_trial(user: User, sweep: Sweep, number: int) -> Trial:
    """Add a trial with the parameters of one that has failed, was stopped or pruned; the budget grows by one.

    Raise Conflict while a trial with these parameters has not ended, so a request sent twice adds one.
    After a pruned trial it starts from the newest valid checkpoint of that, and is judged at the next rung.
    """
    require_permission(user, Permission.CONTROL, sweep)
    with transaction.atomic():
        sweep = lock_sweep(sweep.pk)
        _require_running(sweep)
        trial = _get_trial(sweep, number)
        if TrialState(trial.state) not in REPEATABLE_TRIAL_STATES:
            raise Conflict(
                _(
                    "Trial {number} is {state}; only failed, stopped and pruned trials can be repeated."
                ).format(number=number, state=trial.state.lower()),
                code="trial_not_repeatable",
            )
        live = sweep.trials.filter(state__in=[each.value for each in LIVE_TRIAL_STATES])
        if (same := live.filter(parameters=trial.parameters).first()) is not None:
            raise Conflict(
                _("Trial {number} has the same parameters and has not ended.").format(number=same.number),
                code="trial_repeated",
            )
        count = sweep.trials.count()
        if sweep.searcher in ARRAY_SEARCHERS and count < sweep.max_trials:
            raise Conflict(
                _("Trials of an array can be repeated once all have been created."), code="trials_missing"
            )
        if sweep.max_trials >= MAX_TRIALS:
            raise Conflict(
                _("A sweep has at most {max_trials} trials.").format(max_trials=MAX_TRIALS),
                code="too_many_trials",
            )
        is_pruned = trial.state == TrialState.PRUNED
        repeated = Trial.objects.create(
            sweep=sweep,
            number=count,
            parameters=trial.parameters,
            parent=trial if is_pruned else trial.parent,
            search_state=_inherited(trial, (*_OF_MEMBER, *(_AT_RUNGS if is_pruned else ()))),
        )
        sweep.max_trials += 1
        sweep.save(update_fields=["max_trials"])
        record_action(user, "sweep.repeat_trial", sweep, after={"trial": number, "repeated_as": count})
        announce_sweep(sweep)
    return repeated


def _inherited(trial: Trial, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in trial.search_state.items() if name in names}


def _get_trial(sweep: Sweep, number: int) -> Trial:
    return get_first(sweep.trials.filter(number=number), _("There is no such trial."))


def _require_running(sweep: Sweep) -> None:
    if sweep.state != SweepState.RUNNING:
        raise Conflict(
            _("The sweep is {state}, not running.").format(state=sweep.state.lower()),
            code="sweep_not_running",
        )
