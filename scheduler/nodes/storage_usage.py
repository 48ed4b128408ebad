"""Asks a node for the usage of its homes and project folders when that is due, one node at a time."""

from __future__ import annotations

import threading

from agents import verbs
from agents.engines.replies import AgentError, InvalidReplyError, OutcomeUnknownError, StorageUsage
from portal.services.nodes.storage_usage import record_usage, start_measurement
from scheduler.nodes.node_connection import NodeConnection

POLL_S = 60.0
"""How often it is looked up whether a node is due."""
_one_at_a_time = threading.Lock()


def measure_storage(connection: NodeConnection) -> None:
    """Measure if it is due and no other node of this process measures. An error is stored with its reason."""
    if not connection.engine.supports(verbs.STORAGE_USAGE) or not _one_at_a_time.acquire(blocking=False):
        return
    try:
        roots = start_measurement(connection.node)
        if not roots:
            return
        try:
            usage = connection.engine.request(
                verbs.STORAGE_USAGE, StorageUsage.from_wire, roots=[root.path for root in roots]
            )
        except AgentError as refusal:
            record_usage(connection.node, roots, (), problem=refusal.message)
        except OutcomeUnknownError as error:
            record_usage(connection.node, roots, (), problem=f"{error}")
            if isinstance(error, InvalidReplyError) or not connection.engine.is_open:
                raise
        else:
            record_usage(connection.node, roots, usage.folders)
    finally:
        _one_at_a_time.release()
