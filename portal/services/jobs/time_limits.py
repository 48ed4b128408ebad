"""Time limits of running jobs: warnings before the end, and requests for extensions.

An extension is granted at once if the scheduler confirms that no job is delayed. Otherwise, or without an
answer, it is a request (``portal.services.requests.user_requests``). Times are the database's.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Case, Exists, F, FloatField, IntegerField, OuterRef, QuerySet, Value, When
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, Least, Now
from django.utils.translation import gettext as _

from portal.access import Permission, project_parents, require_permission
from portal.domain.formatting import format_duration
from portal.domain.jobs.job_spec import MAX_TIME_LIMIT_S
from portal.domain.notices.notices import NoticeKind
from portal.domain.projects.project_tree import path_to_root
from portal.domain.requests.user_requests import RequestKind, RequestState
from portal.domain.states import AttemptState, DesiredState
from portal.domain.stored_texts import stored_text
from portal.engine_client import query_delay_impact
from portal.errors import Conflict, InvalidRequest
from portal.models import Attempt, Job, JobEvent, NodePool, User, UserRequest
from portal.outbox import trigger_cycle
from portal.selectors.jobs.time_limits import attempts_with_limit, extension_allowance_s
from portal.selectors.scheduling.settings import effective_pool_settings
from portal.services.audit import record_action
from portal.services.lifecycle.state_events import record_owner_event
from portal.services.notices.write import notify_job_owner

WARNING_EVENT = "time_limit_warning"
MIN_EXTENSION_S = 60
MAX_LISTED_DELAYS = 20
BATCH_SIZE = 500
"""Maximum number of warnings per pass."""


# -- warnings --------------------------------------------------------------------------------------


def warn_before_ends() -> int:
    """Warn once about each approaching end; return how many. After an extension the job is warned again."""
    rules = effective_pool_settings(NodePool.objects.all())
    leads = {pool: Value(float(settings["time_limit_warning_s"])) for pool, settings in rules.items()}
    cases = [When(pool=pool, then=lead_s) for pool, lead_s in leads.items()]
    lead = Case(*cases, default=Value(0.0), output_field=FloatField())
    half = Cast(F("job__time_limit_s"), FloatField()) / 2.0
    reported = _warnings().filter(
        job=OuterRef("job_id"), attempt=OuterRef("pk"), limit_s=OuterRef("job__time_limit_s")
    )
    begin = Now() + F("lead") * Value(dt.timedelta(seconds=1))
    limited = attempts_with_limit().annotate(lead=Least(lead, half))
    near = limited.filter(~Exists(reported), ends_at__lte=begin, lead__gt=0.0)
    found = list(near.values_list("pk", flat=True)[:BATCH_SIZE])
    return sum(_warn(attempt) for attempt in found)


def _warnings() -> QuerySet[Any]:
    """Return earlier warnings, each with the limit that it was about."""
    return JobEvent.objects.filter(kind=WARNING_EVENT).annotate(
        limit_s=Cast(KeyTextTransform("limit_s", "details"), IntegerField())
    )


def _warn(attempt_id: int) -> bool:
    """Write the event, unless the attempt has changed or another pass did it."""
    with transaction.atomic():
        rows = attempts_with_limit().annotate(now=Now()).select_for_update(of=("self",), no_key=True)
        row = rows.select_related("job__owner", "job__project").filter(pk=attempt_id).first()
        if row is None:
            return False
        job, facts = row.job, {"limit_s": row.job.time_limit_s, "ends_at": row.ends_at.isoformat()}
        if _warnings().filter(job=job, attempt=row, limit_s=job.time_limit_s).exists():
            return False
        left_s = max(0.0, (row.ends_at - row.now).total_seconds())
        message = stored_text(
            f"Its time limit of {format_duration(job.time_limit_s or 0)} ends it in {format_duration(left_s)}; "
            f"then it is stopped and has {job.termination_grace_s} s to save its work."
        )
        record_owner_event(row, WARNING_EVENT, message, details=facts)
        title = stored_text(f"{job.name} ends in {format_duration(left_s)}")
        notify_job_owner(job, NoticeKind.TIME_LIMIT_WARNING, title, message)
        return True


# -- extensions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExtensionCheck:
    """A request for more time that may be made, and what the scheduler says it delays; None if it does not answer."""

    attempt: Attempt
    limit_s: int | None
    delays: dict[str, Any] | None


def prepare_extension(user: User, job: Job, extra_s: int, reason: str = "") -> ExtensionCheck:
    """Check a request for more time, and ask the scheduler what it delays. Must not run in a transaction.

    Raise as ``do_request_extension`` does.
    """
    require_permission(user, Permission.CONTROL, job)
    attempt = _running_attempt(job)
    max_s = float(effective_pool_settings([attempt.pool])[attempt.pool_id]["max_extension_s"])
    most_s = min(extension_allowance_s(job, max_s), MAX_TIME_LIMIT_S - (job.time_limit_s or 0))
    if most_s < MIN_EXTENSION_S:
        message = _("No extension is possible; the policy allows {limit} in total.").format(
            limit=format_duration(max_s)
        )
        raise InvalidRequest(fields={"extra_s": message})
    if not MIN_EXTENSION_S <= extra_s <= most_s:
        low, high = format_duration(MIN_EXTENSION_S), format_duration(most_s)
        raise InvalidRequest(
            fields={"extra_s": _("At least {low}, at most {high} may be added.").format(low=low, high=high)}
        )
    if UserRequest.objects.filter(job=job, state=RequestState.OPEN.value).exists():
        raise Conflict(_("An extension request is already pending."), code="extension_pending")
    end_s = attempt.ends_at.timestamp()
    delays = query_delay_impact(job.public_id, end_s, end_s + extra_s)
    return ExtensionCheck(attempt, job.time_limit_s, delays)


def do_request_extension(
    user: User, job: Job, extra_s: int, reason: str = "", prepared: ExtensionCheck | None = None
) -> UserRequest:
    """Extend the limit of a running job if nothing is delayed, else create a request to be decided.

    ``extra_s`` is at least 60 and at most what the policy leaves. Without ``prepared``, it must not run in a
    transaction, because the scheduler is queried. Raise InvalidRequest by field, Conflict if the job runs without a
    limit or has a pending request.
    """
    prepared = prepared or prepare_extension(user, job, extra_s, reason)
    attempt, limit_s = prepared.attempt, prepared.limit_s
    asked = UserRequest(
        kind=RequestKind.TIME.value,
        job=job,
        attempt=attempt,
        requested_by=user,
        extra_s=extra_s,
        reason=reason[:500],
        **_impact_columns(job, prepared.delays),
    )
    try:
        with transaction.atomic():
            locked = _lock_job(job.pk, attempt)
            if locked.time_limit_s != limit_s:
                raise Conflict(_("Its time limit has changed; reload and try again."), code="job_changed")
            if asked.has_no_impact:
                asked.state = RequestState.APPROVED.value
            asked.job = locked
            asked.save()
            asked.refresh_from_db(fields=["requested_at"])
            if asked.has_no_impact:
                _extend_limit(user, attempt, extra_s, _NO_DELAY, reason)
            else:
                message = stored_text(
                    f"An extension by {format_duration(extra_s)} was requested. {_delay_message(asked)}"
                )
                record_owner_event(attempt, "time_asked", message, user.username)
    except IntegrityError as error:
        raise Conflict(_("An extension request is already pending."), code="extension_pending") from error
    return asked


def lock_extended_job(asked: UserRequest) -> None:
    """Lock the job of a request for more time, before the request itself. Raise Conflict if it has ended."""
    attempt, _ = _extension(asked)
    _lock_job(attempt.job_id, attempt)


def approve_extension(user: User, asked: UserRequest, answer: str) -> None:
    """Extend the limit of the locked job. Raise Conflict if it would exceed the maximum."""
    attempt, extra_s = _extension(asked)
    if (attempt.job.time_limit_s or 0) + extra_s > MAX_TIME_LIMIT_S:
        raise Conflict(_("The new limit would exceed the maximum time limit."), code="limit_too_long")
    _extend_limit(user, attempt, extra_s, _delay_message(asked), answer)


def record_denied_extension(user: User, asked: UserRequest, answer: str) -> None:
    attempt, extra_s = _extension(asked)
    by, reason = format_duration(extra_s), answer[:300]
    message = stored_text(f"The extension by {by} was denied{f': {reason}' if reason else '.'}")
    record_owner_event(attempt, "time_refused", message, user.username)


def _extension(asked: UserRequest) -> tuple[Attempt, int]:
    if asked.attempt is None or asked.extra_s is None:
        raise ValueError("this is no request for more time")
    return asked.attempt, asked.extra_s


def _running_attempt(job: Job) -> Any:
    """Return the attempt that runs with the job's limit, with ``ends_at``."""
    row = attempts_with_limit().select_related("pool", "job").filter(job=job).first()
    if row is None or job.desired_state != DesiredState.RUN:
        raise Conflict(_("It is not running with a time limit."), code="no_time_limit")
    return row


