"""Preflight of a gang: before any rank starts, each node compares clocks with rank 0's node, connects to it and
measures the bandwidth to it."""

from __future__ import annotations

import logging

from agents import verbs
from agents.engines.replies import AgentError, RendezvousCheck, TaskKey
from portal.domain.jobs.reasons import EndReason, end_message
from portal.domain.nodes.gang_fabric import format_endpoint
from portal.domain.stored_texts import stored_text
from portal.failpoints import failpoint
from portal.models import Job, Node, Task
from portal.selectors.scheduling.settings import cluster_settings, pool_settings
from portal.services.jobs.retries import exclude_node
from portal.services.lifecycle import job_control, rendezvous_check
from portal.services.nodes import network_links, quarantine
from scheduler.nodes.node_connection import NodeConnection

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
"""Time limit of one connection; a nearby node takes a millisecond."""
MEASURE_S = 0.3
"""Time for which data is sent to measure the bandwidth."""


def check_connectivity(connection: NodeConnection, task: Task) -> None:
    """Check once for all tasks of the attempt on this node. Raise OutcomeUnknownError without an answer."""
    attempt, row = task.attempt, task.attempt.rendezvous
    key = TaskKey(attempt.job.public_id, attempt.number, task.rank)
    settings = pool_settings(attempt.pool, cluster_settings())
    if _stop_for_clock_skew(connection.node, row.node, task, float(settings["gang_max_clock_skew_s"])):
        return
    failpoint("connectivity.before_send")
    try:
        check = connection.engine.request(
            verbs.CHECK_RENDEZVOUS,
            RendezvousCheck.from_wire,
            job=key.job,
            attempt=key.attempt,
            address=row.address,
            port=row.port,
            within_s=CONNECT_TIMEOUT_S,
            measure_s=MEASURE_S,
        )
    except AgentError as error:  # the agent changed after placement and cannot check
        log.warning("%s could not check the connection to %s: %s", connection.node.name, row.node.name, error)
        check = RendezvousCheck()
    failpoint("connectivity.answered")
    if check.mib_per_s is not None:
        connect_ms = None if check.seconds is None else check.seconds * 1000.0
        network_links.record_link(connection.node, row.node, mib_per_s=check.mib_per_s, connect_ms=connect_ms)
    why = check.reason or _too_slow(check, float(settings["gang_min_bandwidth_mib_s"]))
    if why is None:
        rendezvous_check.record_rendezvous_reached(task.pk)
        failpoint("connectivity.recorded")
        return
    where = format_endpoint(row.address, row.port)
    verb = stored_text("cannot reach" if check.reason else "has a slow network to")
    message = stored_text(
        f"{connection.node.name} {'cannot reach' if check.reason else 'has a slow network to'} "
        f"{row.node.name} ({where}): {why}."
    )
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
    facts = {"node": connection.node.name, "verb": verb, "first": row.node.name, "place": where, "why": why}
    reason = EndReason.RENDEZVOUS_UNREACHABLE
    job_control.request_stop(attempt.pk, reason, message=end_message(reason, **facts))


def _too_slow(check: RendezvousCheck, minimum_mib_per_s: float) -> str | None:
    if check.mib_per_s is None or check.mib_per_s >= minimum_mib_per_s:
        return None
    return stored_text(
        f"one stream has {check.mib_per_s:.0f} MiB/s, and the pool requires {minimum_mib_per_s:.0f} MiB/s"
    )


def _stop_for_clock_skew(node: Node, rendezvous_node: Node, task: Task, limit_s: float) -> bool:
    """Stop the attempt if the clocks of two nodes differ too much; its job then avoids the worse one."""
    rows = Node.objects.filter(pk__in=[node.pk, rendezvous_node.pk]).values_list("pk", "clock_skew_s")
    skews = {pk: skew_s for pk, skew_s in rows if skew_s is not None}
    if not limit_s or len(skews) < 2:
        return False
    difference_s = abs(skews[node.pk] - skews[rendezvous_node.pk])
    if difference_s <= limit_s:
        return False
    exclude_node(task.attempt.job, max((node, rendezvous_node), key=lambda each: abs(skews[each.pk])))
    facts = {"node": node.name, "first": rendezvous_node.name, "skew": f"{difference_s:.1f}"}
    message = end_message(EndReason.CLOCK_SKEW, limit=f"{limit_s:g}", **facts)
    job_control.request_stop(task.attempt_id, EndReason.CLOCK_SKEW, message=message)
    return True


def exclude_faulty_node(job: Job, node: Node, rendezvous_node: Node, cause: int | None) -> None:
    """Keep the job's next attempt off the node that is the likely cause; when unknown, off ``node``.

    When the cause is ``rendezvous_node``, the nodes avoided because of it are allowed again.
    """
    if cause == rendezvous_node.pk:
        job.avoid_nodes.remove(*quarantine.unreachable_peers(rendezvous_node.pk))
        exclude_node(job, rendezvous_node)
    else:
        exclude_node(job, node)
