"""Drains nodes: their jobs run until they end, are moved after their next checkpoint, or are requeued at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.domain.jobs.reasons import EndReason
from portal.domain.nodes.drains import MOVE_EVENT, SAVE_WAIT_S, DrainChoice
from portal.domain.states import AttemptState, JobKind, NodeState
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, InvalidRequest
from portal.models import Job, Node, Task, User
from portal.selectors.nodes.drains import continuing_tasks, last_saved, move_deadline, pending_moves
from portal.services.jobs.signals import do_send_signal
from portal.services.lifecycle import elastic
from portal.services.lifecycle.state_events import record_event
from portal.services.nodes.locks import lock_node
from portal.services.nodes.nodes import do_set_node_state

SAVE_SIGNAL = "SIGUSR1"


class NodeAsSeen(NamedTuple):
    """What the actor saw of a node before the decision: its state, and the jobs on it by public id."""

    state: str
    jobs: frozenset[str]


def do_drain_node(
    actor: User,
    node: Node,
    *,
    jobs: DrainChoice = DrainChoice.END,
    exceptions: Mapping[str, DrainChoice] | None = None,
    signal: bool = False,
    reason: str = "",
    seen: NodeAsSeen | None = None,
) -> Node:
    """Take a node out of service; ``jobs`` says what happens to its jobs, ``exceptions`` to single ones by id.

    ``signal``: send SIGUSR1 to the jobs that are to be moved, on which many programs save a checkpoint. A job that
    does not run yet, a workspace and a service have nothing to save and are requeued at once instead of moved.
    Repeatable, also with another choice. Raise InvalidRequest for the id of no job; and Conflict if the node is not
    as ``seen``, or a job that was not seen would be stopped.
    """
    require_permission(actor, Permission.CHANGE, node)
    own = dict(exceptions or {})
    known = set(Job.objects.filter(public_id__in=own).values_list("public_id", flat=True))
    if unknown := sorted(own.keys() - known):
        raise InvalidRequest(fields={"exceptions": _("There is no job {job}.").format(job=unknown[0])})
    with transaction.atomic():
        row = lock_node(node)
        tasks = list(continuing_tasks([row.pk]).select_related("attempt__job").order_by("pk"))
        moved = {
            task.attempt_id: task.attempt for task in tasks if _choice(task, jobs, own) is DrainChoice.MOVE
        }
        kept = [task.pk for task in tasks if _choice(task, jobs, own) is not DrainChoice.END]
        if seen is not None:
            _check_seen(
                seen,
                row,
                [task.attempt.job for task in tasks if task.pk not in kept or task.attempt_id in moved],
            )
        row = do_set_node_state(actor, row, NodeState.DRAINED, reason=reason, keep=kept)
        for attempt in moved.values():
            message = stored_text(
                f"{row.name} is being drained: it moves after its next checkpoint, within "
                f"{SAVE_WAIT_S // 60} min at most."
            )
            details = {"node": row.public_id, "wait_s": SAVE_WAIT_S}
            record_event(attempt, MOVE_EVENT, "", message, actor.username, details=details)
            if signal:
                do_send_signal(actor, attempt.job, SAVE_SIGNAL)
    return row


def _check_seen(seen: NodeAsSeen, node: Node, stopped: Sequence[Job]) -> None:
    if node.state != seen.state:
        raise Conflict(
            _("{name} was changed meanwhile, and is {state} now. Look at its jobs again.").format(
                name=node.name, state=_(node.state.capitalize()).lower()
            )
        )
    if new := sorted({job.name for job in stopped if job.public_id not in seen.jobs}):
        raise Conflict(
            _("{jobs} started on {name} meanwhile. Look at its jobs again.").format(
                jobs=", ".join(new), name=node.name
            )
        )


def _choice(task: Task, jobs: DrainChoice, exceptions: Mapping[str, DrainChoice]) -> DrainChoice:
    choice = exceptions.get(task.attempt.job.public_id, jobs)
    saves = (
        task.attempt.job.kind == JobKind.TRAINING.value and task.attempt.state == AttemptState.RUNNING.value
    )
    return DrainChoice.END if choice is DrainChoice.MOVE and not saves else choice


def move_saved_jobs() -> None:
    """Requeue the jobs that are to be moved and have saved a checkpoint since, or whose time is over. Repeatable."""
    drained = Node.objects.filter(state=NodeState.DRAINED.value).values_list("pk", flat=True)
    tasks = (
        list(continuing_tasks(list(drained)).select_related("attempt", "node").order_by("pk"))
        if drained
        else []
    )
    if not tasks:
        return
    attempts = {task.attempt_id: task.attempt for task in tasks}
    moves, saved = pending_moves(attempts.values()), last_saved(list(attempts.values()))
    now = timezone.now()
    for task in tasks:
        event = moves.get(task.attempt_id)
        if event is None or event.details["node"] != task.node.public_id:
            continue
        at = saved.get(task.attempt_id)
        if (at is not None and at > event.at) or now >= move_deadline(event):
            message = stored_text(f"The node {task.node.name} is being drained.")
            elastic.end_tasks([task.pk], EndReason.PREEMPTED, message=message, actor=event.actor)
