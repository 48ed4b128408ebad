"""Requests of users: more quota, a role in a project, or use of an environment; and the answers to all requests.

Requests for more time are made in ``portal.services.jobs.time_limits``.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from portal.access import Permission, answerable_requests, has_role, require_permission
from portal.domain.formatting import format_duration
from portal.domain.notices.notices import NoticeKind
from portal.domain.requests.user_requests import REQUESTABLE_ROLES, RequestKind, RequestState
from portal.domain.states import LIVE_ATTEMPT_STATES, Role
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, Forbidden, InvalidRequest
from portal.live_events import publish_on_commit
from portal.models import Environment, NodePool, Project, QuotaReplay, User, UserRequest
from portal.services.audit import record_action
from portal.services.environments.environments import do_allow_environment, is_available_to
from portal.services.jobs import time_limits
from portal.services.notices.write import NoticeDraft, write_notices
from portal.services.projects.projects import do_change_quota, do_set_member
from portal.services.projects.quota_additions import check_addition, do_add_quota
from portal.services.projects.quota_effect import (
    QuotaEdit,
    add_milli,
    present_values,
    simulate_quota_effect,
)
from portal.services.projects.quota_replays import begin_replay

MAX_OPEN_REQUESTS = 20
"""Maximum number of open requests of a user."""
LIFETIME = dt.timedelta(days=30)
"""Requests that nobody answers in this time expire."""
BATCH_SIZE = 500
"""Maximum number of requests that one pass expires."""


# -- making and withdrawing ------------------------------------------------------------------------


def prepare_quota_request(
    user: User,
    project: Project,
    pool: NodePool,
    extra_milli: int,
    *,
    starts_at: dt.datetime | None = None,
    ends_at: dt.datetime | None = None,
    reason: str,
) -> UserRequest:
    """Return a request for more GPUs, not saved, for members of the project; without ``ends_at`` permanently.

    Must not run in a transaction, because the scheduler simulates the effect.
    """
    _require_member(user, project)
    _require_reason(reason)
    check_addition(extra_milli, starts_at, ends_at)
    asked = UserRequest(
        kind=RequestKind.QUOTA.value,
        requested_by=user,
        project=project,
        pool=pool,
        extra_milli=extra_milli,
        starts_at=starts_at,
        ends_at=ends_at,
        reason=reason,
    )
    asked.effect = simulate_requested_quota(asked)
    return asked


def do_request_quota(asked: UserRequest) -> UserRequest:
    """Make a request of ``prepare_quota_request``."""
    _require_member(asked.requested_by, _quota_subject(asked)[0])
    return _open_request(asked)


def do_request_project_role(user: User, project_name: str, role: Role, *, reason: str) -> UserRequest:
    """Request a role in a project, which need not be visible to the user."""
    _require_reason(reason)
    project = Project.objects.filter(name=project_name, archived_at__isnull=True).first()
    if project is None:
        raise InvalidRequest(fields={"project": _("There is no project with this name.")})
    if role not in REQUESTABLE_ROLES:
        raise InvalidRequest(fields={"role": _("Must be viewer or member.")})
    if user.is_admin or has_role(user, project, role):
        raise InvalidRequest(
            fields={"project": _("You already have this role in {name}.").format(name=project.name)}
        )
    return _open_request(
        UserRequest(
            kind=RequestKind.PROJECT.value, requested_by=user, project=project, role=role.value, reason=reason
        )
    )


def do_request_environment(
    user: User, project: Project, environment_name: str, *, reason: str
) -> UserRequest:
    """Request that a project may use a restricted environment, which need not be visible to the user.

    Only its owner requests a private one.
    """
    _require_member(user, project)
    _require_reason(reason)
    rows = Environment.objects.filter(Q(owner=None) | Q(owner=user), name=environment_name, enabled=True)
    environment = rows.first()
    if environment is None:
        raise InvalidRequest(fields={"environment": _("There is no environment with this name.")})
    if is_available_to(environment, project):
        raise InvalidRequest(
            fields={
                "environment": _("{name} may already use {environment_name}.").format(
                    name=project.name, environment_name=environment.name
                )
            }
        )
    return _open_request(
        UserRequest(
            kind=RequestKind.ENVIRONMENT.value,
            requested_by=user,
            project=project,
            environment=environment,
            reason=reason,
        )
    )


def simulate_requested_quota(asked: UserRequest) -> dict[str, Any] | None:
    """Return the effect if the requested quota were in force now; None if the scheduler does not answer."""
    return simulate_quota_effect([_requested_edit(asked)])


def do_replay_request(user: User, asked: UserRequest) -> QuotaReplay:
    """Replay the last 30 days with the requested quota, for those who answer; as ``begin_replay``."""
    require_permission(user, Permission.CHANGE, asked)
    if asked.kind != RequestKind.QUOTA:
        raise Conflict(_("This is no request for quota."), code="not_quota")
    return begin_replay(user, [_requested_edit(asked)])


def _requested_edit(asked: UserRequest) -> QuotaEdit:
    """Return the quota as it would be with the requested addition."""
    project, pool, extra_milli = _quota_subject(asked)
    values, _ = present_values(project, pool)
    return QuotaEdit(project, pool, add_milli(values, extra_milli))


def do_withdraw_request(user: User, asked: UserRequest) -> UserRequest:
    """Close an open request of the user. Raise Conflict if it is answered."""
    require_permission(user, Permission.CONTROL, asked)
    with transaction.atomic():
        row = _lock_open(asked)
        _close(row, RequestState.WITHDRAWN)
        record_action(user, "request.withdraw", row, before=_audit_values(row))
    return row


def _open_request(asked: UserRequest) -> UserRequest:
    """Save the request with audit row and event. Raise Conflict if there is one like it."""
    asked.reason = asked.reason.strip()[:500]
    user = asked.requested_by
    try:
        with transaction.atomic():
            User.objects.select_for_update(no_key=True).get(pk=user.pk)
            mine = UserRequest.objects.filter(requested_by=user, state=RequestState.OPEN.value)
            if mine.count() >= MAX_OPEN_REQUESTS:
                raise Conflict(
                    _("You already have {max_open_requests} open requests.").format(
                        max_open_requests=MAX_OPEN_REQUESTS
                    ),
                    code="too_many_requests",
                )
            asked.save()
            asked.refresh_from_db(fields=["requested_at"])
            record_action(user, "request.open", asked, after=_audit_values(asked), reason=asked.reason)
            _publish(asked)
    except IntegrityError as error:
        raise Conflict(_("You already have an open request for this."), code="request_open") from error
    return asked


def _require_member(user: User, project: Project) -> None:
    require_permission(user, Permission.SUBMIT, project)
    if project.archived_at is not None:
        raise InvalidRequest(fields={"project": _("The project is archived.")})


def _require_reason(reason: str) -> None:
    if not reason.strip():
        raise InvalidRequest(fields={"reason": _("Say what it is needed for.")})


# -- answering -------------------------------------------------------------------------------------


def do_answer_request(user: User, asked: UserRequest, *, approve: bool, answer: str = "") -> UserRequest:
    """Approve or deny an open request; an approval is carried out in the same transaction.

    Raise Conflict if it is answered already, or if what it is about has changed.
    """
    require_permission(user, Permission.VIEW, asked)
    if not answerable_requests(user, [asked]):
        raise Forbidden(
            _("Only {who_answers} can answer this request.").format(who_answers=who_answers(asked))
        )
    is_time = asked.kind == RequestKind.TIME
    with transaction.atomic():
        if is_time:
            time_limits.lock_extended_job(asked)
        row = _lock_open(asked)
        if is_time:
            row.job, row.attempt = asked.job, asked.attempt  # as locked
        _close(row, RequestState.APPROVED if approve else RequestState.DENIED, user, answer)
        if approve:
            _require_subject(row)
            _APPROVALS[RequestKind(row.kind)](user, row, answer)
        elif is_time:
            time_limits.record_denied_extension(user, row, answer)
        word = "approve" if approve else "deny"
        record_action(user, f"request.{word}", row, before=_audit_values(row), reason=answer)
    return row


def who_answers(asked: UserRequest) -> str:
    """Return who may answer: administrators, or the managers of a project."""
    by_manager = asked.kind == RequestKind.PROJECT or (
        asked.kind == RequestKind.TIME and not asked.affects_other_projects
    )
    if by_manager:
        return _("managers of {project}").format(project=asked.target_project.name)
    return _("administrators")


def _lock_open(asked: UserRequest) -> UserRequest:
    """Return the locked row. Raise Conflict with the answer if it is not open any more."""
    rows = UserRequest.objects.select_for_update(no_key=True, of=("self",))
    row = rows.select_related("decided_by", "requested_by", "project", "pool", "environment").get(pk=asked.pk)
    if row.state != RequestState.OPEN:
        by = _(" by {username}").format(username=row.decided_by.username) if row.decided_by else ""
        raise Conflict(
            _("It is already {state}{by}.").format(state=row.state, by=by),
            code="request_answered",
            details={"state": row.state},
        )
    return row


def _close(row: UserRequest, state: RequestState, user: User | None = None, answer: str = "") -> None:
    row.state, row.decided_by, row.answer = state.value, user, answer.strip()[:500]
    row.save(update_fields=["state", "decided_by", "answer"])
    UserRequest.objects.filter(pk=row.pk).update(decided_at=Now())
    row.refresh_from_db(fields=["decided_at"])
    _publish(row)
    if state is not RequestState.WITHDRAWN and row.requested_by_id != (user.pk if user else None):
        _notify_requester(row)


def _notify_requester(row: UserRequest) -> None:
    subject = _SUBJECTS[RequestKind(row.kind)](row)
    state_text, name = row.state, row.decided_by.display_name if row.decided_by else ""
    title = stored_text(
        f"Your request for {subject} {'expired' if row.state == RequestState.EXPIRED else f'was {state_text}'}"
        + (f" by {name}" if name else "")
    )
    write_notices(
        [
            NoticeDraft(
                NoticeKind.REQUEST_ANSWERED,
                row.requested_by_id,
                title,
                row.answer,
                job=row.job,
                project=None if row.kind == RequestKind.PROJECT else row.project,
            )
        ]
    )


_SUBJECTS: dict[RequestKind, Callable[[UserRequest], str]] = {
    RequestKind.QUOTA: lambda row: stored_text(f"{(row.extra_milli or 0) / 1000:g} more GPUs"),
    RequestKind.TIME: lambda row: stored_text(f"{format_duration(row.extra_s or 0)} more"),
    RequestKind.PROJECT: lambda row: stored_text(f"the role {_role_text(row)} in {row.target_project.name}"),
    RequestKind.ENVIRONMENT: lambda row: stored_text(
        f"the environment {row.environment.name if row.environment else ''}"
    ),
}


def _role_text(row: UserRequest) -> str:
    return row.role


def _require_subject(row: UserRequest) -> None:
    """Raise Conflict if the user or the project of the request is not active any more."""
    if not row.requested_by.is_active:
        raise Conflict(
            _("The account of {username} is deactivated.").format(username=row.requested_by.username),
            code="user_inactive",
        )
    if row.project is not None and row.project.archived_at is not None:
        raise Conflict(_("{name} is archived.").format(name=row.project.name), code="project_archived")


def _approve_quota(user: User, row: UserRequest, answer: str) -> None:
    project, pool, extra_milli = _quota_subject(row)
    given_reason = answer or row.reason
    reason = stored_text(f"Request of {row.requested_by.username}: {given_reason}")
    if row.ends_at is None:
        values, version = present_values(project, pool)
        do_change_quota(user, project, pool, add_milli(values, extra_milli), version=version, reason=reason)
        return
    do_add_quota(
        user,
        project,
        pool,
        extra_milli=extra_milli,
        starts_at=row.starts_at,
        ends_at=row.ends_at,
        reason=reason,
        request=row,
    )


def _approve_role(user: User, row: UserRequest, answer: str) -> None:
    """Give the role, unless the user has a stronger one by now."""
    if not has_role(row.requested_by, row.target_project, Role(row.role)):
        do_set_member(user, row.target_project, row.requested_by, Role(row.role))


def _approve_environment(user: User, row: UserRequest, answer: str) -> None:
    if row.environment is None:
        raise ValueError("this is no request for an environment")
    do_allow_environment(user, row.environment, row.target_project, requested_by=row.requested_by)


_APPROVALS: dict[RequestKind, Callable[[User, UserRequest, str], None]] = {
    RequestKind.QUOTA: _approve_quota,
    RequestKind.TIME: time_limits.approve_extension,
    RequestKind.PROJECT: _approve_role,
    RequestKind.ENVIRONMENT: _approve_environment,
}


# -- expiry ----------------------------------------------------------------------------------------


def expire_requests() -> int:
    """Close requests that can no longer be approved or that nobody answered in time; return how many."""
    live = Q(
        attempt__state__in=[state.value for state in LIVE_ATTEMPT_STATES],
        attempt__stop_requested_at__isnull=True,
    )
    over = (
        (Q(kind=RequestKind.TIME.value) & ~live)
        | Q(ends_at__lte=Now())
        | Q(requested_at__lt=Now() - LIFETIME)
    )
    due = UserRequest.objects.filter(over, state=RequestState.OPEN.value).order_by("pk")
    return sum(_expire(pk) for pk in due.values_list("pk", flat=True)[:BATCH_SIZE])


def _expire(pk: int) -> bool:
    with transaction.atomic():
        rows = UserRequest.objects.select_for_update(no_key=True, of=("self",)).select_related("requested_by")
        row = rows.filter(pk=pk, state=RequestState.OPEN.value).first()
        if row is None:
            return False
        _close(row, RequestState.EXPIRED)
        record_action(None, "request.expire", row, before=_audit_values(row))
    return True


def _quota_subject(row: UserRequest) -> tuple[Project, NodePool, int]:
    if row.pool is None or row.extra_milli is None:
        raise ValueError("this is no request for quota")
    return row.target_project, row.pool, row.extra_milli


def _audit_values(row: UserRequest) -> dict[str, Any]:
    times = {"starts_at": row.starts_at, "ends_at": row.ends_at}
    shown = {
        "kind": row.kind,
        "user": row.requested_by.username,
        "project": row.target_project.name,
        "pool": row.pool.name if row.pool else None,
        "environment": row.environment.name if row.environment else None,
        "role": row.role,
        "extra_milli": row.extra_milli,
        "extra_s": row.extra_s,
        **{key: at.isoformat() if at else None for key, at in times.items()},
    }
    return {key: value for key, value in shown.items() if value not in (None, "")}


def _publish(row: UserRequest) -> None:
    """Publish the state to the user who made the request and to the project that it is about."""
    data = {"kind": "request", "request": row.public_id, "request_kind": row.kind, "state": row.state}
    for topic in (f"user.{row.requested_by.public_id}", f"project.{row.target_project.public_id}"):
        publish_on_commit(topic, data)
