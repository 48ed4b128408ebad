"""A terminal in a running task: asked for, opened on its node, entered once, closed. What passes is kept nowhere."""

from __future__ import annotations

import datetime as dt
import secrets

from django.db import transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from portal.access import Verb, require
from portal.errors import Conflict, NotThere
from portal.models import Job, Node, Task, Terminal, User
from portal.models.public_id import new_public_id
from portal.services.audit import record_act
from portal.services.sealing import Place, seal, unseal
from portal.services.session_store import session_id
from portal.wake import hint_node
from portal.words.states import AttemptState, Desired

MOST_OF_A_PERSON = 16
"""Open at a time; a node has bounds of its own (``agents/node/terminals.py``)."""
SIDE = range(1, 1001)
"""Columns or rows."""
OPENED_WITHIN = dt.timedelta(seconds=20)
ENTERED_WITHIN = dt.timedelta(seconds=60)
"""The node hangs up on a terminal that nobody entered sooner."""
KEPT = dt.timedelta(days=7)
HINT = "terminal"

OPEN = Q(closed_at__isnull=True, refusal="") & (
    Q(entered_at__isnull=False) | Q(asked_at__gt=Now() - ENTERED_WITHIN)
)


# -- asked for by web ------------------------------------------------------------------------------


def do_open_terminal(user: User, job: Job, rank: int, session_key: str, *, cols: int, rows: int) -> Terminal:
    """Asks the task's node for a terminal; it listens once the row has a port.

    Raises NotThere or NotAllowed for others, Conflict while there is no such running task.
    """
    require(user, Verb.ENTER, job)
    task = running_task(job, rank)
    if not session_key:
        raise Conflict("Sign in again, then open it.", code="session_ended")
    if Terminal.objects.filter(OPEN, user=user).count() >= MOST_OF_A_PERSON:
        raise Conflict(
            f"{MOST_OF_A_PERSON} terminals of yours are open. Close one first.", code="too_many_terminals"
        )
    name = new_public_id()
    with transaction.atomic():
        terminal = Terminal.objects.create(
            public_id=name,
            task=task,
            user=user,
            session_key=session_id(session_key),
            secret=seal(secrets.token_urlsafe(32), _place(name)),
            cols=min(max(cols, SIDE.start), SIDE.stop - 1),
            rows=min(max(rows, SIDE.start), SIDE.stop - 1),
        )
        record_act(user, "terminal.open", job, after={"terminal": name, "rank": rank, "node": task.node.name})
        hint_node(task.node.public_id, HINT)
    return terminal


def running_task(job: Job, rank: int) -> Task:
    """The task of this rank, where it runs and is to go on. Raises Conflict."""
    task = (
        Task.objects.select_related("node")
        .filter(
            attempt__job=job,
            attempt__job__desired=Desired.RUN.value,
            attempt__state=AttemptState.RUNNING.value,
            attempt__stop_wanted_at__isnull=True,
            leave_wanted_at__isnull=True,
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


def terminal_for(user: User, public_id: str) -> Terminal:
    """A terminal of one's own. Raises NotThere."""
    found = Terminal.objects.filter(public_id=public_id, user=user).first()
    if found is None:
        raise NotThere
    return found


# -- opened by the actor of the node ---------------------------------------------------------------


def terminals_to_open(node: Node) -> list[Terminal]:
    """What people have just asked for on a node; what waited longer nobody waits for any more."""
    rows = Terminal.objects.select_related("task__attempt__job").filter(
        task__node=node,
        port__isnull=True,
        refusal="",
        closed_at__isnull=True,
        asked_at__gt=Now() - OPENED_WITHIN,
    )
    return list(rows.order_by("pk"))


def terminal_secret(terminal: Terminal) -> str:
    """The secret in the clear: for the node and for the gateway, nobody else. Raises CannotOpen."""
    return unseal(terminal.secret, _place(terminal.public_id))


def record_listening(terminal: Terminal, port: int) -> None:
    """It waits on its node to be entered."""
    Terminal.objects.filter(pk=terminal.pk).update(port=port)


def record_refused(terminal: Terminal, sentence: str) -> None:
    """The node did not open it."""
    Terminal.objects.filter(pk=terminal.pk).update(refusal=sentence[:300])


# -- entered and closed by the gateway -------------------------------------------------------------


def do_enter_terminal(public_id: str) -> bool:
    """Notes that it is entered; False when it was before: a terminal is entered once."""
    fresh = Terminal.objects.filter(public_id=public_id, entered_at__isnull=True, closed_at__isnull=True)
    return fresh.update(entered_at=Now()) == 1


def do_close_terminal(public_id: str, why: str) -> None:
    """Notes that it is closed, and for how long it was open. Repeatable."""
    _close(Terminal.objects.filter(public_id=public_id), why)


def close_left_open(why: str) -> None:
    """Closes all that were entered, when a gateway begins: their sockets have ended with the one before."""
    _close(Terminal.objects.filter(entered_at__isnull=False), why)


def forget_old_terminals() -> None:
    """Deletes rows of old; that they were opened and closed stays in the audit trail."""
    Terminal.objects.filter(
        Q(closed_at__isnull=False) | Q(entered_at__isnull=True), asked_at__lt=Now() - KEPT
    ).delete()


def _close(rows: QuerySet[Terminal], why: str) -> None:
    with transaction.atomic():
        live = rows.filter(closed_at__isnull=True).select_for_update(of=("self",), no_key=True)
        for terminal in live.select_related("user", "task__attempt__job").order_by("pk"):
            Terminal.objects.filter(pk=terminal.pk).update(closed_at=Now())
            terminal.refresh_from_db(fields=["closed_at"])
            since, until = terminal.entered_at or terminal.asked_at, terminal.closed_at
            seconds = round((until - since).total_seconds()) if until else 0
            after = {"terminal": terminal.public_id, "rank": terminal.task.rank, "seconds": seconds}
            record_act(terminal.user, "terminal.close", terminal.task.attempt.job, after=after, reason=why)


def _place(public_id: str) -> Place:
    return Place("portal_terminal", public_id, "secret")
