"""Connectivity check of a gang: each node connects to the rendezvous before any rank starts."""

from __future__ import annotations

import logging

from agents.engines.interface import AgentError, TaskKey
from portal.domain.gang_fabric import format_endpoint
from portal.domain.reasons import EndReason, end_message
from portal.failpoints import failpoint
from portal.models import Job, Node, Task
from portal.services.lifecycle import job_control, rendezvous_check
from portal.services.nodes import quarantine
from scheduler.nodes.dispatch import NodeConnection, exclude_node

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
"""Time limit of one connection; a nearby node takes a millisecond."""


def check_connectivity(connection: NodeConnection, task: Task) -> None:
    """Check once for all tasks of the attempt on this node. Raise OutcomeUnknownError without an answer."""
    attempt, row = task.attempt, task.attempt.rendezvous
    key = TaskKey(attempt.job.public_id, attempt.number, task.rank)
    failpoint("connectivity.before_send")
    try:
        why = connection.engine.check_rendezvous(key, row.address, row.port, timeout_s=CONNECT_TIMEOUT_S)
    except AgentError as refusal:  # the agent changed after placement and cannot check
        log.warning(
            "%s could not check the connection to %s: %s", connection.node.name, row.node.name, refusal
        )
        why = None
    failpoint("connectivity.answered")
    if why is None:
        rendezvous_check.record_rendezvous_reached(task.pk)
        failpoint("connectivity.recorded")
        return
    where = format_endpoint(row.address, row.port)
    message = f"{connection.node.name} cannot reach {row.node.name} ({where}): {why}."
    log.warning("%s (%s)", message, key)
    job_control.record_task_problem(task.pk, message)
    if row.check_started_at is None or not rendezvous_check.record_rendezvous_failure(
        task.pk, row.check_started_at
    ):
        return
    cause = quarantine.record_peer_unreachable(
        connection.node.pk, row.node_id, job=attempt.job, message=message
    )
    failpoint("connectivity.blamed")
    exclude_faulty_node(attempt.job, connection.node, row.node, cause)
    facts = {"node": connection.node.name, "first": row.node.name, "place": where, "why": why}
    reason = EndReason.RENDEZVOUS_UNREACHABLE
    job_control.request_stop(attempt.pk, reason, message=end_message(reason, **facts))


def exclude_faulty_node(job: Job, node: Node, rendezvous_node: Node, cause: int | None) -> None:
    """Keep the job's next attempt off the node that is the likely cause; when unknown, off ``node``.

    When the cause is ``rendezvous_node``, the nodes avoided because of it are allowed again.
    """
    if cause == rendezvous_node.pk:
        job.avoid_nodes.remove(*quarantine.unreachable_peers(rendezvous_node.pk))
        exclude_node(job, rendezvous_node)
    else:
        exclude_node(job, node)
