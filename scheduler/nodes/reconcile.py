"""Nodes -> record: writes down what a node tells, adopts and finishes, and stops what must not live."""

from __future__ import annotations

import datetime as dt
import logging
import time

from django.utils import timezone

from agents.engines.interface import Container, TaskKey
from portal.domain.node_breaker import IncidentKind
from portal.domain.states import LIVE_ATTEMPT_STATES, AttemptState
from portal.failpoints import failpoint
from portal.models import Attempt, ClusterSettings, Node, Task
from portal.services.cluster import recovery
from portal.services.jobs import checkpoints, progress
from portal.services.lifecycle import job_control
from portal.services.nodes import breaker, nodes
from scheduler.nodes.dispatch import (
    NodeConnection,
    active_tasks,
    collect_log,
    record_task_end,
    remove_ended,
    stop_attempt,
    stop_orphan,
    stop_task,
)
from scheduler.nodes.engine_connect import EngineConnectError
from scheduler.nodes.state_diff import StateDiff, StoredTask, diff_state

log = logging.getLogger(__name__)

MAX_ORPHANS = 100
"""Attempts that the record does not know are cleared away so many at a time; the next comparison goes on."""
MISSING_RECHECK_S = 1.0
"""A container that is missing is asked for again after this time, before its task is said to have vanished."""


def on_connected(connection: NodeConnection, received_s: float) -> None:
    """Writes down a hello. Raises CannotOpen for one that names an epoch above ours, and takes nothing of it.

    Epochs are given by the database alone. A node that has heard a higher one would refuse every command; whether it
    lies, or the database was set back without our knowing, an administrator finds out.
    """
    hello, epoch = connection.engine.hello, connection.epoch()
    if hello["highest_epoch"] > epoch:
        message = (
            f"It reports epoch {hello['highest_epoch']}, above {epoch}, the highest that this portal gave it, and "
            "would refuse every command. If the database was set back to an earlier moment, stop the portal and run "
            "manage.py begin-recovery; else see docs/nodes.md, A node that reports an epoch."
        )
        breaker.record_incident(connection.node.pk, IncidentKind.EPOCH_AHEAD, message=message)
        raise EngineConnectError(message, "epoch_ahead")
    if nodes.record_hello(connection.node.pk, hello, received_s=received_s):
        log.warning("%s restarted since it was last heard", connection.node.name)
    failpoint("hello.recorded")


def reconcile(connection: NodeConnection) -> StateDiff:
    """Compares record and node once and sets right what differs. Raises OutcomeUnknownError, Refused or LeaseLostError."""
    # before the record: whoever keeps a container after this has it in the record of the next comparison
    recovering = ClusterSettings.objects.get(id=1).recovery_mode
    held = active_tasks(connection.node)
    recorded = {_key(task): _stored_task(task) for task in held}
    asked_at = timezone.now()
    seen = connection.engine.poll()
    skew_s = None if seen.clock_s is None else seen.clock_s - time.time()
    if seen.boot_id != connection.node.boot_id and connection.node.boot_id:
        # it restarted under our open link: the hello of a new one says what that means
        connection.engine.close()
        return StateDiff()
    recorded |= _known_tasks(connection.node, [c.key for c in seen.containers if c.key not in recorded])
    found = diff_state(recorded, seen.containers)
    _apply(connection, found, {_key(task): task for task in held})
    _record_reports(held, seen.containers, asked_at)
    if recovering:
        _apply_admin_decisions(connection, found.orphans)
    else:
        orphans = {(each.key.job, each.key.attempt) for each in found.orphans}
        for job, attempt in sorted(orphans)[:MAX_ORPHANS]:
            log.warning(
                "stopping %s/%s on %s: the record does not know it", job, attempt, connection.node.name
            )
            _stop_orphans(connection, job, attempt, found.orphans)
    agreed = not (recovering and found.orphans)
    nodes.record_contact(
        connection.node.pk, skew_s, disk_full_message=seen.disk_full_message, compared=agreed
    )
    failpoint("reconcile.done")
    return found


def _apply(connection: NodeConnection, found: StateDiff, held: dict[TaskKey, Task]) -> None:
    for recorded, container in found.adopt:
        log.info("adopting %s on %s", container.name, connection.node.name)
        job_control.record_task_running(recorded.id, container=container.name, ports=container.ports)
        failpoint("reconcile.adopted")
    for recorded, container in found.finish:
        record_task_end(recorded.id, container)
    if found.lost:
        _record_lost_tasks(connection, found.lost)
    for job, attempt in sorted(found.stop):
        _stop(connection, job, attempt, held)
    for recorded in found.evict:
        _evict_task(connection, recorded, held)
    attempts = {(c.key.job, c.key.attempt) for task, c in (*found.collect, *found.finish) if task is not None}
    orphans = {(c.key.job, c.key.attempt) for task, c in found.collect if task is None}
    for job, attempt in [*sorted(attempts), *sorted(orphans)[:MAX_ORPHANS]]:
        collect_and_remove(connection, job, attempt)


