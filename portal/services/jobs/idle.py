"""Idle jobs: countdowns that the scheduler starts and ends, snoozes and exemptions by users.

The gateway records tool activity, the scheduler GPU activity and countdowns; each writes its own columns.
Every step locks the row and checks that it has not changed since the decision. Times are the database's.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping

from django.db import connection, transaction
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from portal.access import Permission, can, require_permission
from portal.domain.formatting import format_duration
from portal.domain.jobs.checkpoints import Validity
from portal.domain.notices.notices import NoticeKind
from portal.domain.states import AttemptState, DesiredState, JobKind
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, Forbidden, InvalidRequest
from portal.models import Attempt, AttemptActivity, IdleExemption, Job, User
from portal.selectors.scheduling.project_settings import effective_rules
from portal.services.audit import record_action
from portal.services.lifecycle import suspension
from portal.services.lifecycle.state_events import record_owner_event
from portal.services.notices.write import notify_job_owner

MAX_POLL_GAP_S = 180
"""After a longer gap between two polls of a tool, earlier inactivity does not count."""
MIN_REASON_LENGTH = 10
_DECISION_FIELDS = (
    "tool_active_at",
    "gpu_active_at",
    "gpu_inactive_since",
    "idle_notified_at",
    "suspend_at",
    "snoozed_until",
)


# -- activity --------------------------------------------------------------------------------------


def record_tool_activity(used_ago_s: Mapping[int, float | None]) -> None:
    """Record that the tools of these attempts (ids) were polled now, and last used this many seconds ago.

    None: no use is known beyond what is recorded. One statement; the time of the last use never decreases.
    """
    if not used_ago_s:
        return
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO portal_attemptactivity AS stored"
            " (attempt_id, tool_polled_since, tool_polled_at, tool_active_at, snooze_count)"
            " SELECT attempt.id, clock_timestamp(), clock_timestamp(),"
            "        clock_timestamp() - make_interval(secs => told.ago_s), 0"
            "   FROM unnest(%s::bigint[], %s::float8[]) AS told (id, ago_s)"
            "   JOIN portal_attempt attempt ON attempt.id = told.id"
            " ON CONFLICT (attempt_id) DO UPDATE SET"
            "   tool_polled_since = CASE WHEN stored.tool_polled_at > clock_timestamp() - make_interval(secs => %s)"
            "                THEN stored.tool_polled_since ELSE excluded.tool_polled_since END,"
            "   tool_polled_at = excluded.tool_polled_at,"
            "   tool_active_at = greatest(stored.tool_active_at, excluded.tool_active_at)",
            [list(used_ago_s), list(used_ago_s.values()), MAX_POLL_GAP_S],
        )


# -- countdown, for the scheduler --------------------------------------------------------------------


def start_countdown(
    decided: AttemptActivity, inactive_since: dt.datetime, suspend_in_s: float | None
) -> bool:
    """Notify the users of an idle job, and schedule its suspension; None: only notify."""
    with transaction.atomic():
        row = _lock_if_unchanged(decided)
        if row is None:
            return False
        now = _now()
        row.idle_notified_at, row.inactive_since = now, inactive_since
        row.suspend_at = None if suspend_in_s is None else now + dt.timedelta(seconds=suspend_in_s)
        row.save(update_fields=["idle_notified_at", "inactive_since", "suspend_at"])
        quiet = format_duration(_minutes((now - inactive_since).total_seconds()))
        job = row.attempt.job
        message = stored_text(f"It has been idle for {quiet}: {_INACTIVE_TEXT[JobKind(job.kind)]}.")
        if suspend_in_s is not None:
            zero, again = job.kind == JobKind.SERVICE.value, _continuation_text(job)
            message += stored_text(
                f" It will be {'scaled to zero' if zero else 'suspended'} in {format_duration(suspend_in_s)} "
                f"unless it is used or exempted; {again}."
            )
        ends = {"suspend_at": row.suspend_at.isoformat()} if row.suspend_at else {}
        record_owner_event(row.attempt, "idle", message, details=ends)
        notify_job_owner(job, NoticeKind.IDLE_WARNING, stored_text(f"{job.name} is idle"), message)
        return True


_INACTIVE_TEXT = {
    JobKind.WORKSPACE: stored_text("its GPUs and its tool are inactive"),
    JobKind.TRAINING: stored_text("its GPUs are inactive"),
    JobKind.SERVICE: stored_text("its GPUs are inactive, and no requests arrive"),
}


def _continuation_text(job: Job) -> str:
    """Return how an idle job continues after the end of its countdown."""
    if job.kind == JobKind.SERVICE.value:
        return stored_text("the next request starts it again")
    if job.kind == JobKind.WORKSPACE.value:
        return stored_text("its files are kept")
    saved = job.checkpoints.filter(validity=Validity.VALID.value).exists()
    return stored_text(
        f"{'it continues from its newest checkpoint' if saved else 'it has no checkpoint, so it begins again'} "
        "when it is resumed"
    )


def end_countdown(decided: AttemptActivity, reason: str) -> bool:
    """End a countdown because the workspace is used, kept, or not known to be idle."""
    with transaction.atomic():
        row = _lock_if_unchanged(decided)
        if row is None or row.idle_notified_at is None:
            return False
        _clear_countdown(row)
        record_owner_event(row.attempt, "idle_ended", reason)
        return True


def suspend_idle(decided: AttemptActivity) -> bool:
    """Suspend a job whose countdown has ended; return False if anything changed since the decision."""
    with transaction.atomic():
        row, message = lock_ended_countdown(decided)
        if row is None:
            return False
        job = suspension.suspend_job(row.attempt.job_id, actor="", message=message, only_attempt=row.pk)
        return job.desired_state == DesiredState.SUSPENDED


def lock_ended_countdown(decided: AttemptActivity) -> tuple[AttemptActivity | None, str]:
    """Return the locked row and the message of the suspension; None if anything changed since the decision."""
    row, now = _lock_if_unchanged(decided), _now()
    if row is None or row.suspend_at is None or row.suspend_at > now or row.inactive_since is None:
        return None, ""
    job = row.attempt.job
    if IdleExemption.objects.filter(job=job, revoked_at__isnull=True, expires_at__gt=now).exists():
        return None, ""
    quiet = format_duration(_minutes((now - row.inactive_since).total_seconds()))
    zero, again = job.kind == JobKind.SERVICE.value, _continuation_text(job)
    return row, stored_text(
        f"{'Scaled to zero' if zero else 'Suspended'} after {quiet} without use; {again}."
    )


# -- user actions -------------------------------------------------------------------------------------


def do_snooze(user: User, job: Job) -> AttemptActivity:
    """Postpone the suspension of an idle job, a limited number of times until it is used again.

    Raise Conflict without a countdown, or if the snooze limit is reached.
    """
    require_permission(user, Permission.CONTROL, job)
    with transaction.atomic():
        row = _lock_running_activity(job)
        if row is None or row.idle_notified_at is None:
            raise Conflict(_("No suspension is scheduled."), code="not_idle")
        settings = _policy_settings(row.attempt)
        used, most = row.effective_snooze_count, int(settings["idle_snooze_limit"])
        if used >= most:
            raise Conflict(
                _("It has already been snoozed {most} times; use it, or give a reason to exempt it.").format(
                    most=most
                )
                if most
                else _("Snoozing is disabled; use it, or give a reason to exempt it."),
                code="snooze_limit_reached",
            )
        now, keep_s = _now(), float(settings["idle_snooze_s"])
        row.snooze_count, row.snoozed_at = used + 1, now
        row.snoozed_until = now + dt.timedelta(seconds=keep_s)
        row.save(update_fields=["snooze_count", "snoozed_at", "snoozed_until"])
        _clear_countdown(row)
        said = stored_text(
            f"Snoozed for {format_duration(keep_s)}; snooze {row.snooze_count} "
            f"of {most} until it is used again."
        )
        record_owner_event(row.attempt, "snoozed", said, user.username)
        if job.owner_id != user.pk:
            record_action(user, "job.snooze", job, after={"until": row.snoozed_until.isoformat()})
    return row


def do_exempt_from_idle(user: User, job: Job, reason: str) -> IdleExemption:
    """Exempt a job from idle suspension for a reason that others can read; audited.

    Raise InvalidRequest if the reason is too short, Conflict if an exemption is in force or exemptions are
    disabled, Forbidden if one of this job was revoked: from then on only administrators may.
    """
    require_permission(user, Permission.CONTROL, job)
    reason = " ".join(reason.split())
    if not MIN_REASON_LENGTH <= len(reason) <= 500:
        raise InvalidRequest(
            fields={
                "reason": _("Enter a reason of {min_reason_length} to 500 characters.").format(
                    min_reason_length=MIN_REASON_LENGTH
                )
            }
        )
    with transaction.atomic():
        row = _lock_running_activity(job)
        if row is None:
            raise Conflict(_("It is not running."), code="not_running")
        keep_s = float(_policy_settings(row.attempt)["idle_exemption_s"])
        if not keep_s:
            raise Conflict(_("Exemptions are disabled."), code="exemptions_disabled")
        now = _now()
        earlier = IdleExemption.objects.filter(job=job)
        if earlier.filter(revoked_at__isnull=True, expires_at__gt=now).exists():
            raise Conflict(_("It is already exempt."), code="already_exempt")
        if not user.is_admin and earlier.filter(revoked_at__isnull=False).exists():
            message = _("An exemption of this job was revoked; only administrators can grant another.")
            raise Forbidden(message)
        exemption = IdleExemption.objects.create(
            job=job,
            requested_by=user,
            reason=reason,
            created_at=now,
            expires_at=now + dt.timedelta(seconds=keep_s),
        )
        if row.idle_notified_at is not None:
            _clear_countdown(row)
        message = stored_text(f"Exempt for {format_duration(keep_s)}: {reason}")
        record_owner_event(row.attempt, "exempted", message, user.username)
        after = {"until": exemption.expires_at.isoformat()}
        record_action(user, "job.idle_exemption", job, after=after, reason=reason)
    return exemption


def do_revoke_exemption(user: User, exemption: IdleExemption) -> IdleExemption:
    """Revoke an exemption; for administrators and managers of the project."""
    require_permission(user, Permission.VIEW, exemption.job)
    if not can(user, Permission.MANAGE, exemption.job.project):
        raise Forbidden(_("Only managers of the project and administrators can revoke an exemption."))
    with transaction.atomic():
        rows = IdleExemption.objects.select_for_update(of=("self",), no_key=True)
        row = rows.select_related("job").get(pk=exemption.pk)
        if row.revoked_at is not None or row.expires_at <= _now():
            raise Conflict(_("The exemption has expired or was revoked."), code="exemption_expired")
        IdleExemption.objects.filter(pk=row.pk).update(revoked_at=Now())
        attempt = Attempt.objects.filter(job=row.job).order_by("-number").first()
        if attempt is not None:
            record_owner_event(
                attempt, "exemption_revoked", stored_text("Its exemption was revoked."), user.username
            )
        notify_job_owner(
            row.job,
            NoticeKind.REQUEST_ANSWERED,
            stored_text(f"The idle exemption of {row.job.name} was revoked"),
            stored_text(f"By {user.display_name}. It is suspended again when it is idle."),
            actor=user.username,
            recipient=row.requested_by_id,
        )
        before = {"until": row.expires_at.isoformat()}
        record_action(user, "job.idle_exemption_revoked", row.job, before=before, reason=row.reason)
    row.refresh_from_db()
    return row


def _now() -> dt.datetime:
    """Return the database's clock."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        found: dt.datetime = cursor.fetchone()[0]
    return found


