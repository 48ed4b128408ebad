"""Connectivity check of a gang: before its ranks start, the other nodes connect to the node of rank 0.

When all tasks are prepared, rank 0's node listens and each other node tries once; when all have connected,
the ranks start. After a failure rank 0 is prepared again, because its listener may have been replaced; a
second failure ends the attempt.
"""

from __future__ import annotations

import datetime as dt

from django.db import transaction
from django.utils import timezone

from portal.domain.states import AttemptState
from portal.models import Attempt, Rendezvous, Task
from portal.outbox import notify_nodes
from portal.services.lifecycle.job_control import lock_attempt_of_task, release_gang_start


def should_check_rendezvous(task: Task, attempt: Attempt) -> bool:
    """Return True while the task's node has to try to connect to rank 0's node."""
    if not attempt.gang_start or attempt.all_prepared_at is not None or attempt.stop_requested_at is not None:
        return False
    row: Rendezvous | None = getattr(attempt, "rendezvous", None)
    return (
        row is not None
        and row.check_started_at is not None
        and row.node_id != task.node_id
        and task.state == AttemptState.CONFIGURING
        and task.rendezvous_reached_at is None
    )


def record_rendezvous_reached(task_id: int) -> None:
    """Record that the task's node connected, for all tasks on it; start the gang if it was the last one."""
    with transaction.atomic():
        attempt, tasks, reached = lock_attempt_of_task(task_id)
        for task in tasks:
            if task.node_id == reached.node_id and task.rendezvous_reached_at is None:
                task.rendezvous_reached_at = timezone.now()
                task.save(update_fields=["rendezvous_reached_at"])
        release_gang_start(attempt, tasks)


def record_rendezvous_failure(task_id: int, listening_since: dt.datetime) -> bool:
    """Record a failed connection to rank 0, which listened since ``listening_since``; return True if final.

    Otherwise rank 0's node listens again and all other nodes try again; earlier results are discarded.
    """
    with transaction.atomic():
        attempt, tasks, _ = lock_attempt_of_task(task_id)
        row = Rendezvous.objects.select_for_update(no_key=True).get(attempt=attempt)
        if (
            row.check_started_at != listening_since
            or attempt.all_prepared_at is not None
            or attempt.stop_requested_at is not None
        ):
            return False
        if row.recheck_requested:
            return True
        row.recheck_requested, row.check_started_at = True, None
        row.save(update_fields=["recheck_requested", "check_started_at"])
        for task in tasks:
            if task.rank == 0:
                task.prepared_at = None
                task.save(update_fields=["prepared_at"])
                notify_nodes({task.node.public_id: ("start", attempt.job.public_id)})
        return False