def _lock_job(job_id: int, attempt: Attempt) -> Job:
    """Lock the job if this attempt of it runs and is not stopping, and set it there. Raise Conflict otherwise."""
    job = Job.objects.select_for_update(of=("self",), no_key=True).get(pk=job_id)
    live = Attempt.objects.select_for_update(no_key=True).get(pk=attempt.pk)
    if live.state != AttemptState.RUNNING or live.stop_requested_at is not None or job.time_limit_s is None:
        raise Conflict(_("It has ended or is stopping."), code="job_ended")
    attempt.job = job
    return job


def _impact_columns(job: Job, impact: dict[str, Any] | None) -> dict[str, Any]:
    """Return the scheduler's answer as columns of the request."""
    if impact is None or not (impact["whole"] or impact["delays"] or impact["reservations"]):
        return {"impact_known": False, "affects_other_projects": True}
    late = impact["delays"]
    jobs = Job.objects.filter(public_id__in=[one["job"] for one in late])
    parents = project_parents()
    mine = all(
        job.project_id in path_to_root(project, parents.get)
        for project in jobs.order_by().values_list("project_id", flat=True).distinct()
    )
    return {
        "impact_known": True,
        "delayed_count": len(late),
        "delays": late[:MAX_LISTED_DELAYS],
        "reservations": impact["reservations"],
        "affects_other_projects": bool(impact["reservations"]) or not (mine and impact["whole"]),
    }