def _minutes(seconds: float) -> float:
    return max(60.0, seconds - seconds % 60.0)


def _policy_settings(attempt: Attempt) -> Mapping[str, float | str]:
    pool, project = attempt.pool, attempt.job.project_id
    return effective_rules([(pool, project)])[pool.pk, project].values


def _lock_if_unchanged(decided: AttemptActivity) -> AttemptActivity | None:
    """Return the locked row if its attempt runs and it is unchanged since the decision."""
    row = _lock_activity(decided.pk)
    if row is None or any(getattr(row, name) != getattr(decided, name) for name in _DECISION_FIELDS):
        return None
    return row


def _lock_running_activity(job: Job) -> AttemptActivity | None:
    """Return the locked row of the job's running attempt; create it if missing."""
    live = Attempt.objects.filter(
        job=job, state=AttemptState.RUNNING.value, stop_requested_at__isnull=True
    ).first()
    if live is None:
        return None
    AttemptActivity.objects.bulk_create([AttemptActivity(attempt=live)], ignore_conflicts=True)
    return _lock_activity(live.pk)


def _lock_activity(attempt_id: int) -> AttemptActivity | None:
    """Return the locked row of an attempt if it runs."""
    rows = AttemptActivity.objects.select_for_update(of=("self",), no_key=True).filter(
        pk=attempt_id, attempt__state=AttemptState.RUNNING.value, attempt__stop_requested_at__isnull=True
    )
    return rows.select_related("attempt__job__owner", "attempt__pool").first()


def _clear_countdown(row: AttemptActivity) -> None:
    row.idle_notified_at = row.suspend_at = row.inactive_since = None
    row.save(update_fields=["idle_notified_at", "suspend_at", "inactive_since"])
