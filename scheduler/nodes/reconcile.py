"""Reconciles the database with a node: records its reports, adopts tasks, stops those that must not run."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Sequence

from django.utils import timezone

from agents import verbs
from agents.engines.replies import Container, PollResult, TaskKey
from portal.domain.nodes.node_breaker import IncidentKind
from portal.domain.scheduling.policy_settings import STALL_TIMEOUT
from portal.domain.states import LIVE_ATTEMPT_STATES, AttemptState
from portal.domain.stored_texts import stored_text
from portal.failpoints import failpoint
from portal.models import Attempt, ClusterSettings, Node, Task
from portal.selectors.scheduling.settings import pool_settings
from portal.services.cluster import recovery
from portal.services.jobs import task_reports
from portal.services.jobs.code import record_code_commit
from portal.services.lifecycle import job_control
from portal.services.nodes import nodes, quarantine
from portal.services.sweeps.reports import record_reports
from scheduler.nodes.dispatch import (
    active_tasks,
    collect_log,
    record_task_ends,
    remove_ended,
    stop_attempt,
    stop_orphan,
    stop_task,
)
from scheduler.nodes.engine_connect import EngineConnectError
from scheduler.nodes.launch_files import refresh_hosts
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.state_diff import StateDiff, StoredTask, diff_state

log = logging.getLogger(__name__)

MAX_ORPHANS = 100
"""Unknown attempts stopped per reconciliation; the next one continues."""
_COLLECTED_COLUMNS = (
    *("rank", "container_removed", "log_bytes", "log_complete"),
    *("attempt__number", "attempt__state", "attempt__stop_requested_at"),
    *("attempt__job__public_id", "attempt__job__tasks", "attempt__job__min_tasks"),
)
MISSING_RECHECK_S = 1.0
"""A missing container is polled again after this time before its task is recorded as lost."""


def on_connected(connection: NodeConnection, received_s: float) -> None:
    """Record a hello. Raise EngineConnectError when it names an epoch above ours, and record nothing of it.

    Only the database issues epochs. A node with a higher one would refuse every command; an administrator
    must find out whether the node is wrong or the database was restored.
    """
    hello, epoch = connection.engine.hello, connection.epoch()
    if hello["highest_epoch"] > epoch:
        message = stored_text(
            f"It reports epoch {hello['highest_epoch']}, above {epoch}, the highest that this portal issued, "
            "and would refuse every command. If the database was restored to an earlier state, stop the portal "
            "and run manage.py begin-recovery; otherwise see docs/nodes.md, A node that reports an epoch."
        )
        quarantine.record_incident(connection.node.pk, IncidentKind.EPOCH_AHEAD, message=message)
        raise EngineConnectError(message, "epoch_ahead")
    if nodes.record_hello(connection.node.pk, hello, received_s=received_s):
        log.warning("%s restarted since its last hello", connection.node.name)
    failpoint("hello.recorded")


def reconcile(connection: NodeConnection) -> StateDiff:
    """Compare database and node once and resolve differences.

    Raise OutcomeUnknownError, AgentError or LeaseLostError.
    """
    # read before the tasks: an adoption that ends recovery mode later is then in the next reconciliation
    cluster = ClusterSettings.objects.get(id=1)
    recovering = cluster.recovery_mode
    held = active_tasks(connection.node)
    recorded = {_key(task): _stored_task(task) for task in held}
    asked_at = timezone.now()
    seen = connection.engine.request(verbs.LIST, PollResult.from_wire)
    skew_s = None if seen.clock_s is None else seen.clock_s - time.time()
    if seen.boot_id != connection.node.boot_id and connection.node.boot_id:
        # the node restarted within an open connection; the hello of a new one reports that
        connection.engine.close()
        return StateDiff()
    recorded |= _known_tasks(connection.node, [c.key for c in seen.containers if c.key not in recorded])
    found = diff_state(recorded, seen.containers)
    _apply(connection, found, {_key(task): task for task in held})
    refresh_hosts(connection, held)
    detects_stalls = bool(pool_settings(connection.node.pool, cluster.policy)[STALL_TIMEOUT])
    _record_reports(held, seen.containers, asked_at, detects_stalls=detects_stalls)
    if recovering:
        _apply_admin_decisions(connection, found.orphans)
    else:
        orphans = {(each.key.job, each.key.attempt) for each in found.orphans}
        for job, attempt in sorted(orphans)[:MAX_ORPHANS]:
            log.warning("stopping %s/%s on %s: it is not in the database", job, attempt, connection.node.name)
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
    if found.finish:
        record_task_ends(connection, {task.id: container for task, container in found.finish})
    if found.lost:
        _record_lost_tasks(connection, found.lost)
    for job, attempt in sorted(found.stop):
        _stop(connection, job, attempt, held)
    for recorded in found.evict:
        _evict_task(connection, recorded, held)
    attempts = {(c.key.job, c.key.attempt) for task, c in (*found.collect, *found.finish) if task is not None}
    orphans = {(c.key.job, c.key.attempt) for task, c in found.collect if task is None}
    collect_and_remove(connection, [*sorted(attempts), *sorted(orphans)[:MAX_ORPHANS]])


def _record_reports(
    held: list[Task], containers: tuple[Container, ...], asked_at: dt.datetime, *, detects_stalls: bool
) -> None:
    """Record checkpoints, progress and metrics (one task of a gang is enough), commits, and output for stalls."""
    here = set(map(_key, held))
    by_attempt: dict[tuple[str, int], list[Container]] = defaultdict(list)
    for container in sorted(containers, key=lambda each: each.key.task):
        if container.key in here:  # another node reports other ranks
            by_attempt[container.key.job, container.key.attempt].append(container)
    for attempt in {task.attempt_id: task.attempt for task in held}.values():
        mine = by_attempt[attempt.job.public_id, attempt.number]
        if saved := [each for each in mine if each.checkpoint_age_s is not None]:
            newest = min(saved, key=lambda each: each.checkpoint_age_s or 0.0)
            task_reports.record_checkpoint(
                attempt, newest.checkpoint_age_s or 0.0, newest.checkpoint_step, polled_at=asked_at
            )
        if one := next((each for each in mine if each.progress is not None), None):
            rank, done, ago_s = one.key.task, one.progress, one.progress_age_s
            task_reports.record_progress(attempt, rank, done or 0.0, ago_s or 0.0, polled_at=asked_at)
            if attempt.job.tasks > 1:
                ranks = {each.key.task: each for each in mine if each.progress is not None}
                task_reports.record_rank_progress(attempt, ranks, polled_at=asked_at)
        for commit, written_s in {each.code_commit: each.code_written_s for each in mine}.items():
            if commit:
                record_code_commit(attempt, commit, written_s)
        measured = next((each for each in mine if each.metrics), None)
        if measured is not None and "FAIRWAY_TRIAL" in attempt.job.env:
            record_reports(attempt.job_id, measured.metrics)
        if not detects_stalls and attempt.job.stall_timeout_s is None:
            continue
        if written := [each.output_age_s for each in mine if each.output_age_s is not None]:
            task_reports.record_output(attempt, min(written), polled_at=asked_at)


def _stop(connection: NodeConnection, job: str, attempt: int, held: dict[TaskKey, Task]) -> None:
    for key, task in held.items():
        if (key.job, key.attempt) == (job, attempt):
            stop_attempt(connection, task.attempt)
            return
    stop_orphan(connection, job, attempt)


def _evict_task(connection: NodeConnection, recorded: StoredTask, held: dict[TaskKey, Task]) -> None:
    """Stop one task whose attempt continues."""
    task = held.get(recorded.key)
    if task is not None:
        stop_task(connection, task)
    elif connection.engine.supports(verbs.CAN_STOP_TASKS):
        stop_orphan(connection, recorded.key.job, recorded.key.attempt, [recorded.key.task])


def _stop_orphans(connection: NodeConnection, job: str, attempt: int, orphans: list[Container]) -> None:
    """Stop unknown containers, but no known task of the same attempt."""
    known = Attempt.objects.filter(job__public_id=job, number=attempt, state__in=LIVE_ATTEMPT_STATES)
    tasks = [each.key.task for each in orphans if (each.key.job, each.key.attempt) == (job, attempt)]
    stop_orphan(
        connection,
        job,
        attempt,
        tasks if connection.engine.supports(verbs.CAN_STOP_TASKS) and known.exists() else None,
    )


def _apply_admin_decisions(connection: NodeConnection, orphans: list[Container]) -> None:
    """In recovery mode, stop an unknown container only where an administrator decided so.

    The node counts as not reconciled until each is kept or gone.
    """
    for job, attempt in sorted(recovery.record_orphans(connection.node, orphans)):
        log.warning(
            "stopping attempt %s of %s on %s: a stop was requested", attempt, job, connection.node.name
        )
        failpoint("orphan.before_stop")
        _stop_orphans(connection, job, attempt, orphans)


def _record_lost_tasks(connection: NodeConnection, missing: list[StoredTask]) -> None:
    """End tasks whose containers disappeared, once a second poll confirms it."""
    time.sleep(MISSING_RECHECK_S)
    listed = connection.engine.request(verbs.LIST, PollResult.from_wire)
    there = {container.key for container in listed.containers}
    lost = [recorded for recorded in missing if recorded.key not in there]
    if lost:
        names = ", ".join(map(str, (recorded.key for recorded in lost)))
        log.warning("the containers of %s vanished from %s", names, connection.node.name)
        record_task_ends(connection, {recorded.id: None for recorded in lost})


def collect_and_remove(connection: NodeConnection, attempts: Collection[tuple[str, int]]) -> None:
    """Fetch the remaining logs of ended attempts (job, number), then remove those that are done from the node.

    An elastic attempt that continues is not removed: the node would refuse new tasks of a removed attempt.
    """
    found: dict[tuple[str, int], list[Task]] = {each: [] for each in attempts}
    rows = Task.objects.filter(node=connection.node, attempt__job__public_id__in={job for job, _ in found})
    for task in rows.select_related("attempt__job").only(*_COLLECTED_COLUMNS).order_by("rank"):
        if (tasks := found.get((task.attempt.job.public_id, task.attempt.number))) is not None:
            tasks.append(task)
    done = [each for each, tasks in found.items() if _collect_logs(connection, tasks)]
    if done:
        remove_ended(connection, done)


def _collect_logs(connection: NodeConnection, tasks: Sequence[Task]) -> bool:
    """Fetch the remaining logs of an attempt; return True when it may be removed."""
    survives = any(_survives_task_end(task.attempt) for task in tasks)
    if any(not task.container_removed for task in tasks) and not survives:
        return False
    ended = [task for task in tasks if task.container_removed]
    return all(collect_log(connection, task, _key(task)) for task in ended) and not survives


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
    """Return True for an attempt that may get tasks again after one ended."""
    return (
        attempt.job.is_elastic and attempt.state in LIVE_ATTEMPT_STATES and attempt.stop_requested_at is None
    )


def _known_tasks(node: Node, keys: list[TaskKey]) -> dict[TaskKey, StoredTask]:
    """Return those of the keys that are tasks of this node in the database."""
    if not keys:
        return {}
    rows = Task.objects.filter(node=node, attempt__job__public_id__in={key.job for key in keys})
    known = {_key(task): _stored_task(task) for task in rows.select_related("attempt__job")}
    return {key: known[key] for key in keys if key in known}
