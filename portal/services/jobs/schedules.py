"""Schedules: their changes, and the submission of a due job exactly once for each due time."""

from __future__ import annotations

import datetime as dt
import logging
from typing import Any

from django.db import Error as DatabaseError
from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.domain.jobs.job_spec import job_fields
from portal.domain.jobs.reasons import EndReason
from portal.domain.jobs.schedules import Overlap, ScheduleSpec, next_due, schedule_errors
from portal.domain.states import LIVE_JOB_STATES, JobKind
from portal.domain.stored_texts import stored_text
from portal.errors import FairwayError, InvalidRequest, Unsatisfiable
from portal.failpoints import failpoint
from portal.models import Job, Schedule, ScheduleRun, User
from portal.services.audit import record_action, record_change
from portal.services.jobs.stored_requests import base_request, request_fields
from portal.services.jobs.submission import JobRequest, create_job, preview_start, validate_request
from portal.services.lifecycle import job_control

log = logging.getLogger(__name__)

LATE_AFTER = dt.timedelta(minutes=5)
MAX_PER_PASS = 500
SPEC_FIELDS = tuple(job_fields(ScheduleSpec))


def check_schedule(user: User, spec: ScheduleSpec, request: JobRequest) -> None:
    """Raise what the creation would raise. Not within a transaction."""
    wrong = schedule_errors(spec, timezone.now())
    if request.kind != JobKind.TRAINING.value:
        wrong["kind"] = _("A schedule submits jobs, not workspaces or services.")
    if request.dependencies:
        wrong["dependencies"] = _("The job of a schedule cannot have dependencies.")
    wrong |= {
        name: _("The job of a schedule cannot have this field.")
        for name, rule in job_fields().items()
        if not rule.copied and not rule.is_default(getattr(request, name))
    }
    if wrong:
        raise InvalidRequest(fields=wrong)
    validate_request(user, request)
    preview_start(user, request)


def do_create_schedule(user: User, spec: ScheduleSpec, request: JobRequest) -> Schedule:
    check_schedule(user, spec, request)
    with transaction.atomic():
        schedule = Schedule.objects.create(
            name=request.name,
            owner=user,
            project=request.project,
            environment=request.environment,
            pool=request.pool,
            template=request.template,
            job=request_fields(request),
            next_at=next_due(spec, timezone.now()),
            **_columns(spec),
        )
        record_action(user, "schedule.create", schedule, after=_columns(spec))
    return schedule


def do_change_schedule(user: User, schedule: Schedule, **changes: Any) -> Schedule:
    """Change fields of ``ScheduleSpec``, or ``enabled``. The owner must be permitted to submit its job."""
    require_permission(user, Permission.CONTROL, schedule)
    with transaction.atomic():
        schedule = _lock(schedule.pk)
        before = _columns(schedule_spec(schedule)) | {"enabled": schedule.enabled}
        spec = ScheduleSpec(
            **_columns(schedule_spec(schedule)) | {k: v for k, v in changes.items() if k != "enabled"}
        )
        if wrong := schedule_errors(spec, timezone.now()):
            raise InvalidRequest(fields=wrong)
        enabled = changes.get("enabled", schedule.enabled)
        if enabled and not schedule.enabled:
            validate_request(schedule.owner, base_request(schedule))
        for name, value in (_columns(spec) | {"enabled": enabled}).items():
            setattr(schedule, name, value)
        schedule.next_at = next_due(spec, timezone.now()) if enabled else None
        schedule.notice = "" if enabled else schedule.notice
        schedule.save()
        after = _columns(spec) | {"enabled": enabled}
        record_change(user, "schedule.change", schedule, before, after, reason="")
    return schedule


def do_delete_schedule(user: User, schedule: Schedule) -> None:
    """Delete a schedule with its history. Its jobs stay."""
    require_permission(user, Permission.CONTROL, schedule)
    with transaction.atomic():
        record_action(user, "schedule.delete", schedule, before=_columns(schedule_spec(schedule)))
        schedule.delete()


def schedule_spec(schedule: Schedule) -> ScheduleSpec:
    return ScheduleSpec(**{name: getattr(schedule, name) for name in SPEC_FIELDS})


def submit_due_jobs() -> None:
    """Submit the job of every schedule that is due. Called by the periodic pass; repeatable."""
    due = Schedule.objects.filter(enabled=True, next_at__lte=timezone.now()).order_by("next_at")
    for pk in list(due.values_list("pk", flat=True)[:MAX_PER_PASS]):
        try:
            submit_due_job(pk)
        except DatabaseError as error:
            log.warning("the schedule %s was not run: %s", pk, error)


def submit_due_job(pk: int) -> None:
    """Submit the job of a schedule for the due time that it waits for, in one transaction with its next due time.

    After a time without a scheduler that is one job, however many due times have passed.
    """
    now = timezone.now()
    with transaction.atomic():
        rows = Schedule.objects.select_for_update(of=("self",), no_key=True, skip_locked=True)
        rows = rows.select_related("owner", "project", "environment", "pool", "template")
        schedule = rows.filter(pk=pk, enabled=True, next_at__lte=now).first()
        if schedule is None or schedule.next_at is None:
            return
        run = ScheduleRun(schedule=schedule, due_at=schedule.next_at)
        schedule.next_at = next_due(schedule_spec(schedule), now)
        if not schedule.runs.filter(due_at=run.due_at).exists():  # after a clock that was set back
            _run(schedule, run)
            run.save()
            failpoint("schedule.job_created")
        schedule.save(update_fields=["enabled", "notice", "next_at"])


def _run(schedule: Schedule, run: ScheduleRun) -> None:
    """Create the job of a run, or write into the run why not; without permissions, disable the schedule."""
    active = list(
        Job.objects.filter(
            schedule_run__schedule=schedule, state__in=[each.value for each in LIVE_JOB_STATES]
        ).order_by("pk")
    )
    if active and schedule.overlap == Overlap.SKIP:
        run.message = stored_text(f"Skipped: the job {active[-1].public_id} has not ended.")
        return
    try:
        request = base_request(schedule)
        validate_request(schedule.owner, request)
    except Unsatisfiable as error:
        run.message = stored_text(f"Not submitted: {error.message}")[:1000]
    except FairwayError as error:
        run.message = stored_text(f"Not submitted: {error.message}")[:1000]
        refused = stored_text(f"Its job was refused for {schedule.owner.username}: {error.message}")
        schedule.enabled, schedule.next_at, schedule.notice = (
            False,
            None,
            stored_text(f"Disabled. {refused}")[:1000],
        )
        record_action(None, "schedule.disable", schedule, after={"enabled": False}, reason=refused)
    else:
        if schedule.overlap == Overlap.REPLACE:
            message = stored_text(f"Replaced by the next run of the schedule {schedule.name}.")
            for job in active:
                job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="", message=message)
        run.job = create_job(schedule.owner, request)
        if timezone.now() - run.due_at > LATE_AFTER:
            run.message = stored_text(
                "Late: no scheduler ran when it was due. Other due times until then are left out."
            )


def _lock(pk: int) -> Schedule:
    rows = Schedule.objects.select_for_update(of=("self",), no_key=True)
    return rows.select_related("owner", "project", "environment", "pool", "template").get(pk=pk)


def _columns(spec: ScheduleSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in SPEC_FIELDS}
