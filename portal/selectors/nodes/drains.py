"""Reads which jobs a drain stops, what each would lose, and which of them are to be moved."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from django.db.models import QuerySet
from django.db.models.functions import Now

from portal.domain.jobs.checkpoints import Validity
from portal.domain.nodes.drains import MOVE_CANCELLED_EVENT, MOVE_EVENT
from portal.domain.states import LIVE_ATTEMPT_STATES, JobKind
from portal.models import Attempt, Checkpoint, Job, JobEvent, Node, Task
from portal.selectors.jobs.checkpoints import loss_now
from portal.selectors.jobs.time_limits import ends_at


@dataclass(frozen=True)
class DrainedJob:
    """A job with tasks on a node: GPU milli held there, and GPU-seconds that it loses if it is stopped now.

    ``lost_gpu_seconds`` is 0 for workspaces and services, whose files are kept. ``moves_until`` is set while it is
    to be moved after its next checkpoint.
    """

    job: Job
    attempt: Attempt
    milli: int
    lost_gpu_seconds: float
    saved_at: dt.datetime | None
    ends_at: dt.datetime | None
    is_stopping: bool
    moves_until: dt.datetime | None


def continuing_tasks(nodes: Collection[int]) -> QuerySet[Task]:
    """Return the tasks on nodes (ids) that run and were not asked to end."""
    return Task.objects.filter(
        node__in=nodes,
        container_removed=False,
        eviction_requested_at__isnull=True,
        attempt__stop_requested_at__isnull=True,
        state__in=[state.value for state in LIVE_ATTEMPT_STATES],
    )


def drained_jobs(node: Node) -> list[DrainedJob]:
    """Return the jobs with tasks on a node, in six queries."""
    held = Task.objects.filter(node=node, container_removed=False)
    attempts = list(
        Attempt.objects.filter(pk__in=held.values("attempt"))
        .select_related("job__owner", "job__project")
        .prefetch_related("task_rows__allocations")
        .order_by("pk")
    )
    saved, moves = last_saved(attempts), pending_moves(attempts)
    going = set(continuing_tasks([node.pk]).values_list("attempt_id", flat=True)) if attempts else set()
    found = []
    for attempt in attempts:
        own = [task for task in attempt.task_rows.all() if task.node_id == node.pk]
        milli = sum(each.milli for task in own for each in task.allocations.all() if each.ended_at is None)
        at, event = saved.get(attempt.pk), moves.get(attempt.pk)
        loses = attempt.job.kind == JobKind.TRAINING.value
        loss = loss_now(attempt.job, attempt, at) if loses else None
        found.append(
            DrainedJob(
                attempt.job,
                attempt,
                milli,
                loss.gpu_seconds if loss else 0.0,
                at,
                ends_at(attempt.job, attempt),
                attempt.pk not in going,
                move_deadline(event) if event else None,
            )
        )
    return found


def last_saved(attempts: Collection[Attempt]) -> dict[int, dt.datetime]:
    """Return when the newest valid checkpoint of each attempt's job was saved, or reported if none is listed."""
    by_job: dict[int, list[tuple[str, dt.datetime]]] = {}
    listed = Checkpoint.objects.filter(job__in=[attempt.job_id for attempt in attempts])
    for job, validity, saved_at in listed.values_list("job_id", "validity", "saved_at"):
        by_job.setdefault(job, []).append((validity, saved_at))
    found = {}
    for attempt in attempts:
        rows = by_job.get(attempt.job_id)
        valid = [saved_at for validity, saved_at in rows or () if validity == Validity.VALID]
        at = max(valid, default=None) if rows else attempt.checkpoint_at
        if at is not None:
            found[attempt.pk] = at
    return found


def pending_moves(attempts: Iterable[Attempt]) -> dict[int, JobEvent]:
    """Return by attempt (id) the event that asked for its move, unless it was cancelled since."""
    kinds = (MOVE_EVENT, MOVE_CANCELLED_EVENT)
    ids = [attempt.pk for attempt in attempts]
    rows = JobEvent.objects.filter(attempt__in=ids, kind__in=kinds).annotate(now=Now()).order_by("id")
    latest = {row.attempt_id: row for row in rows if row.attempt_id is not None}
    return {attempt: row for attempt, row in latest.items() if row.kind == MOVE_EVENT}


def move_deadline(event: JobEvent) -> dt.datetime:
    return event.at + dt.timedelta(seconds=float(event.details["wait_s"]))
