"""Terminals in running tasks: request, open on the node, connect once, close. Content is never stored."""

from __future__ import annotations

import datetime as dt
import secrets

from django.db import transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.domain.states import AttemptState, DesiredState
from portal.errors import Conflict
from portal.models import ApiToken, Job, Node, Task, Terminal, User
from portal.models.public_id import new_public_id
from portal.outbox import notify_node
from portal.selectors.lookup import get_first
from portal.services.accounts.sessions import session_id
from portal.services.audit import record_action
from portal.services.encryption import EncryptionContext, decrypt, encrypt

MAX_TERMINALS_PER_USER = 16
"""Open at a time; nodes have limits of their own (``agents/node/terminals/terminal_manager.py``)."""
TERMINAL_SIZE = range(1, 1001)
"""Columns or rows."""
OPEN_TIMEOUT = dt.timedelta(seconds=20)
CONNECT_TIMEOUT = dt.timedelta(seconds=60)
"""The node closes a terminal without a connection after this time."""
OPEN_TERMINAL_HINT = "terminal"

IS_OPEN = Q(closed_at__isnull=True, error="") & (
    Q(connected_at__isnull=False) | Q(requested_at__gt=Now() - CONNECT_TIMEOUT)
)


# -- requested by web ------------------------------------------------------------------------------


def do_open_terminal(
    user: User,
    job: Job,
    rank: int,
    session_key: str,
    *,
    cols: int = 80,
    rows: int = 24,
    token: ApiToken | None = None,
) -> Terminal:
    """Request a terminal from the task's node; it listens once the row has a port.

    It belongs to a portal session; with a token, it is the node's side of an SSH connection. Raise NotFound or
    Forbidden for other users, Conflict without such a running task.
    """
    require_permission(user, Permission.ENTER, job)
    task = running_task(job, rank)
    if not session_key and token is None:
        raise Conflict(_("Sign in again, then open it."), code="session_ended")
    if Terminal.objects.filter(IS_OPEN, user=user).count() >= MAX_TERMINALS_PER_USER:
        message = _("You have {max_terminals_per_user} open terminals. Close one first.").format(
            max_terminals_per_user=MAX_TERMINALS_PER_USER
        )
        raise Conflict(message, code="too_many_terminals")
    name = new_public_id()
    with transaction.atomic():
        terminal = Terminal.objects.create(
            public_id=name,
            task=task,
            user=user,
            session_key=session_id(session_key) if token is None else "",
            token=token,
            secret=encrypt(secrets.token_urlsafe(32), _encryption_context(name)),
            cols=min(max(cols, TERMINAL_SIZE.start), TERMINAL_SIZE.stop - 1),
            rows=min(max(rows, TERMINAL_SIZE.start), TERMINAL_SIZE.stop - 1),
        )
        after = {"terminal": name, "rank": rank, "node": task.node.name}
        after |= {} if token is None else {"token": token.name}
        record_action(user, f"{_audit_name(terminal)}.open", job, after=after)
        notify_node(task.node.public_id, OPEN_TERMINAL_HINT)
    return terminal


def running_task(job: Job, rank: int) -> Task:
    """Return the running task of this rank that is not stopping. Raise Conflict."""
    running = Task.objects.filter(
        attempt__job=job,
        attempt__job__desired_state=DesiredState.RUN.value,
        attempt__state=AttemptState.RUNNING.value,
        attempt__stop_requested_at__isnull=True,
        eviction_requested_at__isnull=True,
        state=AttemptState.RUNNING.value,
        rank=rank,
    )
    task = running.select_related("node").first()
    if task is None:
        raise Conflict(_("This rank is not running."), code="task_not_running")
    if not task.node.reachable:
        raise Conflict(
            _("{name} is not reachable at the moment.").format(name=task.node.name), code="node_unreachable"
        )
    return task


def get_terminal(user: User, public_id: str) -> Terminal:
    return get_first(Terminal.objects.filter(public_id=public_id, user=user))


# -- opened by the node's actor --------------------------------------------------------------------


def terminals_to_open(node: Node) -> list[Terminal]:
    """Return the recent requests on a node; older ones have expired. Mostly there are none."""
    rows = Terminal.objects.filter(
        task__node=node,
        port__isnull=True,
        error="",
        closed_at__isnull=True,
        requested_at__gt=Now() - OPEN_TIMEOUT,
    )
    return list(rows.select_related("task__attempt__job").order_by("pk")) if rows.exists() else []


def terminal_secret(terminal: Terminal) -> str:
    """Return the decrypted secret, only for the node and the gateway. Raise DecryptionError."""
    return decrypt(terminal.secret, _encryption_context(terminal.public_id))


def record_listening(terminal: Terminal, port: int) -> None:
    Terminal.objects.filter(pk=terminal.pk).update(port=port)


def record_open_failure(terminal: Terminal, message: str) -> None:
    Terminal.objects.filter(pk=terminal.pk).update(error=message[:300])


# -- connected and closed by the gateway -----------------------------------------------------------


def do_mark_connected(public_id: str) -> bool:
    """Record the connection; return False if there was one before: a terminal is connected once."""
    fresh = Terminal.objects.filter(public_id=public_id, connected_at__isnull=True, closed_at__isnull=True)
    return fresh.update(connected_at=Now()) == 1


def do_close_terminal(public_id: str, reason: str) -> None:
    """Record that it is closed, and for how long it was open. Repeatable."""
    _close(Terminal.objects.filter(public_id=public_id), reason)


def close_orphaned_terminals(reason: str) -> None:
    """Close all connected terminals when a gateway starts, because its predecessor's sockets are gone."""
    _close(Terminal.objects.filter(connected_at__isnull=False), reason)


def _close(rows: QuerySet[Terminal], reason: str) -> None:
    with transaction.atomic():
        live = rows.filter(closed_at__isnull=True).select_for_update(of=("self",), no_key=True)
        for terminal in live.select_related("user", "task__attempt__job").order_by("pk"):
            Terminal.objects.filter(pk=terminal.pk).update(closed_at=Now())
            terminal.refresh_from_db(fields=["closed_at"])
            since, until = terminal.connected_at or terminal.requested_at, terminal.closed_at
            seconds = round((until - since).total_seconds()) if until else 0
            after = {"terminal": terminal.public_id, "rank": terminal.task.rank, "seconds": seconds}
            job = terminal.task.attempt.job
            record_action(terminal.user, f"{_audit_name(terminal)}.close", job, after=after, reason=reason)


def _audit_name(terminal: Terminal) -> str:
    return "terminal" if terminal.token_id is None else "ssh"


def _encryption_context(public_id: str) -> EncryptionContext:
    return EncryptionContext("portal_terminal", public_id, "secret")
