"""Handles jobs whose owner loses the right to run them, in the transaction that revokes the right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from portal.domain.jobs.reasons import EndReason, end_message
from portal.domain.states import LIVE_ATTEMPT_STATES, DesiredState, JobState
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict
from portal.models import Attempt, Job, User
from portal.selectors.jobs.rights import USAGE_COLUMNS, Denial, denials_by_key, usage_from_columns
from portal.services.audit import record_action
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import StopRequest


class QueuedJobs(StrEnum):
    HOLD = "hold"
    CANCEL = "cancel"


class RunningJobs(StrEnum):
    FINISH = "finish"
    STOP = "stop"


class JobChoice(NamedTuple):
    """What to do with affected jobs; by default nothing starts, and nothing is stopped."""

    queued: QueuedJobs = QueuedJobs.HOLD
    running: RunningJobs = RunningJobs.FINISH


DEFAULT_CHOICE = JobChoice()


class ChoiceRequired(Conflict):
    """Jobs would lose a required right and no choice was given; nothing was changed."""

    def __init__(self, queued: int, running: int) -> None:
        super().__init__(
            _("{queued} queued and {running} running jobs would lose the rights they need.").format(
                queued=queued, running=running
            ),
            code="choice_required",
            details={"queued": queued, "running": running},
        )
        self.queued, self.running = queued, running


@contextmanager
def applying_choice(
    actor: User | None, obj: Any, jobs: QuerySet[Job], choice: JobChoice | None
) -> Iterator[None]:
    """Apply ``choice`` to those of ``jobs`` that are no longer permitted after the block has changed rights.

    ``obj`` is the subject of the audit row. Call inside the transaction of the change. Raise ChoiceRequired,
    which undoes the change, if jobs are affected and ``choice`` is None. Suspended jobs are unchanged; they
    cannot be resumed.
    """
    before = _denied_jobs(jobs)
    yield
    lost = {job: denial for job, denial in _denied_jobs(jobs).items() if job not in before}
    if lost:
        _apply_choice(actor, obj, lost, choice)


def _denied_jobs(jobs: QuerySet[Job]) -> dict[int, Denial]:
    live = jobs.filter(
        state__in=(JobState.PENDING.value, JobState.RUNNING.value), desired_state=DesiredState.RUN.value
    )
    return denials_by_key({row["pk"]: usage_from_columns(row) for row in live.values("pk", *USAGE_COLUMNS)})


def _apply_choice(
    actor: User | None, obj: Any, denied: Mapping[int, Denial], choice: JobChoice | None
) -> None:
    """Lock the jobs and their attempts: a start marked before counts as running, and none is marked after."""
    rows = Job.objects.filter(pk__in=denied, desired_state=DesiredState.RUN.value)
    jobs = {job.pk: job for job in rows.select_for_update(no_key=True).order_by("pk")}
    trying = Attempt.objects.filter(job__in=jobs, state__in=LIVE_ATTEMPT_STATES)
    locked = trying.select_for_update(no_key=True).order_by("job_id")
    attempts = {attempt.job_id: attempt for attempt in locked}
    live = [job for job in jobs.values() if job.state == JobState.PENDING or job.pk in attempts]
    running = [job for job in live if job.pk in attempts and attempts[job.pk].start_sent_at is not None]
    queued = [job for job in live if job not in running]
    if choice is None and live:
        raise ChoiceRequired(len(queued), len(running))
    if choice is None or not live:
        return
    name = actor.username if actor else "fairway"
    reason = EndReason.OWNER_NOT_PERMITTED
    why = {job.pk: end_message(reason, detail=denied[job.pk].message) for job in live}
    if choice.queued is QueuedJobs.HOLD:
        unsent = [
            StopRequest(attempts[job.pk].pk, reason, why[job.pk]) for job in queued if job.pk in attempts
        ]
        job_control.request_stops(unsent, actor=name)
        job_control.hold_jobs(
            {job.pk: stored_text(f"Held by {name}. {denied[job.pk]}") for job in queued}, actor=name
        )
    cancelled = queued if choice.queued is QueuedJobs.CANCEL else []
    stopped = running if choice.running is RunningJobs.STOP else []
    for job in [*cancelled, *stopped]:
        job_control.cancel_job(job.pk, reason, actor=name, message=why[job.pk])
    after = {
        "queued": choice.queued.value,
        "queued_jobs": [job.public_id for job in queued],
        "running": choice.running.value,
        "running_jobs": [job.public_id for job in running],
    }
    record_action(actor, "rights.jobs", obj, after=after)
