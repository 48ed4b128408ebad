"""The sweep controller: after a trial reports or ends, and periodically, it takes the next steps of a sweep.

Every step can be repeated: each is a transaction under the lock of the sweep, and rows say what is left.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from itertools import takewhile

from django.db import Error as DatabaseError
from django.db import transaction
from django.db.models import Q

from portal.domain.jobs.parameters import read_parameters
from portal.domain.jobs.reasons import EndReason
from portal.domain.states import DesiredState, JobState
from portal.domain.stored_texts import stored_text
from portal.domain.sweeps.sweeps import (
    ARRAY_SEARCHERS,
    LIVE_TRIAL_STATES,
    PRUNING_SEARCHERS,
    SweepState,
    TrialRecord,
    TrialState,
)
from portal.errors import FairwayError
from portal.failpoints import failpoint
from portal.models import Job, Sweep, Trial, TrialReport
from portal.services.jobs.stored_requests import base_request
from portal.services.jobs.submission import JobRequest, create_jobs, validate_request, value_errors
from portal.services.lifecycle import job_control
from portal.services.sweeps.search import AT_RUNG, SearchDecision, decide, needs_history
from portal.services.sweeps.sweeps import (
    end_sweep,
    end_trial,
    end_trials,
    lock_sweep,
    pause_sweep,
    resume_trial,
    suspend_trial,
    sweep_spec,
)
from portal.services.sweeps.trial_jobs import trial_request

log = logging.getLogger(__name__)

MAX_NEW_JOBS = 100
"""Jobs created in one transaction."""
_JOB_COLUMNS = [each.name for each in Job._meta.concrete_fields if not each.primary_key]
_FOLLOWED_COLUMNS = frozenset({"state", "desired_state", "message"})
ENDED_STATES = {
    JobState.COMPLETED: TrialState.COMPLETED,
    JobState.FAILED: TrialState.FAILED,
    JobState.TIMEOUT: TrialState.FAILED,
    JobState.CANCELLED: TrialState.STOPPED,
}

_JOB_HAS_CHANGED = (
    Q(job__state__in=ENDED_STATES)
    | Q(job__desired_state=DesiredState.SUSPENDED) & ~Q(state=TrialState.PAUSED)
    | ~Q(job__desired_state=DesiredState.SUSPENDED) & Q(state=TrialState.PAUSED)
)
"""Trials for which _follow_jobs has something to do."""


def advance_active_sweeps() -> None:
    """Advance every sweep that has not ended, in case a message was lost."""
    rows = Sweep.objects.filter(state__in=[SweepState.RUNNING.value, SweepState.PAUSED.value])
    for public_id in rows.order_by("id").values_list("public_id", flat=True):
        try:
            advance_sweep(public_id)
        except DatabaseError as error:
            log.warning("the sweep %s was not advanced: %s", public_id, error)


def advance_sweep(public_id: str) -> None:
    """Take the next steps of a sweep: follow its jobs, prune, resume, and create jobs for new trials."""
    found = Sweep.objects.filter(public_id=public_id).first()
    if found is None:
        return
    with transaction.atomic():
        sweep = lock_sweep(found.pk)
        spec = sweep_spec(sweep)
        trials = sweep.trials.select_related("job").order_by("number")
        # of the columns of a job only those of _follow_jobs, since an array may have thousands
        trials = trials.defer(*(f"job__{name}" for name in _JOB_COLUMNS if name not in _FOLLOWED_COLUMNS))
        if not needs_history(spec):
            trials = trials.filter(state__in=LIVE_TRIAL_STATES)
        all_created = spec.searcher in ARRAY_SEARCHERS and sweep.trials.count() == spec.max_trials
        rows = list(trials.filter(_JOB_HAS_CHANGED) if all_created else trials)
        _follow_jobs(rows)
        # an array whose trials all exist has nothing to decide before the last one has ended
        if sweep.state == SweepState.RUNNING and not (all_created and trials.exists()):
            _apply(sweep, rows, _decide(sweep, rows))
    failpoint("sweep.decided")
    while _start_waiting_trials(sweep.pk):
        failpoint("sweep.job_created")


def _follow_jobs(trials: Iterable[Trial]) -> None:
    """Set the states of trials that follow from their jobs."""
    ends = []
    for trial in trials:
        job = trial.job
        if job is None or TrialState(trial.state) not in LIVE_TRIAL_STATES:
            continue
        if ended := ENDED_STATES.get(JobState(job.state)):
            ends.append((trial, ended, job.message))
            continue
        is_suspended = job.desired_state == DesiredState.SUSPENDED
        state = TrialState.PAUSED if is_suspended else TrialState.RUNNING
        if trial.state != state:
            trial.state = state.value
            trial.save(update_fields=["state"])
    end_trials(ends)


def _decide(sweep: Sweep, rows: list[Trial]) -> SearchDecision:
    spec = sweep_spec(sweep)
    reports: dict[int, list[tuple[float, float | None]]] = defaultdict(list)
    judged = {row.pk: row.search_state.get("judged", -1.0) for row in rows if row.state == TrialState.RUNNING}
    if spec.searcher in PRUNING_SEARCHERS:
        found = TrialReport.objects.filter(trial__in=judged).order_by("step")
        for trial, step, value in found.values_list("trial_id", "step", "value"):
            if step > judged[trial]:
                reports[trial].append((step, value))
    records = [
        TrialRecord(
            row.number,
            row.parameters,
            TrialState(row.state),
            row.step,
            row.value,
            row.search_state,
            reports[row.pk],
        )
        for row in rows
    ]
    return decide(spec, read_parameters(sweep.parameters), sweep.points, records, sweep.trials.count())


def _apply(sweep: Sweep, rows: list[Trial], decision: SearchDecision) -> None:
    by_number = {row.number: row for row in rows}
    for number, state in decision.search_states.items():
        row = by_number[number]
        row.search_state = state
        row.save(update_fields=["search_state"])
    for number, why in decision.prune.items():
        row = by_number[number]
        if row.job_id is not None:
            job_control.cancel_job(
                row.job_id, EndReason.PRUNED, actor="", message=stored_text(f"Pruned: {why}")
            )
        end_trial(row, TrialState.PRUNED, why)
    for number, reason in decision.pause.items():
        suspend_trial(by_number[number], "the sweep", {AT_RUNG: True}, reason)
    for number in decision.resume:
        resume_trial(by_number[number], "the sweep")
    Trial.objects.bulk_create(
        Trial(
            sweep=sweep,
            number=new.number,
            parameters=dict(new.parameters),
            parent=None if new.parent is None else by_number[new.parent],
            search_state=dict(new.search_state),
        )
        for new in decision.start
    )
    if decision.is_complete:
        end_sweep(sweep, SweepState.COMPLETED, stored_text("All trials have ended."))


def _start_waiting_trials(pk: int) -> bool:
    """Create the jobs of the next waiting trials; return False if there are none.

    Trials and jobs are written in one transaction, so that a crash leaves both or neither. If the owner may
    not submit the first one any more, the sweep is paused.
    """
    with transaction.atomic():
        sweep = lock_sweep(pk)
        waiting = sweep.trials.filter(state=TrialState.WAITING.value).select_related("parent__job")
        trials = list(waiting.order_by("number")[:MAX_NEW_JOBS])
        if not trials or sweep.state != SweepState.RUNNING:
            return False
        # these differ from the first one in values that need no rows to validate
        similar = takewhile(lambda each: each.parent is None, [] if trials[0].parent else trials[1:])
        base = base_request(sweep)
        requests = [_request(sweep, base, trials[0])]
        valid = takewhile(
            lambda each: not value_errors(each), (_request(sweep, base, each) for each in similar)
        )
        try:
            with transaction.atomic():
                validate_request(sweep.owner, requests[0])
                requests += valid
                jobs = create_jobs(sweep.owner, requests)
        except FairwayError as error:
            pause_sweep(
                sweep, stored_text(f"Trial {trials[0].number} could not be submitted: {error.message}")
            )
            return False
        failpoint("sweep.before_commit")
        started = trials[: len(jobs)]
        for trial, job in zip(started, jobs, strict=True):
            trial.job, trial.state = job, TrialState.RUNNING.value
        Trial.objects.bulk_update(started, ["job", "state"])
    return True


def _request(sweep: Sweep, base: JobRequest, trial: Trial) -> JobRequest:
    parent = trial.parent.job if trial.parent else None
    return trial_request(base, trial.number, trial.parameters, max_steps=sweep.max_steps, parent=parent)
