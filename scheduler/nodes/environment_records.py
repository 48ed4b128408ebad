"""Records the code and the packages of jobs on their nodes, one job at a time for each node."""

from __future__ import annotations

from agents.engines.replies import TaskKey, read_environment
from agents.verbs import ENVIRONMENT
from portal.models import Task
from portal.services.jobs import environment_records
from scheduler.nodes.checkpoints import is_lowest_rank
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.node_requests import UnknownOutcome, ask


def recording_wait_s(connection: NodeConnection, task: Task) -> float | None:
    """Return the seconds until the task is recorded; None if it is not."""
    can_record = connection.engine.supports(ENVIRONMENT)
    wait_s = environment_records.recording_wait_s(task) if can_record else None
    return wait_s if wait_s is not None and is_lowest_rank(task) else None


def record_environment(connection: NodeConnection, task: Task) -> None:
    """Ask the node once; a failure is stored, and never affects the job."""
    row = Task.objects.select_related("node", "attempt__job").get(pk=task.pk)
    job = row.attempt.job
    key = TaskKey(job.public_id, row.attempt.number, row.rank)
    interpreters = list(environment_records.interpreters(job.command))
    output = ask(
        connection,
        ENVIRONMENT,
        lambda: connection.engine.request(
            ENVIRONMENT, read_environment, **vars(key), interpreters=interpreters
        ),
        lambda problem: environment_records.save_record(row, b"", f"Its node recorded nothing: {problem}"),
        recorded=UnknownOutcome.INVALID | UnknownOutcome.LATE,
        raised=UnknownOutcome.CLOSED,  # recorded after the next connection
    )
    if output is not None:
        environment_records.save_record(row, output, "")
