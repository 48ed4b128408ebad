"""A terminal in a running task: asked for, opened on its node, entered once, closed. What passes is kept nowhere."""

from __future__ import annotations

import datetime as dt
import secrets

from django.db import transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from portal.access import Permission, require_permission
from portal.domain.states import AttemptState, DesiredState
from portal.errors import Conflict, NotFound
from portal.models import Job, Node, Task, Terminal, User
from portal.models.public_id import new_public_id
from portal.outbox import notify_node
from portal.services.accounts.session_store import session_id
from portal.services.audit import record_action
from portal.services.encryption import EncryptionContext, decrypt, encrypt

MAX_TERMINALS_PER_USER = 16
"""Open at a time; a node has bounds of its own (``agents/node/terminals/manager.py``)."""
TERMINAL_SIZE = range(1, 1001)
"""Columns or rows."""
OPEN_TIMEOUT = dt.timedelta(seconds=20)
CONNECT_TIMEOUT = dt.timedelta(seconds=60)
"""The node hangs up on a terminal that nobody entered sooner."""
RETENTION = dt.timedelta(days=7)
OPEN_TERMINAL_HINT = "terminal"

IS_OPEN = Q(closed_at__isnull=True, error="") & (
    Q(connected_at__isnull=False) | Q(requested_at__gt=Now() - CONNECT_TIMEOUT)
)


# -- asked for by web ------------------------------------------------------------------------------


def do_open_terminal(user: User, job: Job, rank: int, session_key: str, *, cols: int, rows: int) -> Terminal:
    """Asks the task's node for a terminal; it listens once the row has a port.

    Raises NotThere or NotAllowed for others, Conflict while there is no such running task.
    """
    require_permission(user, Permission.ENTER, job)
    task = running_task(job, rank)
    if not session_key:
        raise Conflict("Sign in again, then open it.", code="session_ended")
    if Terminal.objects.filter(IS_OPEN, user=user).count() >= MAX_TERMINALS_PER_USER:
        raise Conflict(
            f"{MAX_TERMINALS_PER_USER} terminals of yours are open. Close one first.",
            code="too_many_terminals",
        )
    name = new_public_id()
    with transaction.atomic():
        terminal = Terminal.objects.create(
            public_id=name,
            task=task,
            user=user,
            session_key=session_id(session_key),
            secret=encrypt(secrets.token_urlsafe(32), _encryption_context(name)),
            cols=min(max(cols, TERMINAL_SIZE.start), TERMINAL_SIZE.stop - 1),
            rows=min(max(rows, TERMINAL_SIZE.start), TERMINAL_SIZE.stop - 1),
        )
        record_action(
            user, "terminal.open", job, after={"terminal": name, "rank": rank, "node": task.node.name}
        )
        notify_node(task.node.public_id, OPEN_TERMINAL_HINT)
    return terminal


def running_task(job: Job, rank: int) -> Task:
    """The task of this rank, where it runs and is to go on. Raises Conflict."""
    task = (
        Task.objects.select_related("node")
        .filter(
            attempt__job=job,
            attempt__job__desired_state=DesiredState.RUN.value,
            attempt__state=AttemptState.RUNNING.value,
            attempt__stop_requested_at__isnull=True,
            eviction_requested_at__isnull=True,
            state=AttemptState.RUNNING.value,
            rank=rank,
        )
        .first()
    )
    if task is None:
        raise Conflict("This rank does not run now.", code="task_not_running")
    if not task.node.reachable:
        raise Conflict(f"{task.node.name} does not answer at the moment.", code="node_unreachable")
    return task


def get_terminal(user: User, public_id: str) -> Terminal:
    """A terminal of one's own. Raises NotThere."""
    found = Terminal.objects.filter(public_id=public_id, user=user).first()
    if found is None:
        raise NotFound
    return found


# -- opened by the actor of the node ---------------------------------------------------------------


def terminals_to_open(node: Node) -> list[Terminal]:
    """What people have just asked for on a node; what waited longer nobody waits for any more."""
    rows = Terminal.objects.select_related("task__attempt__job").filter(
        task__node=node,
        port__isnull=True,
        error="",
        closed_at__isnull=True,
        requested_at__gt=Now() - OPEN_TIMEOUT,
    )
    return list(rows.order_by("pk"))


def terminal_secret(terminal: Terminal) -> str:
    """The secret in the clear: for the node and for the gateway, nobody else. Raises CannotOpen."""
    return decrypt(terminal.secret, _encryption_context(terminal.public_id))


def record_listening(terminal: Terminal, port: int) -> None:
    """It waits on its node to be entered."""
    Terminal.objects.filter(pk=terminal.pk).update(port=port)


def record_open_failure(terminal: Terminal, message: str) -> None:
    """The node did not open it."""
    Terminal.objects.filter(pk=terminal.pk).update(error=message[:300])


# -- entered and closed by the gateway -------------------------------------------------------------


def do_mark_connected(public_id: str) -> bool:
    """Notes that it is entered; False when it was before: a terminal is entered once."""
    fresh = Terminal.objects.filter(public_id=public_id, connected_at__isnull=True, closed_at__isnull=True)
    return fresh.update(connected_at=Now()) == 1


def do_close_terminal(public_id: str, reason: str) -> None:
    """Notes that it is closed, and for how long it was open. Repeatable."""
    _close(Terminal.objects.filter(public_id=public_id), reason)


def close_orphaned_terminals(reason: str) -> None:
    """Closes all that were entered, when a gateway begins: their sockets have ended with the one before."""
    _close(Terminal.objects.filter(connected_at__isnull=False), reason)


def delete_old_terminals() -> None:
    """Deletes rows of old; that they were opened and closed stays in the audit trail."""
    Terminal.objects.filter(
        Q(closed_at__isnull=False) | Q(connected_at__isnull=True), requested_at__lt=Now() - RETENTION
    ).delete()


def _close(rows: QuerySet[Terminal], reason: str) -> None:
    with transaction.atomic():
        live = rows.filter(closed_at__isnull=True).select_for_update(of=("self",), no_key=True)
        for terminal in live.select_related("user", "task__attempt__job").order_by("pk"):
            Terminal.objects.filter(pk=terminal.pk).update(closed_at=Now())
            terminal.refresh_from_db(fields=["closed_at"])
            since, until = terminal.connected_at or terminal.requested_at, terminal.closed_at
            seconds = round((until - since).total_seconds()) if until else 0
            after = {"terminal": terminal.public_id, "rank": terminal.task.rank, "seconds": seconds}
            record_action(
                terminal.user, "terminal.close", terminal.task.attempt.job, after=after, reason=reason
            )


def _encryption_context(public_id: str) -> EncryptionContext:
    return EncryptionContext("portal_terminal", public_id, "secret")
