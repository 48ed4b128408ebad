"""Starts, stops and records the state of jobs, attempts and tasks, with the allocations that belong to them.

Every function runs in the caller's transaction or opens one, locks rows in the order job, attempt, tasks,
GPUs (by id), writes an event with a reason, and publishes the change. It uses ``transitions``,
``allocations`` and ``attempt_end``. Only ``adoption``, ``elastic`` and ``suspension`` may use these too.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from django.db import transaction
from django.db.models import Case, F, Value, When
from django.db.models.functions import Coalesce
from django.utils import timezone
from django.utils.translation import gettext as _

from agents.verbs import LISTENING
from portal.domain.jobs.end_states import END_STATES, is_retried
from portal.domain.jobs.reasons import PENDING_AGAIN, EndReason, end_message
from portal.domain.jobs.roles import earlier_ranks
from portal.domain.states import (
    LIVE_ATTEMPT_STATES,
    TERMINAL_JOB_STATES,
    AttemptState,
    DesiredState,
    JobState,
)
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict
from portal.live_events import publish_all_on_commit, publish_on_commit
from portal.models import Attempt, Job, JobEvent, JobVerdict, Node, NodePool, Rendezvous, Task
from portal.outbox import notify_nodes, trigger_cycle
from portal.selectors.jobs.rights import job_denial
from portal.services.lifecycle import rendezvous
from portal.services.lifecycle.allocations import allocate_gpus, create_allocations, release_gpus
from portal.services.lifecycle.attempt_end import (
    bump_job_version,
    finish_attempts,
    gang_outcome,
    record_lost_tasks,
    survives_without,
    surviving_tasks,
)
from portal.services.lifecycle.failure_cause import task_end_message
from portal.services.lifecycle.job_notices import warn_of_reclaim
from portal.services.lifecycle.state_events import (
    attempt_event,
    attempt_topic_event,
    job_event,
    job_topic_events,
    lock_job,
    placement_text,
    record_event,
)
from portal.services.lifecycle.transitions import (
    AttemptChange,
    save_fields,
    set_attempt_state,
    set_task_state,
    transition_attempts,
    transition_job,
)


@dataclass(frozen=True)
class RankPlacement:
    """The placement of one rank: a node, and (GPU id, milli) pairs on it."""

    node: Node
    gpus: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class AttemptStart:
    """A job to start: ``placements`` in rank order, one per task, and a workspace's encrypted secret.

    An elastic job may start with fewer placements than requested, but not fewer than its minimum.
    """

    job: Job
    pool: NodePool
    placements: Sequence[RankPlacement]
    secret: str = ""


@dataclass(frozen=True)
class NewTasks:
    """Placed tasks to add to an attempt with ``live_count`` tasks; ranks start at ``first_rank``."""

    attempt: Attempt
    placements: Sequence[RankPlacement]
    first_rank: int = 0
    live_count: int = 0


@dataclass(frozen=True)
class StopRequest:
    """An attempt to stop, and why.

    ``for_job`` is the pending job for which it is preempted; the GPUs are reserved for that job until its
    next attempt, or until it is no longer pending.
    """

    attempt: int
    reason: EndReason
    message: str = ""
    for_job: Job | None = None


@dataclass(frozen=True)
class TaskEnd:
    """The proof that the container of a task (id) is gone: ``proof`` is gone, rebooted or fenced.

    ``reason`` applies if no stop was requested, with ``details`` for its message unless there is a ``message``.
    """

    task: int
    reason: EndReason
    exit_code: int | None = None
    message: str = ""
    oom: bool = False
    peak_memory_mib: int | None = None
    proof: str = "gone"
    details: Mapping[str, object] = field(default_factory=dict)


_STOP_FIELDS = (
    "state",
    "stop_requested_at",
    "stop_reason",
    "stop_requested_by",
    "message",
    "preempted_for",
    "preempted_for_attempt",
)


# -- start -----------------------------------------------------------------------------------------


def start_attempt(
    job: Job,
    pool: NodePool,
    placements: Sequence[RankPlacement],
    *,
    epoch: int,
    secret: str = "",
    now: dt.datetime | None = None,
) -> Attempt:
    """Start a single attempt, as ``start_attempts``."""
    return start_attempts([AttemptStart(job, pool, placements, secret)], epoch=epoch, now=now)[0]


def start_attempts(
    starts: Sequence[AttemptStart], *, epoch: int, now: dt.datetime | None = None
) -> list[Attempt]:
    """Allocate GPUs to PENDING jobs and create the next attempt of each in CONFIGURING: all or none.

    The jobs must be distinct and locked by the caller. Raise IntegrityError if a GPU is already allocated
    (the CHECK on ``used_milli`` fails), Conflict if a job or GPU changed. The number of queries does not
    depend on the number of jobs.
    """
    now = now or timezone.now()
    for each in starts:
        job = each.job
        held = job.held or job.awaits_failure_rule
        if job.state != JobState.PENDING or job.desired_state != DesiredState.RUN or held:
            raise Conflict(
                _("The job is {state}, not pending.").format(state=job.state.lower()), code="job_changed"
            )
        if not job.required_tasks <= len(each.placements) <= job.tasks:
            raise ValueError(f"{len(each.placements)} placements for {job.tasks} tasks")
    allocate_placements((each.job, each.placements) for each in starts)
    attempts = Attempt.objects.bulk_create(
        Attempt(
            job=each.job,
            number=each.job.attempt_count + 1,
            gang_start=each.job.is_gang,
            pool=each.pool,
            leader_epoch=epoch,
            secret=each.secret,
            queued_at=each.job.pending_since,
            created_at=now,
        )
        for each in starts
    )
    tasks = [NewTasks(attempt, each.placements) for attempt, each in zip(attempts, starts, strict=True)]
    created = create_tasks(tasks, now)  # before the events: nodes are waiting, pages are not
    rendezvous.create_rendezvous(zip(attempts, created, strict=True))
    JobVerdict.objects.filter(job__in=[each.job for each in starts]).delete()
    _set_running(starts, attempts, now)
    return attempts


def allocate_placements(placed: Iterable[tuple[Job, Sequence[RankPlacement]]]) -> None:
    """Allocate the GPUs of placements, as ``allocate_gpus``."""
    allocate_gpus(
        (gpu, milli, job.project_id)
        for job, placements in placed
        for placement in placements
        for gpu, milli in placement.gpus
    )


def create_tasks(new: Sequence[NewTasks], now: dt.datetime) -> list[list[Task]]:
    """Create tasks whose GPUs are allocated, and notify their nodes. Return the tasks of each in rank order."""
    placed = [
        (
            Task(
                attempt=each.attempt,
                rank=rank,
                node=placement.node,
                world_size_at_start=(
                    each.live_count + len(each.placements) if each.attempt.job.is_elastic else None
                ),
            ),
            each.attempt.pool,
            placement.gpus,
        )
        for each in new
        for rank, placement in enumerate(each.placements, each.first_rank)
    ]
    rows = iter(Task.objects.bulk_create(task for task, _, _ in placed))
    create_allocations(placed, now)
    notify_nodes({task.node.public_id: ("start", task.attempt.job.public_id) for task, _, _ in placed})
    return [list(islice(rows, len(each.placements))) for each in new]


def _set_running(starts: Sequence[AttemptStart], attempts: Sequence[Attempt], now: dt.datetime) -> None:
    """Move PENDING jobs with a new attempt to RUNNING, and write and publish their events."""
    events, news = [], []
    by_message: dict[str, list[int]] = {}
    for each, attempt in zip(starts, attempts, strict=True):
        job, names = each.job, [placement.node.name for placement in each.placements]
        node_names = ", ".join(sorted(set(names)))
        job.state, job.reason = JobState.RUNNING.value, "placed"
        job.message = stored_text(f"Its GPUs are allocated on {node_names}.")[:1000]
        job.version += 1
        job.attempt_count = attempt.number
        job.started_at = job.started_at or now
        job.exit_code = None
        by_message.setdefault(job.message, []).append(job.pk)
        events.append(job_event(job, JobState.PENDING, attempt))
        where, state = placement_text(job.preferred_nodes, names), AttemptState.CONFIGURING.value
        events.append(attempt_event(attempt, "attempt_state", "placed", where, after=state))
        news += [*job_topic_events(job), attempt_topic_event(attempt, "attempt_state", events[-1].message)]
    Job.objects.filter(pk__in=[each.job.pk for each in starts]).update(
        state=JobState.RUNNING.value,
        reason="placed",
        message=Case(*(When(pk__in=jobs, then=Value(text)) for text, jobs in by_message.items())),
        version=F("version") + 1,
        attempt_count=F("attempt_count") + 1,
        started_at=Coalesce("started_at", now),
        exit_code=None,
    )
    JobEvent.objects.bulk_create(events)
    publish_all_on_commit(news)


class OwnerNotPermittedError(Exception):
    """The owner of the job lost a right that it requires; nothing of this task was sent."""


def mark_task_sent(task: Task) -> bool:
    """Mark that a start command is about to be sent; return False if the task must not start any more.

    After True the node may have a container, whatever it answers (law 7). Raise OwnerNotPermittedError if the
    owner lost a required right. Revoking a right locks the attempt after changing it
    (``portal.services.lifecycle.rights_changes``), so either this call sees the change, or the revocation
    sees the attempt as running.
    """
    with transaction.atomic():
        locked = Attempt.objects.select_for_update(of=("self",), no_key=True).select_related("job")
        attempt = locked.get(pk=task.attempt_id)
        task.refresh_from_db(fields=["state", "eviction_requested_at", "start_sent_at", "prepared_at"])
        if not should_start(task, attempt):
            return False
        if denial := job_denial(attempt.job):
            raise OwnerNotPermittedError(str(denial))
        if attempt.start_sent_at is None:
            attempt.start_sent_at = timezone.now()
            attempt.save(update_fields=["start_sent_at"])
        if attempt.gang_start and task.start_sent_at is None:
            task.start_sent_at = timezone.now()
            task.save(update_fields=["start_sent_at"])
        return True


def should_start(task: Task, attempt: Attempt) -> bool:
    """Return True while a start command should be sent. A task that joins later starts in a running attempt.

    A prepared task waits for the rest of its gang.
    """
    begins = not attempt.gang_start or (
        attempt.all_prepared_at is not None
        and not _waits_for_rank_zero(task, attempt)
        and not _waits_for_earlier_roles(task, attempt)
    )
    return (
        task.state == AttemptState.CONFIGURING
        and attempt.state in (AttemptState.CONFIGURING, AttemptState.RUNNING)
        and attempt.stop_requested_at is None
        and task.eviction_requested_at is None
        and (should_prepare(task, attempt) or begins)
    )


def _waits_for_rank_zero(task: Task, attempt: Attempt) -> bool:
    """Return True until rank 0 runs, if its node's agent still listens for the connectivity check.

    Another rank would connect to that agent and take it for rank 0.
    """
    row: Rendezvous | None = getattr(attempt, "rendezvous", None)
    if task.rank == 0 or row is None or row.check_started_at is None:
        return False
    return Task.objects.filter(attempt=attempt, rank=0, state=AttemptState.CONFIGURING.value).exists()


def _waits_for_earlier_roles(task: Task, attempt: Attempt) -> bool:
    """Return True until the tasks of roles with a lower start order run, and listen if their node can tell."""
    earlier = earlier_ranks(attempt.job.job_roles, task.rank)
    if not earlier:
        return False
    rows = Task.objects.filter(attempt=attempt, rank__in=earlier).select_related("node", "attempt__job")
    return any(row.state == AttemptState.CONFIGURING or awaits_ports(row) for row in rows)


def awaits_ports(task: Task) -> bool:
    """Return True while a running task does not listen on the ports of its role, as far as its node can tell."""
    return (
        bool(task.role_ports)
        and task.state == AttemptState.RUNNING
        and task.listening_at is None
        and LISTENING.capability in task.node.agent_info.get("capabilities", ())
    )


def record_task_listening(task_id: int) -> None:
    """Record that a task listens on the ports of its role; roles with a higher start order may start."""
    with transaction.atomic():
        attempt, tasks, task = lock_attempt_of_task(task_id)
        if task.listening_at is None:
            task.listening_at = timezone.now()
            task.save(update_fields=["listening_at"])
            _notify_start(attempt, (row for row in tasks if row.state == AttemptState.CONFIGURING))


def should_prepare(task: Task, attempt: Attempt) -> bool:
    """Return True if the node should only prepare the task, until its whole gang is prepared."""
    return attempt.gang_start and task.prepared_at is None


def record_task_prepared(task_id: int) -> None:
    """Record that the node can start the task at once; release the gang if it was the last one."""
    with transaction.atomic():
        attempt, tasks, task = lock_attempt_of_task(task_id)
        if task.prepared_at is not None or not should_start(task, attempt):
            return
        task.prepared_at, task.status_message = timezone.now(), ""
        task.save(update_fields=["prepared_at", "status_message"])
        release_gang_start(attempt, tasks)


def release_gang_start(attempt: Attempt, tasks: Sequence[Task]) -> None:
    """Start a gang once each task is prepared, or already runs (possible after a restore).

    If required, its nodes first check that they can connect.
    """
    if not attempt.gang_start or attempt.all_prepared_at is not None:
        return
    ready = all(row.prepared_at is not None or row.state != AttemptState.CONFIGURING for row in tasks)
    if ready and not rendezvous.needs_connectivity_check(attempt, tasks):
        attempt.all_prepared_at = timezone.now()
        attempt.save(update_fields=["all_prepared_at"])
        _notify_start(attempt, tasks)


def _notify_start(attempt: Attempt, tasks: Iterable[Task]) -> None:
    notify_nodes({row.node.public_id: ("start", attempt.job.public_id) for row in tasks})


def record_task_running(
    task_id: int, *, container: str, ports: dict[str, int], at: dt.datetime | None = None
) -> None:
    """Record that the container runs.

    The attempt becomes RUNNING with its last task; an elastic one with its minimum number of tasks.
    """
    now = at or timezone.now()
    with transaction.atomic():
        attempt, tasks, task = lock_attempt_of_task(task_id)
        if task.state != AttemptState.CONFIGURING:
            return
        task.container, task.ports, task.running_at, task.status_message = container, ports, now, ""
        set_task_state(task, AttemptState.RUNNING)
        task.save(update_fields=["state", "container", "ports", "running_at", "status_message"])
        release_gang_start(attempt, tasks)
        if attempt.gang_start and (task.rank == 0 or attempt.job.has_start_order):
            _notify_start(attempt, (row for row in tasks if row.state == AttemptState.CONFIGURING))
        # a task of a gang may have ended before the last one runs
        run = sum(
            row.state != AttemptState.CONFIGURING if attempt.gang_start else row.state == AttemptState.RUNNING
            for row in tasks
        )
        if attempt.state == AttemptState.CONFIGURING and run >= attempt.job.required_tasks:
            attempt.running_at = now
            change = AttemptChange(
                attempt, AttemptState.RUNNING, "started", stored_text("Its containers run.")
            )
            transition_attempts([change], ("running_at",))


def record_task_problem(task_id: int, message: str) -> None:
    """Store what delays the task, for the job page; the scheduler keeps trying."""
    rows = Task.objects.filter(pk=task_id).exclude(status_message=message)
    if rows.update(status_message=message[:1000]):
        job = Job.objects.get(attempts__task_rows=task_id)
        publish_on_commit(f"job.{job.public_id}", {"kind": "task_problem", "message": message})


def finish_failure_check(attempt: Attempt, job: Job, message: str, *, rule: str = "") -> None:
    """Let a locked job whose failure was checked start again; ``rule``: the code of the rule that was applied.

    Without one, it fails unless it is retried after this class of failure, or is suspended.
    """
    reason = EndReason(attempt.reason)
    retried = is_retried(reason, attempt.exit_code, job.retry_on, job.retry_exit_codes)
    job.awaits_failure_rule = False
    if not rule and not retried and job.state == JobState.PENDING:
        transition_job(job, JobState.FAILED, reason=reason, message=message, attempt=attempt)
        return
    if not rule:
        message = f"{message} {PENDING_AGAIN}"
    if job.state == JobState.PENDING:
        job.message = message[:1000]
    job.version += 1
    job.save()
    record_event(attempt, "failure_action", rule or reason.value, message)
    trigger_cycle("requeue")


# -- stop ------------------------------------------------------------------------------------------


def request_stop(attempt_id: int, reason: EndReason, *, actor: str = "", message: str = "") -> None:
    """Stop a single attempt, as ``request_stops``."""
    request_stops([StopRequest(attempt_id, reason, message)], actor=actor)


def request_stops(requests: Sequence[StopRequest], *, actor: str = "") -> None:
    """Request the end of several attempts. The first reason of each attempt is kept. Repeatable.

    An attempt without a start command ends at once; others are COMPLETING until every node has proved that
    its container is gone.
    """
    wanted = {stop.attempt: stop for stop in requests}
    with transaction.atomic():
        attempts = lock_attempts(wanted)
        _request_stops_locked([(attempt, wanted[attempt.pk]) for attempt in attempts], actor)
        proofs: dict[Task, str] = {}
        for attempt, tasks in attempts.items():
            _add_unsent_tasks(proofs, attempt, tasks)
        _release_and_finish(proofs, attempts)


def record_task_ended(task_id: int, *, reason: EndReason, exit_code: int | None, **details: Any) -> bool:
    """Record the end of a single task, as ``record_tasks_ended``; return True if it failed by itself."""
    return bool(record_tasks_ended([TaskEnd(task_id, reason, exit_code, **details)]))


def record_tasks_ended(ends: Sequence[TaskEnd]) -> list[TaskEnd]:
    """Record the proof that containers of tasks are gone: release their GPUs, and stop their gangs.

    Repeatable. Return the ends that are new and of tasks that failed by themselves.
    """
    by_task = {end.task: end for end in ends}
    proofs: dict[Task, str] = {}
    failed: list[TaskEnd] = []
    now = timezone.now()
    with transaction.atomic():
        attempts = lock_attempts(Task.objects.filter(pk__in=by_task).values_list("attempt_id", flat=True))
        for attempt, tasks in attempts.items():
            for task in tasks:
                end = by_task.get(task.pk)
                if end is None or task.container_removed:
                    continue
                proofs[task], task.ended_at = end.proof, task.ended_at or now
                if _end_task(attempt, tasks, task, end, proofs):
                    failed.append(end)
        save_fields(list(proofs), "state", "ended_at", "exit_code", "oom", "peak_memory_mib")
        _release_and_finish(proofs, attempts)
    return failed


def _end_task(
    attempt: Attempt, tasks: Sequence[Task], task: Task, end: TaskEnd, proofs: dict[Task, str]
) -> bool:
    """Set the state of a task without saving it, and stop its gang if required; return True if it failed by itself.

    Tasks that will not start any more are added to ``proofs``.
    """
    job = attempt.job
    asked, leaves = attempt.stop_requested_at is not None, task.eviction_requested_at is not None
    failed = not asked and not leaves and end.reason is not EndReason.COMPLETED
    task.exit_code, task.oom, task.peak_memory_mib = end.exit_code, end.oom, end.peak_memory_mib
    if task.state in LIVE_ATTEMPT_STATES:
        cause = EndReason(attempt.stop_reason or task.eviction_reason) if asked or leaves else end.reason
        stopped = asked and cause is EndReason.COMPLETED and end.exit_code != 0
        set_task_state(task, AttemptState.CANCELLED if stopped else END_STATES[cause])
    task.container_removed = True
    if leaves:
        bump_job_version(job)
    elif failed:
        message = end.message or task_end_message(attempt, task, end.reason, end.details)
        if job.roles:
            message = f"{job.task_label(task.rank)}: {message}"
        if survives_without(attempt, job, tasks):
            record_lost_tasks(attempt, job, 1, surviving_tasks(tasks), end.reason, message)
        else:
            if end.exit_code is not None:
                attempt.exit_code = end.exit_code
                attempt.save(update_fields=["exit_code"])
            _request_stops_locked([(attempt, StopRequest(attempt.pk, end.reason, message))], "")
            _add_unsent_tasks(proofs, attempt, tasks)
    if not asked and not job.is_elastic and _stop_completed_gang(attempt, job, tasks):
        _add_unsent_tasks(proofs, attempt, tasks)
    if job.has_start_order:
        _notify_start(attempt, (row for row in tasks if row.state == AttemptState.CONFIGURING))
    return failed


def _release_and_finish(proofs: Mapping[Task, str], attempts: Mapping[Attempt, Sequence[Task]]) -> None:
    """Release the GPUs of tasks that are gone, and end those of the attempts that have no others."""
    release_gpus(proofs)
    done = [each for each, tasks in attempts.items() if all(task.container_removed for task in tasks)]
    finish_attempts({attempt: attempts[attempt] for attempt in done})


def _stop_completed_gang(attempt: Attempt, job: Job, tasks: Sequence[Task]) -> bool:
    """Stop the tasks that still run once those that decide about the job have succeeded; return True if so."""
    if all(task.container_removed for task in tasks) or gang_outcome(job, tasks) is not True:
        return False
    message = stored_text("Enough of its tasks have succeeded.")
    if job.completion_role:
        message = stored_text(f"The role {job.completion_role} has completed.")
    _request_stops_locked([(attempt, StopRequest(attempt.pk, EndReason.COMPLETED, message))], "")
    return True


# -- job level -------------------------------------------------------------------------------------


def cancel_job(job_id: int, reason: EndReason, *, actor: str, message: str = "") -> Job:
    """Cancel a job: at once if it holds no GPUs, else when its nodes have proved the end.

    Ended jobs are unchanged.
    """
    with transaction.atomic():
        job = lock_job(job_id)
        if job.state in TERMINAL_JOB_STATES or job.desired_state == DesiredState.CANCELLED:
            return job
        job.desired_state = DesiredState.CANCELLED.value
        job.version += 1
        job.save(update_fields=["desired_state", "version"])
        message = message or end_message(reason, actor=actor)
        attempt = lock_live_attempt(job)
        if attempt is None:
            JobVerdict.objects.filter(job=job).delete()
            transition_job(job, JobState.CANCELLED, reason=reason, message=message, actor=actor)
        else:
            request_stop(attempt.pk, reason, actor=actor, message=message)
            job.refresh_from_db()
        return job


def set_job_held(job_id: int, held: bool, *, actor: str) -> Job:
    """Hold a job, or release it; a running attempt continues."""
    with transaction.atomic():
        job = lock_job(job_id)
        if job.state in TERMINAL_JOB_STATES:
            raise Conflict(
                _("The job has already ended: {state}.").format(state=job.state.lower()), code="job_ended"
            )
        if job.held != held:
            message = stored_text(f"{'Held' if held else 'Released'} by {actor}.")
            _set_held([job], held, {job.pk: message}, actor)
        return job


def hold_jobs(messages: Mapping[int, str], *, actor: str) -> None:
    """Hold several jobs, each with the message of its event. Jobs already held are unchanged."""
    with transaction.atomic():
        rows = Job.objects.select_for_update(no_key=True).filter(pk__in=messages, held=False)
        jobs = rows.exclude(state__in=TERMINAL_JOB_STATES).order_by("pk")
        _set_held(list(jobs), True, messages, actor)


def _set_held(jobs: Sequence[Job], held: bool, messages: Mapping[int, str], actor: str) -> None:
    for job in jobs:
        job.held, job.version = held, job.version + 1
    Job.objects.bulk_update(jobs, ["held", "version"], batch_size=1000)
    kind = "held" if held else "released"
    JobEvent.objects.bulk_create(
        JobEvent(job=job, kind=kind, actor=actor, message=messages[job.pk][:1000]) for job in jobs
    )
    publish_all_on_commit([news for job in jobs for news in job_topic_events(job)])
    trigger_cycle("hold")


def record_submitted(jobs: Sequence[Job], *, actor: str) -> None:
    """Write the first events of jobs, in the transaction that inserts them."""
    after, message = JobState.PENDING.value, stored_text(f"Submitted by {actor}.")
    JobEvent.objects.bulk_create(
        JobEvent(job=job, kind="submitted", after=after, actor=actor, message=message) for job in jobs
    )
    trigger_cycle("submit")
    publish_all_on_commit([news for job in jobs for news in job_topic_events(job)])


def lock_live_attempt(job: Job) -> Attempt | None:
    """Return the live attempt of a locked job, locked."""
    rows = Attempt.objects.select_for_update(no_key=True)
    return rows.filter(job=job, state__in=LIVE_ATTEMPT_STATES).first()


def lock_attempts(ids: Iterable[int]) -> dict[Attempt, list[Task]]:
    """Return the live ones of these attempts (ids, or a query for them) with all their tasks.

    Their jobs, they and the tasks are locked in order.
    """
    wanted = Attempt.objects.filter(pk__in=ids)
    rows = Job.objects.select_for_update(of=("self",), no_key=True).filter(pk__in=wanted.values("job_id"))
    jobs = {job.pk: job for job in rows.select_related("owner", "project").order_by("pk")}
    live = wanted.select_for_update(no_key=True).filter(state__in=LIVE_ATTEMPT_STATES).order_by("job_id")
    attempts = {attempt.pk: attempt for attempt in live}
    found: dict[Attempt, list[Task]] = {attempt: [] for attempt in attempts.values()}
    for attempt in found:
        attempt.job = jobs[attempt.job_id]
    tasks = Task.objects.select_for_update(of=("self",), no_key=True).select_related("node")
    for task in tasks.filter(attempt__in=attempts).order_by("pk"):
        task.attempt = attempts[task.attempt_id]
        found[task.attempt].append(task)
    return found


def lock_attempt_of_task(task_id: int) -> tuple[Attempt, list[Task], Task]:
    """Return the task's attempt with its job, all its tasks with their nodes, and the task, all locked."""
    rows = Attempt.objects.select_for_update(of=("self",), no_key=True)
    attempt = rows.select_related("job").get(task_rows=task_id)
    locked = attempt.task_rows.select_for_update(of=("self",), no_key=True)
    tasks = list(locked.select_related("node").order_by("pk"))
    return attempt, tasks, next(task for task in tasks if task.pk == task_id)


