"""Creates sweeps, and stops, pauses, resumes and changes them for users."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.domain.jobs.job_spec import job_fields
from portal.domain.jobs.parameters import (
    MAX_TRIALS,
    Value,
    grid_points,
    parameter_use_error,
    read_parameters,
    read_points,
)
from portal.domain.jobs.reasons import EndReason
from portal.domain.jobs.template_parameters import read_template_parameters, swept_parameters_error
from portal.domain.states import JobKind
from portal.domain.stored_texts import stored_text
from portal.domain.sweeps.sweeps import (
    ACTIVE_TRIAL_STATES,
    LIVE_TRIAL_STATES,
    Searcher,
    SweepSpec,
    SweepState,
    TrialState,
    sweep_errors,
)
from portal.errors import Conflict, InvalidRequest
from portal.live_events import publish_on_commit
from portal.models import Environment, NodePool, Project, Sweep, Trial, User
from portal.outbox import enqueue_task
from portal.selectors.nodes.resources_per_gpu import list_resources_per_gpu, proportional_amounts
from portal.services.audit import record_action, record_change
from portal.services.jobs.feasibility import largest_node_gpus
from portal.services.jobs.stored_requests import request_fields
from portal.services.jobs.submission import JobRequest, preview_start, validate_request
from portal.services.lifecycle import job_control, suspension
from portal.services.sweeps.determined import ImportedExperiment
from portal.services.sweeps.trial_jobs import trial_request

MAX_NAME_LENGTH = 94
"""The jobs of trials append ``-9999``."""
PAUSED_WITH_SWEEP = "paused_with_sweep"
"""Key of the search state of a trial that is resumed with its sweep."""


def check_sweep(
    user: User,
    spec: SweepSpec,
    request: JobRequest,
    parameters: Mapping[str, Any],
    points: Sequence[Mapping[str, Value]],
) -> None:
    """Raise what the creation would raise. Not within a transaction."""
    wrong = sweep_errors(spec, parameters, list(points))
    if request.kind != JobKind.TRAINING.value:
        wrong["kind"] = _("The trials of a sweep are jobs, not workspaces.")
    if len(request.name) > MAX_NAME_LENGTH:
        wrong["name"] = _("The name of a sweep has at most {max_name_length} characters.").format(
            max_name_length=MAX_NAME_LENGTH
        )
    if request.dependencies:
        wrong["dependencies"] = _("The trials of a sweep cannot have dependencies.")
    if request.held:
        wrong["held"] = _("Trials cannot be held; pause the sweep.")
    if not wrong and request.template and request.template.parameters:
        declared = read_template_parameters(request.template.parameters)
        if fault := swept_parameters_error(declared, request.template.fields, points or [parameters]):
            wrong["parameters"] = fault
    if not wrong:
        names = points[0] if points else parameters
        use = {"reads_environment": spec.reads_environment}
        command = [word for role in request.roles for word in role.command] or request.command
        if fault := parameter_use_error(command, request.env.values(), names, **use):
            wrong["parameters"] = fault
    if wrong:
        raise InvalidRequest(fields=wrong)
    first = points[0] if points else _first_values(parameters)
    trial = trial_request(request, 0, first, max_steps=spec.max_steps)
    validate_request(user, trial)
    preview_start(user, trial)


def do_create_sweep(
    user: User,
    spec: SweepSpec,
    request: JobRequest,
    parameters: Mapping[str, Any],
    points: Sequence[Mapping[str, Value]] = (),
) -> Sweep:
    """Create a sweep; its trials are created one after another, also if this process ends now."""
    check_sweep(user, spec, request, parameters, points)
    columns = asdict(spec) | {"seed": secrets.randbelow(2**31) if spec.seed is None else spec.seed}
    columns["max_trials"] = _trial_count(spec, parameters, points)
    with transaction.atomic():
        sweep = Sweep.objects.create(
            name=request.name,
            owner=user,
            project=request.project,
            environment=request.environment,
            pool=request.pool,
            template=request.template,
            job=request_fields(request),
            parameters=dict(parameters),
            points=read_points(list(points)) if points else [],
            **columns,
        )
        record_action(
            user, "sweep.create", sweep, after={"searcher": sweep.searcher, "trials": sweep.max_trials}
        )
        announce_sweep(sweep)
        return sweep


def do_import_experiment(
    user: User,
    experiment: ImportedExperiment,
    *,
    project: Project,
    environment: Environment,
    pool: NodePool | None,
    submit: bool,
) -> Sweep | None:
    """Create the sweep of an experiment file, or only check it and return None.

    The GPUs of a trial that no node has are divided into tasks, and a task gets its share of CPU and memory, which
    Determined does not limit.
    """
    experiment.spread(largest_node_gpus(environment.runtime, pool))
    gpus, pool_id = experiment.job["gpus_per_task"], pool.public_id if pool else ""
    shares = list_resources_per_gpu(user)
    job = proportional_amounts(shares, pool=pool_id, gpus_per_task=gpus) | experiment.job
    if "shm_mib" in experiment.job:  # it is part of the memory
        job["memory_mib"] = max(job.get("memory_mib", 0), job["shm_mib"] + JobRequest.memory_mib)
    experiment.job = job
    request = JobRequest(**job, project=project, environment=environment, pool=pool)
    spec = SweepSpec(**experiment.sweep)
    if submit:
        return do_create_sweep(user, spec, request, experiment.parameters)
    check_sweep(user, spec, request, experiment.parameters, ())
    return None


def sweep_spec(sweep: Sweep) -> SweepSpec:
    return SweepSpec(**{name: getattr(sweep, name) for name in job_fields(SweepSpec)})


def do_stop_sweep(user: User, sweep: Sweep) -> Sweep:
    """Stop a sweep and all its trials. Repeatable."""
    require_permission(user, Permission.CONTROL, sweep)
    reason = EndReason.CANCELLED_BY_USER if sweep.owner_id == user.pk else EndReason.CANCELLED_BY_ADMIN
    with transaction.atomic():
        sweep = lock_sweep(sweep.pk)
        if SweepState(sweep.state) in (SweepState.COMPLETED, SweepState.STOPPED):
            return sweep
        for trial in sweep.trials.filter(state__in=LIVE_TRIAL_STATES).order_by("number"):
            if trial.job_id is not None:
                job_control.cancel_job(trial.job_id, reason, actor=user.username)
            end_trial(trial, TrialState.STOPPED, stored_text(f"Stopped by {user.username}."))
        end_sweep(sweep, SweepState.STOPPED, stored_text(f"Stopped by {user.username}."))
        record_action(user, "sweep.stop", sweep)
    return sweep


def do_pause_sweep(user: User, sweep: Sweep) -> Sweep:
    """Suspend the jobs of a sweep, and start no more trials until it is resumed. Repeatable."""
    require_permission(user, Permission.CONTROL, sweep)
    with transaction.atomic():
        sweep = lock_sweep(sweep.pk)
        if sweep.state == SweepState.PAUSED:
            return sweep
        _require_live(sweep)
        for trial in sweep.trials.filter(state__in=ACTIVE_TRIAL_STATES, job__isnull=False).order_by("number"):
            suspend_trial(trial, user.username, {PAUSED_WITH_SWEEP: True})
        pause_sweep(sweep, stored_text(f"Paused by {user.username}."))
        record_action(user, "sweep.pause", sweep)
    return sweep


def do_resume_sweep(user: User, sweep: Sweep) -> Sweep:
    """Resume a paused sweep, and the jobs that were suspended with it."""
    require_permission(user, Permission.CONTROL, sweep)
    with transaction.atomic():
        sweep = lock_sweep(sweep.pk)
        if sweep.state != SweepState.PAUSED:
            raise Conflict(
                _("The sweep is {state}, not paused.").format(state=sweep.state.lower()),
                code="sweep_not_paused",
            )
        for trial in sweep.trials.filter(state=TrialState.PAUSED.value).order_by("number"):
            if trial.search_state.get(PAUSED_WITH_SWEEP):
                resume_trial(trial, user.username)
        sweep.state, sweep.message = SweepState.RUNNING.value, ""
        sweep.save(update_fields=["state", "message"])
        record_action(user, "sweep.resume", sweep)
        announce_sweep(sweep)
    return sweep


def do_change_sweep(
    user: User, sweep: Sweep, *, max_parallel: int | None = None, max_trials: int | None = None
) -> Sweep:
    """Change the number of parallel trials or the budget. Running trials are not stopped."""
    require_permission(user, Permission.CONTROL, sweep)
    given = {"max_parallel": max_parallel, "max_trials": max_trials}
    changes = {name: value for name, value in given.items() if value is not None}
    rules = job_fields(SweepSpec)
    wrong = {name: error for name, value in changes.items() if (error := rules[name].error_of(value))}
    if max_trials is not None and sweep.searcher in (Searcher.LIST, Searcher.GRID):
        wrong["max_trials"] = _("The size of an array cannot change.")
    if wrong:
        raise InvalidRequest(fields=wrong)
    with transaction.atomic():
        sweep = lock_sweep(sweep.pk)
        _require_live(sweep)
        before = {name: getattr(sweep, name) for name in changes}
        for name, value in changes.items():
            setattr(sweep, name, value)
        sweep.save(update_fields=list(changes))
        record_change(user, "sweep.change", sweep, before, changes, reason="")
        announce_sweep(sweep)
    return sweep


# -- for the controller: in a transaction, with the sweep locked ---------------------------------------------


def lock_sweep(pk: int) -> Sweep:
    """Return the sweep, locked. All states of its trials are written under this lock."""
    rows = Sweep.objects.select_for_update(of=("self",), no_key=True)
    return rows.select_related("owner", "project", "environment", "pool", "template").get(pk=pk)


def announce_sweep(sweep: Sweep) -> None:
    """Request the next steps of a sweep, and refresh open pages."""
    enqueue_task("scheduler.advance_sweep", [sweep.public_id], "nodes")
    data = {"kind": "sweep_state", "sweep": sweep.public_id, "state": sweep.state, "message": sweep.message}
    publish_on_commit(f"project.{sweep.project.public_id}", data)


def pause_sweep(sweep: Sweep, message: str) -> None:
    sweep.state, sweep.message = SweepState.PAUSED.value, message[:1000]
    sweep.save(update_fields=["state", "message"])
    announce_sweep(sweep)


def end_sweep(sweep: Sweep, state: SweepState, message: str) -> None:
    sweep.state, sweep.message, sweep.ended_at = state.value, message, timezone.now()
    sweep.save(update_fields=["state", "message", "ended_at"])
    announce_sweep(sweep)


def end_trial(trial: Trial, state: TrialState, message: str) -> None:
    end_trials([(trial, state, message)])


def end_trials(ends: Sequence[tuple[Trial, TrialState, str]]) -> None:
    """Store that trials ended, each with its state and message, in one statement."""
    now = timezone.now()
    for trial, state, message in ends:
        trial.state, trial.message, trial.ended_at = state.value, message[:500], now
    Trial.objects.bulk_update([trial for trial, _, _ in ends], ["state", "message", "ended_at"])


def suspend_trial(trial: Trial, actor: str, flags: Mapping[str, bool], message: str = "") -> None:
    """Suspend the job of a trial; nothing changes if it is about to end."""
    assert trial.job_id is not None  # noqa: S101
    try:
        suspension.suspend_job(trial.job_id, actor=actor, message=message)
    except Conflict:
        return
    trial.state, trial.message = TrialState.PAUSED.value, message[:500]
    trial.search_state = {**trial.search_state, **flags}
    trial.save(update_fields=["state", "message", "search_state"])


def resume_trial(trial: Trial, actor: str) -> None:
    """Resume the job of a paused trial; nothing changes if it is not suspended any more."""
    assert trial.job_id is not None  # noqa: S101
    try:
        suspension.resume_job(trial.job_id, actor=actor)
    except Conflict:
        return
    kept = ("rungs", "judged", "member", "generation")
    trial.search_state = {key: value for key, value in trial.search_state.items() if key in kept}
    trial.state, trial.message = TrialState.RUNNING.value, ""
    trial.save(update_fields=["state", "message", "search_state"])


def _require_live(sweep: Sweep) -> None:
    if SweepState(sweep.state) in (SweepState.COMPLETED, SweepState.STOPPED):
        raise Conflict(
            _("The sweep has already ended: {state}.").format(state=sweep.state.lower()), code="sweep_ended"
        )


def _first_values(parameters: Mapping[str, Any]) -> dict[str, Value]:
    found = read_parameters(parameters)
    return {name: each.choices[0] if each.choices else each.number(each.low) for name, each in found.items()}


def _trial_count(
    spec: SweepSpec, parameters: Mapping[str, Any], points: Sequence[Mapping[str, Value]]
) -> int:
    if spec.searcher == Searcher.GRID:
        return len(grid_points(read_parameters(parameters)))
    return len(points) or spec.max_trials or MAX_TRIALS
