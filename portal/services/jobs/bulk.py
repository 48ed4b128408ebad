"""One action on several jobs: which of them it can change, why not the others, and the result of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.access import Permission, permitted_job_ids
from portal.domain.states import TERMINAL_JOB_STATES, DesiredState, JobKind, JobState
from portal.errors import FairwayError, InvalidRequest
from portal.models import Job, User
from portal.services.jobs.changes import change_refusal, do_change_job
from portal.services.jobs.submission import (
    check_resubmission,
    do_cancel_job,
    do_hold_job,
    do_resubmit_job,
    do_resume_job,
    do_suspend_job,
)

MAX_BULK_JOBS = 100


@dataclass(frozen=True)
class BulkAction:
    """``refusal`` says why a job that the user controls cannot be changed now, or None.

    ``parameter`` is the name of the value that it needs, ``priority`` or ``project``.
    """

    label: str
    done: str
    refusal: Callable[[User, Job], str | None]
    perform: Callable[[User, Job, Any], Job]
    parameter: str = ""


@dataclass(frozen=True)
class BulkResult:
    """``refusal`` is blank if the job was, or can be, changed. ``job`` is then the changed or the new one."""

    job: Job
    refusal: str = ""

    @property
    def changed(self) -> bool:
        return not self.refusal


def _has_ended(job: Job) -> bool:
    return JobState(job.state) in TERMINAL_JOB_STATES or job.desired_state == DesiredState.CANCELLED


def _stop_refusal(_user: User, job: Job) -> str | None:
    return _("It has ended or is stopping.") if _has_ended(job) else None


def _requeue_refusal(user: User, job: Job) -> str | None:
    if job.kind != JobKind.TRAINING.value:
        return _("Only training jobs can be requeued.")
    if job.is_placeholder:
        return _("It was adopted from a container and could not start again.")
    if JobState(job.state) in TERMINAL_JOB_STATES:
        try:
            check_resubmission(user, job)
        except FairwayError as refused:
            return refused.message
        return None
    if job.state == JobState.PENDING:
        return _("It waits in the queue.")
    return _stop_refusal(user, job)


def _requeue(user: User, job: Job, _: Any) -> Job:
    """Submit an ended job again; return a running or suspended one to the queue."""
    if JobState(job.state) in TERMINAL_JOB_STATES:
        return do_resubmit_job(user, job)
    with transaction.atomic():
        if job.desired_state != DesiredState.SUSPENDED:
            job = do_suspend_job(user, job)
        return do_resume_job(user, job)


def _hold_refusal(user: User, job: Job) -> str | None:
    return _("It is held already.") if job.held else _stop_refusal(user, job)


def _release_refusal(user: User, job: Job) -> str | None:
    return _stop_refusal(user, job) if job.held else _("It is not held.")


BULK_ACTIONS: Mapping[str, BulkAction] = {
    "stop": BulkAction(
        gettext_noop("Stop"),
        gettext_noop("stopped"),
        _stop_refusal,
        lambda user, job, _: do_cancel_job(user, job),
    ),
    "requeue": BulkAction(gettext_noop("Requeue"), gettext_noop("requeued"), _requeue_refusal, _requeue),
    "hold": BulkAction(
        gettext_noop("Hold"),
        gettext_noop("held"),
        _hold_refusal,
        lambda user, job, _: do_hold_job(user, job, True),
    ),
    "release": BulkAction(
        gettext_noop("Release"),
        gettext_noop("released"),
        _release_refusal,
        lambda user, job, _: do_hold_job(user, job, False),
    ),
    "priority": BulkAction(
        gettext_noop("Set the priority of"),
        gettext_noop("changed"),
        lambda _, job: change_refusal(job, ["priority"]),
        lambda user, job, value: do_change_job(user, job, {"priority": value}),
        "priority",
    ),
    "move": BulkAction(
        gettext_noop("Move"),
        gettext_noop("moved"),
        lambda _, job: change_refusal(job, ["project"]),
        lambda user, job, value: do_change_job(user, job, {"project": value}),
        "project",
    ),
}


def check_bulk(user: User, jobs: Sequence[Job], action: str) -> list[BulkResult]:
    """Return which of the jobs the action can change now, in the given order."""
    if len(jobs) > MAX_BULK_JOBS:
        raise InvalidRequest(
            fields={"jobs": _("At most {max_bulk_jobs} jobs at once.").format(max_bulk_jobs=MAX_BULK_JOBS)}
        )
    controlled = permitted_job_ids(user, Permission.CONTROL, jobs)
    rule = BULK_ACTIONS[action]
    denied = _("Only its owner and managers of its project may change it.")
    return [
        BulkResult(job, (rule.refusal(user, job) or "") if job.pk in controlled else denied) for job in jobs
    ]


def do_bulk(user: User, jobs: Sequence[Job], action: str, value: Any = None) -> list[BulkResult]:
    """Change the jobs that can be changed, one after the other; each succeeds or is refused on its own."""
    results = []
    for found in check_bulk(user, jobs, action):
        if not found.refusal:
            try:
                found = BulkResult(BULK_ACTIONS[action].perform(user, found.job, value))
            except FairwayError as refused:
                found = BulkResult(found.job, refused.message)
        results.append(found)
    return results
