"""Shares of a workspace with named members of its project: created by its owner, limited in time, revocable."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Permission, can, has_role, require_permission
from portal.domain.projects.project_tree import path_to_root
from portal.domain.states import (
    LIVE_ATTEMPT_STATES,
    TERMINAL_JOB_STATES,
    AttemptState,
    JobKind,
    Role,
    RuntimeKind,
)
from portal.domain.stored_texts import stored_text
from portal.domain.workspaces.sharing import (
    MAX_DURATION_S,
    MAX_SHARES,
    MIN_DURATION_S,
    VIEWABLE_TOOLS,
    ShareAccess,
)
from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound
from portal.models import Job, JobEvent, Membership, Task, User, WorkspaceSession, WorkspaceShare
from portal.services.audit import record_action
from portal.services.workspaces.secret_replacement import request_replacement, unreplaced_secret

VISIT_INTERVAL = dt.timedelta(seconds=30)
INSIDE_FOR = 3 * VISIT_INTERVAL
"""A user whose session was used within this time is shown as being inside."""


@dataclass(frozen=True)
class Visitor:
    user: User
    last_used_at: dt.datetime


def live_shares(job: Job) -> QuerySet[WorkspaceShare]:
    rows = WorkspaceShare.objects.filter(job=job, revoked_at=None, expires_at__gt=timezone.now())
    return rows.select_related("user", "created_by", "job__project", "job__owner")


def list_shares(user: User, job: Job) -> QuerySet[WorkspaceShare]:
    """Return the live shares. Raise NotFound or Forbidden for users who do not control the workspace."""
    require_permission(user, Permission.CONTROL, job)
    return live_shares(job)


def get_share(user: User, public_id: str) -> WorkspaceShare:
    """Return a share. Raise NotFound if the user does not control its workspace."""
    rows = WorkspaceShare.objects.select_related("user", "created_by", "job__project", "job__owner")
    share = rows.filter(public_id=public_id).first()
    if share is None or not can(user, Permission.CONTROL, share.job):
        raise NotFound(_("There is no such share."))
    return share


def project_members(job: Job) -> list[User]:
    """Return the users who can get a share: other members of the project of the workspace, by name."""
    line = path_to_root(job.project, lambda below: below.parent)
    roles = [Role.MEMBER.value, Role.MANAGER.value]
    members = Membership.objects.filter(project__in=line, role__in=roles, user__is_active=True)
    rows = User.objects.filter(pk__in=members.values("user")).exclude(pk=job.owner_id)
    return list(rows.order_by("username")[:500])


def list_visitors(job: Job) -> list[Visitor]:
    """Return the users who use the workspace at the moment, its owner included."""
    now = timezone.now()
    rows = WorkspaceSession.objects.filter(
        attempt__job=job,
        expires_at__gt=now,
        attempt__state__in=[state.value for state in LIVE_ATTEMPT_STATES],
        last_used_at__gt=now - INSIDE_FOR,
    )
    found: dict[int, Visitor] = {}
    for row in rows.select_related("user").order_by("last_used_at"):
        if row.last_used_at is not None:
            found[row.user_id] = Visitor(row.user, row.last_used_at)
    return sorted(found.values(), key=lambda each: each.user.username)


def record_visit(session: WorkspaceSession) -> None:
    """Record that a session is in use, at most once in ``VISIT_INTERVAL``."""
    now = timezone.now()
    if session.last_used_at is None or now - session.last_used_at > VISIT_INTERVAL:
        WorkspaceSession.objects.filter(pk=session.pk).update(last_used_at=now)


def do_share_workspace(user: User, job: Job, guest: User, access: str, duration_s: int) -> WorkspaceShare:
    """Share a workspace for a time; an earlier share with the same user is replaced.

    Raise Forbidden unless the user owns it, InvalidRequest for a guest who is no member of its project.
    """
    require_permission(user, Permission.ENTER, job)
    if job.kind != JobKind.WORKSPACE.value:
        raise Conflict(_("Only workspaces can be shared."), code="not_a_workspace")
    wrong: dict[str, str] = {}
    if access not in set(ShareAccess):
        wrong["access"] = _("Choose one of {shareaccess}.").format(shareaccess=", ".join(ShareAccess))
    elif access == ShareAccess.VIEW and job.environment.tool not in VIEWABLE_TOOLS:
        wrong["access"] = _("{tool} cannot be used for viewing only.").format(tool=job.environment.tool)
    if not MIN_DURATION_S <= duration_s <= MAX_DURATION_S:
        wrong["duration_s"] = _("Must be between {min_duration_s} and {max_duration_s} s.").format(
            min_duration_s=MIN_DURATION_S, max_duration_s=MAX_DURATION_S
        )
    if guest.pk == job.owner_id:
        wrong["user"] = _("It is their own workspace.")
    elif not guest.is_active or not has_role(guest, job.project, Role.MEMBER):
        wrong["user"] = _("{username} is not a member of {name}.").format(
            username=guest.username, name=job.project.name
        )
    if wrong:
        raise InvalidRequest(fields=wrong)
    with transaction.atomic():
        job = Job.objects.select_for_update(of=("self",), no_key=True).get(pk=job.pk)
        if job.state in TERMINAL_JOB_STATES:
            raise Conflict(_("It has ended."), code="job_ended")
        if live_shares(job).exclude(user=guest).count() >= MAX_SHARES:
            raise Conflict(
                _("It is shared with {max_shares} users already.").format(max_shares=MAX_SHARES),
                code="too_many_shares",
            )
        now = timezone.now()
        replaced = WorkspaceShare.objects.filter(job=job, user=guest, revoked_at=None)
        if access == ShareAccess.VIEW and replaced.filter(access=ShareAccess.EDIT).exists():
            _end_visits(guest, job)
        replaced.update(revoked_at=now)
        share = WorkspaceShare.objects.create(
            job=job,
            user=guest,
            access=access,
            created_by=user,
            expires_at=now + dt.timedelta(seconds=duration_s),
        )
        after = {"user": guest.username, "access": access, "expires_at": share.expires_at.isoformat()}
        record_action(user, "workspace.share", job, after=after)
        until = f"{share.expires_at:%Y-%m-%d %H:%M} UTC"
        message = stored_text(
            f"Shared with {guest.username} to {'view' if access == ShareAccess.VIEW else 'edit'}, until {until}."
        )
        JobEvent.objects.create(job=job, kind="shared", actor=user.username, message=message)
    return share


def _end_visits(guest: User, job: Job) -> None:
    """End the sessions of a visitor, who may know the secret: it is replaced even if they get a new share before."""
    WorkspaceSession.objects.filter(user=guest, attempt__job=job).update(expires_at=timezone.now())
    request_replacement(job)


def open_port_warning(job: Job) -> str:
    """Return what a share cannot protect on the node where the workspace runs; "" if nothing."""
    running = Task.objects.filter(attempt__job=job, rank=0, state=AttemptState.RUNNING.value)
    task = running.filter(node__runtime=RuntimeKind.PROCESS.value).select_related("node").first()
    if task is None or task.node.agent_info.get("closes_ports", {}).get(RuntimeKind.PROCESS.value):
        return ""
    return _(
        "{node} does not separate the tasks of its users: a program of another user there can connect to the port of "
        "the workspace, and may read its secret. What a visitor may do is limited in the browser only."
    ).format(node=task.node.name)


def remaining_risk(share: WorkspaceShare) -> str:
    """Return what the user of a revoked share could still use until the workspace restarts; "" if nothing."""
    if not WorkspaceSession.objects.filter(user=share.user, attempt__job=share.job).exists():
        return ""
    if share.access == ShareAccess.EDIT:
        return _(
            "Programs that {display_name} started in it still run as its owner. Stop and start it to end them."
        ).format(display_name=share.user.display_name)
    return unreplaced_secret(share.job)


def do_revoke_share(user: User, share: WorkspaceShare) -> WorkspaceShare:
    """Revoke a share: requests are refused, and open connections end, within 5 s. Repeatable."""
    if not can(user, Permission.CONTROL, share.job):
        raise Forbidden(_("Only its owner, managers of its project and administrators can revoke it."))
    with transaction.atomic():
        live = WorkspaceShare.objects.filter(pk=share.pk, revoked_at=None)
        if live.update(revoked_at=timezone.now()):
            before = {"user": share.user.username, "access": share.access}
            record_action(user, "workspace.unshare", share.job, before=before)
            message = stored_text(f"No longer shared with {share.user.username}.")
            JobEvent.objects.create(job=share.job, kind="shared", actor=user.username, message=message)
            _end_visits(share.user, share.job)
    share.refresh_from_db()
    return share
