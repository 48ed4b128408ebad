"""Records the code and the packages of jobs on their nodes, one job at a time for each node."""

from __future__ import annotations

import logging

from agents import verbs
from agents.engines.replies import AgentError, OutcomeUnknownError, TaskKey, read_environment
from portal.models import Task
from portal.services.jobs import environment_records
from scheduler.nodes.checkpoints import is_lowest_rank
from scheduler.nodes.node_connection import NodeConnection

log = logging.getLogger(__name__)


def recording_wait_s(connection: NodeConnection, task: Task) -> float | None:
    """Return the seconds until the task is recorded; None if it is not."""
    can_record = connection.engine.supports(verbs.ENVIRONMENT)
    wait_s = environment_records.recording_wait_s(task) if can_record else None
    return wait_s if wait_s is not None and is_lowest_rank(task) else None


def record_environment(connection: NodeConnection, task: Task) -> None:
    """Ask the node once; a failure is stored, and never affects the job."""
    row = Task.objects.select_related("node", "attempt__job").get(pk=task.pk)
    job = row.attempt.job
    key = TaskKey(job.public_id, row.attempt.number, row.rank)
    output, problem = b"", ""
    try:
        interpreters = list(environment_records.interpreters(job.command))
        output = connection.engine.request(
            verbs.ENVIRONMENT, read_environment, **vars(key), interpreters=interpreters
        )
    except (AgentError, OutcomeUnknownError) as error:
        if isinstance(error, OutcomeUnknownError) and not connection.engine.is_open:
            raise  # recorded after the next connection
        log.info("%s recorded nothing of %s: %s", connection.node.name, key, error)
        problem = f"Its node recorded nothing: {error}"
    environment_records.save_record(row, output, problem)