_NO_DELAY = stored_text("It delays no other job.")


def _delay_message(extension: UserRequest) -> str:
    """Describe the impact without names: readers of the timeline may not see the other jobs."""
    if not extension.impact_known:
        return stored_text("The scheduler did not report in time which jobs it delays.")
    jobs, reservations = extension.delayed_count, len(extension.reservations)
    later = stored_text(f"{reservations} {'reservation' if reservations == 1 else 'reservations'}")
    if not jobs:
        return stored_text(f"It delays {later}.") if reservations else _NO_DELAY
    return stored_text(
        f"It delays {jobs} pending {'job' if jobs == 1 else 'jobs'}{f' and {later}' if reservations else ''}."
    )


def _extend_limit(user: User, attempt: Attempt, extra_s: int, message: str, reason: str) -> None:
    """Extend the limit of the attempt's locked job, with event and audit row."""
    job = attempt.job
    before = job.time_limit_s or 0
    job.time_limit_s = before + extra_s
    job.version += 1
    job.save(update_fields=["time_limit_s", "version"])
    change = stored_text(f"Time limit {format_duration(before)} to {format_duration(job.time_limit_s)}.")
    record_owner_event(attempt, "extended", f"{change} {message}", user.username)
    limits = ({"time_limit_s": before}, {"time_limit_s": job.time_limit_s})
    record_action(user, "job.extend", job, before=limits[0], after=limits[1], reason=reason)
    trigger_cycle("limit")  # reservations and nominations depend on the end times