def _add_unsent_tasks(proofs: dict[Task, str], attempt: Attempt, tasks: Iterable[Task]) -> None:
    """Add the tasks of an ending attempt for which no command was sent, with the proof for their GPUs."""
    for task in tasks:
        reported = task.start_sent_at if attempt.gang_start else attempt.start_sent_at
        if reported is None and not task.container_removed:
            proofs[task], task.container_removed = "never_started", True


def _request_stops_locked(requests: Sequence[tuple[Attempt, StopRequest]], actor: str) -> None:
    """Store the reasons of locked attempts that are not stopping yet, and notify their nodes."""
    asked, events, news = [], [], []
    for attempt, stop in requests:
        if attempt.stop_requested_at is not None:
            continue
        asked.append(attempt)
        attempt.stop_requested_at = timezone.now()
        attempt.stop_reason = stop.reason.value
        attempt.stop_requested_by = actor
        attempt.message = (stop.message or end_message(stop.reason, actor=actor))[:1000]
        attempt.preempted_for = stop.for_job
        attempt.preempted_for_attempt = stop.for_job.attempt_count if stop.for_job else None
        if attempt.start_sent_at is not None:
            old = set_attempt_state(attempt, AttemptState.COMPLETING)
            reason, states = attempt.stop_reason, {"before": old.value, "after": attempt.state}
            event = attempt_event(attempt, "attempt_state", reason, attempt.message, actor, **states)
            events.append(event)
            news.append(attempt_topic_event(attempt, "attempt_state", attempt.message))
    if asked:
        Attempt.objects.bulk_update(asked, _STOP_FIELDS)
        warn_of_reclaim((each, each.stop_reason, each.message) for each in asked if each.start_sent_at)
        JobEvent.objects.bulk_create(events)
        publish_all_on_commit(news)
    jobs = {attempt.pk: attempt.job.public_id for attempt, _ in requests}
    nodes = Task.objects.filter(attempt__in=jobs, container_removed=False).values_list(
        "node__public_id", "attempt_id"
    )
    notify_nodes({node: ("stop", jobs[attempt]) for node, attempt in nodes})