def _record_reports(held: list[Task], containers: tuple[Container, ...], asked_at: dt.datetime) -> None:
    """Writes down who saved its work and how far each has come; of a gang it is enough that one task says so."""
    saved_s: dict[tuple[str, int], float] = {}
    reporting: dict[tuple[str, int], Container] = {}
    here = set(map(_key, held))
    for container in sorted(containers, key=lambda each: each.key.task):
        if container.key not in here:
            continue  # another node speaks for that rank
        attempt_key = container.key.job, container.key.attempt
        if container.checkpoint_age_s is not None:
            saved_s[attempt_key] = min(
                container.checkpoint_age_s, saved_s.get(attempt_key, container.checkpoint_age_s)
            )
        if container.progress is not None:
            reporting.setdefault(attempt_key, container)
    for attempt in {task.attempt_id: task.attempt for task in held}.values():
        attempt_key = attempt.job.public_id, attempt.number
        if attempt_key in saved_s:
            checkpoints.record_checkpoint(attempt, saved_s[attempt_key], polled_at=asked_at)
        if one := reporting.get(attempt_key):
            rank, done, ago_s = one.key.task, one.progress, one.progress_age_s
            progress.record_progress(attempt, rank, done or 0.0, ago_s or 0.0, polled_at=asked_at)


def _stop(connection: NodeConnection, job: str, attempt: int, held: dict[TaskKey, Task]) -> None:
    for key, task in held.items():
        if (key.job, key.attempt) == (job, attempt):
            stop_attempt(connection, task.attempt)
            return
    stop_orphan(connection, job, attempt)


def _evict_task(connection: NodeConnection, recorded: StoredTask, held: dict[TaskKey, Task]) -> None:
    """Ends one task whose attempt goes on."""
    task = held.get(recorded.key)
    if task is not None:
        stop_task(connection, task)
    elif connection.engine.supports_stopping_tasks:
        stop_orphan(connection, recorded.key.job, recorded.key.attempt, [recorded.key.task])


def _stop_orphans(connection: NodeConnection, job: str, attempt: int, orphans: list[Container]) -> None:
    """Ends containers of ours that the record never heard of, and no other of an attempt that it knows."""
    known = Attempt.objects.filter(job__public_id=job, number=attempt, state__in=LIVE_ATTEMPT_STATES)
    tasks = [each.key.task for each in orphans if (each.key.job, each.key.attempt) == (job, attempt)]
    stop_orphan(
        connection,
        job,
        attempt,
        tasks if connection.engine.supports_stopping_tasks and known.exists() else None,
    )


def _apply_admin_decisions(connection: NodeConnection, orphans: list[Container]) -> None:
    """After a restore an unknown container is ended only where an administrator said so.

    Its node counts as not compared yet until it was kept or is gone.
    """
    for job, attempt in sorted(recovery.record_orphans(connection.node, orphans)):
        log.warning("stopping attempt %s of %s on %s, as was decided", attempt, job, connection.node.name)
        failpoint("orphan.before_stop")
        _stop_orphans(connection, job, attempt, orphans)


def _record_lost_tasks(connection: NodeConnection, missing: list[StoredTask]) -> None:
    """Ends tasks whose containers are gone without a trace, once a second look says the same."""
    time.sleep(MISSING_RECHECK_S)
    there = {container.key for container in connection.engine.poll().containers}
    for recorded in missing:
        if recorded.key not in there:
            log.warning("the container of %s vanished from %s", recorded.key, connection.node.name)
            record_task_end(recorded.id, None)


def collect_and_remove(connection: NodeConnection, job: str, attempt: int) -> bool:
    """Fetches what is left of an ended attempt's logs, then drops it from the node; True when done.

    Of an elastic attempt that goes on nothing is dropped: a node that dropped it would start none of it again.
    """
    rows = list(
        Task.objects.filter(node=connection.node, attempt__job__public_id=job, attempt__number=attempt)
        .select_related("attempt__job")
        .order_by("rank")
    )
    survives = any(_survives_task_end(task.attempt) for task in rows)
    if any(not task.container_removed for task in rows) and not survives:
        return False
    ended = [task for task in rows if task.container_removed]
    if not all(collect_log(connection, task, TaskKey(job, attempt, task.rank)) for task in ended) or survives:
        return False
    remove_ended(connection, job, attempt)
    return True


def _key(task: Task) -> TaskKey:
    return TaskKey(task.attempt.job.public_id, task.attempt.number, task.rank)


def _stored_task(task: Task) -> StoredTask:
    return StoredTask(
        id=task.pk,
        key=_key(task),
        state=AttemptState(task.state),
        gone=task.container_removed or task.attempt.state not in LIVE_ATTEMPT_STATES,
        sent=task.attempt.start_sent_at is not None,
        stop_requested=task.attempt.stop_requested_at is not None,
        eviction_requested=task.eviction_requested_at is not None,
        attempt_continues=_survives_task_end(task.attempt),
    )


def _survives_task_end(attempt: Attempt) -> bool:
    """True for an attempt that may get tasks again where one of it ended."""
    return (
        attempt.job.is_elastic and attempt.state in LIVE_ATTEMPT_STATES and attempt.stop_requested_at is None
    )


def _known_tasks(node: Node, keys: list[TaskKey]) -> dict[TaskKey, StoredTask]:
    """Those of the keys that the record knows as tasks of this node."""
    if not keys:
        return {}
    rows = Task.objects.filter(node=node, attempt__job__public_id__in={key.job for key in keys})
    known = {_key(task): _stored_task(task) for task in rows.select_related("attempt__job")}
    return {key: known[key] for key in keys if key in known}
