"""Access to workspaces and services: a secret per attempt, single-use tickets, and sessions of their origins."""

from __future__ import annotations

import datetime as dt
import hashlib
import secrets

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Permission, can, require_permission
from portal.domain.serving.model_servers import ServiceState
from portal.domain.states import AttemptState, DesiredState, JobKind
from portal.errors import Conflict
from portal.models import Attempt, Job, Service, User, WorkspaceSession, WorkspaceTicket
from portal.services.accounts.sessions import latest_expiry, session_id, session_user
from portal.services.audit import record_action

TICKET_TTL = dt.timedelta(seconds=30)
ENTER_PATH = "/.fairway/enter"
HANDOVER_REFERRER_POLICY = "strict-origin"
"""Referrer-Policy of the page that posts a ticket: with ``same-origin`` browsers would send Origin: null."""


# -- secret of an attempt --------------------------------------------------------------------------


# -- location --------------------------------------------------------------------------------------


def workspace_origin(job: Job) -> str:
    """Return the origin of a workspace, such as ``http://ws-abc.localhost:8000``."""
    scheme = "https" if settings.HTTPS_ENABLED else "http"
    return f"{scheme}://ws-{job.public_id}.{settings.APPS_DOMAIN}"


def service_origin(service: Service) -> str:
    """Return the origin of a service, such as ``http://svc-abc.localhost:8000``."""
    scheme = "https" if settings.HTTPS_ENABLED else "http"
    return f"{scheme}://svc-{service.public_id}.{settings.APPS_DOMAIN}"


def open_attempt(job: Job) -> Attempt | None:
    """Return the attempt whose server can be used now: RUNNING, ready, and not stopping."""
    ready = Attempt.objects.filter(
        job=job,
        job__kind=JobKind.WORKSPACE.value,
        job__desired_state=DesiredState.RUN.value,
        state=AttemptState.RUNNING.value,
        ready_at__isnull=False,
        stop_requested_at__isnull=True,
    )
    return ready.select_related("job").first()


# -- tickets and sessions --------------------------------------------------------------------------


def do_open_workspace(user: User, job: Job, session_key: str) -> tuple[str, str]:
    """Return the URL to post to, and a ticket: single use, 30 s, bound to user, attempt and portal session.

    The page posts it as the form field ``ticket``; ``session_key`` is its cookie's. Raise NotFound or
    Forbidden for other users, Conflict if the workspace is not ready.
    """
    require_permission(user, Permission.VISIT, job)
    attempt = open_attempt(job)
    if attempt is None:
        raise Conflict(_("Its server does not respond yet, or has stopped."), code="workspace_not_ready")
    if attempt.leader_epoch == 0:
        message = _(
            "It was adopted after a restore and its access secret is lost. Stop it and start it again."
        )
        raise Conflict(message, code="workspace_unknown")
    with transaction.atomic():
        ticket = _create_ticket(user, session_key, attempt=attempt)
        record_action(user, "workspace.open", job, after={"attempt": attempt.number})
    return f"{workspace_origin(job)}{ENTER_PATH}", ticket


def do_open_service(user: User, service: Service, session_key: str) -> tuple[str, str]:
    """As ``do_open_workspace``, for a service. Raise Conflict if it is stopped."""
    require_permission(user, Permission.ENTER, service)
    if service.state != ServiceState.ACTIVE:
        raise Conflict(_("The service is stopped."), code="service_stopped")
    with transaction.atomic():
        ticket = _create_ticket(user, session_key, service=service)
        record_action(user, "service.open", service)
    return f"{service_origin(service)}{ENTER_PATH}", ticket


def _create_ticket(user: User, session_key: str, **target: Attempt | Service) -> str:
    """Return a new ticket for an attempt or a service. Raise Conflict if the portal session has ended."""
    session = session_id(session_key)
    if session_user(session) != user:
        raise Conflict(_("Sign in again, then open it."), code="session_ended")
    now = timezone.now()
    ticket = secrets.token_urlsafe(32)
    WorkspaceTicket.objects.filter(user=user, expires_at__lt=now - TICKET_TTL).delete()
    # one of a running attempt is kept until the secret that it may have revealed is replaced
    old = WorkspaceSession.objects.filter(user=user, expires_at__lt=now)
    old.exclude(attempt__state=AttemptState.RUNNING.value).delete()
    WorkspaceTicket.objects.create(
        code_sha256=digest(ticket), user=user, session_key=session, expires_at=now + TICKET_TTL, **target
    )
    return ticket


def do_redeem_ticket(ticket: str, public_id: str) -> str | None:
    """Return the cookie of a new session for an unused ticket of this workspace or service, else None.

    Of two concurrent requests with the same ticket one succeeds.
    """
    now = timezone.now()
    tickets = WorkspaceTicket.objects.select_related("user", "attempt__job", "service")
    own = Q(attempt__job__public_id=public_id) | Q(service__public_id=public_id)
    row = tickets.filter(own, code_sha256=digest(ticket)).first()
    target = row and (row.service or (row.attempt and row.attempt.job))
    if row is None or target is None:
        return None
    with transaction.atomic():
        # Only columns of this row: a joined condition would be evaluated before the lock, and both would
        # succeed.
        fresh = WorkspaceTicket.objects.filter(pk=row.pk, used_at__isnull=True, expires_at__gt=now)
        if fresh.update(used_at=now) != 1:
            return None
        verb = Permission.VISIT if isinstance(target, Job) else Permission.ENTER
        if session_user(row.session_key) != row.user or not can(row.user, verb, target):
            return None
        cookie = secrets.token_urlsafe(32)
        WorkspaceSession.objects.create(
            cookie_sha256=digest(cookie),
            user=row.user,
            attempt=row.attempt,
            service=row.service,
            session_key=row.session_key,
            expires_at=latest_expiry(),  # ends with the portal session
        )
        return cookie


def digest(code: str) -> str:
    """Return the SHA-256 of a code or cookie; a plain hash suffices because they are random."""
    return hashlib.sha256(code.encode()).hexdigest()
