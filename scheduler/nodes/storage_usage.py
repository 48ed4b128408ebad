"""Asks a node for the usage of its homes and project folders when that is due, one node at a time."""

from __future__ import annotations

import threading

from agents.engines.replies import StorageUsage
from agents.verbs import STORAGE_USAGE
from portal.services.storage.storage_usage import record_usage, start_measurement
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.node_requests import UnknownOutcome, ask

POLL_S = 60.0
"""How often it is looked up whether a node is due."""
_one_at_a_time = threading.Lock()


def measure_storage(connection: NodeConnection) -> None:
    """Measure if it is due and no other node of this process measures. An error is stored with its reason."""
    if not connection.engine.supports(STORAGE_USAGE) or not _one_at_a_time.acquire(blocking=False):
        return
    try:
        roots = start_measurement(connection.node)
        if not roots:
            return
        paths = [root.path for root in roots]
        usage = ask(
            connection,
            STORAGE_USAGE,
            lambda: connection.engine.request(STORAGE_USAGE, StorageUsage.from_wire, roots=paths),
            lambda problem: record_usage(connection.node, roots, (), problem=problem.message),
            raised=UnknownOutcome.CLOSED | UnknownOutcome.INVALID,
        )
        if usage is not None:
            record_usage(connection.node, roots, usage.folders)
    finally:
        _one_at_a_time.release()
