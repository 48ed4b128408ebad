"""Before the ranks of a gang begin: the nodes of the others try to reach that of rank 0, where they will meet.

A chapter of ``lifecycle`` between its two steps. When all tasks are prepared, rank 0's node listens, and each other
node tries once; when all have reached it, all begin. A try that fails is not the end yet: whoever listened may have
been replaced since, so rank 0 is prepared anew, and only who does not reach it then ends the attempt.
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
    """True while the node of a task is to try whether it reaches that of rank 0."""
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
    """The node of a task reached that of rank 0, which counts for all tasks there. With the last all may begin."""
    with transaction.atomic():
        attempt, tasks = lock_attempt_of_task(task_id)
        node = next(task.node_id for task in tasks if task.pk == task_id)
        for task in tasks:
            if task.node_id == node and task.rendezvous_reached_at is None:
                task.rendezvous_reached_at = timezone.now()
                task.save(update_fields=["rendezvous_reached_at"])
        release_gang_start(attempt, tasks)


def record_rendezvous_failure(task_id: int, listening_since: dt.datetime) -> bool:
    """The node of a task did not reach that of rank 0, which had listened ``since`` then; True when that is certain.

    Else rank 0's node is asked to listen anew, and the others to try again. What was tried before that counts for
    nothing any more.
    """
    with transaction.atomic():
        attempt, tasks = lock_attempt_of_task(task_id)
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
