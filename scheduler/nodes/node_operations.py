"""Executes operations on a node: signals, upgrades, preflight checks, garbage collection.

An operation is a row that stays until it is finished, so it is repeated after a crash. An upgrade takes two
runs: the first sends the program and reconnects, the second confirms the new agent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from agents import verbs
from agents.engines.replies import AgentError, read_removals, read_reported_networks
from portal.domain.nodes.gang_fabric import GangFabric
from portal.domain.nodes.node_operations import (
    GC_COUNTER_LABELS,
    IMAGE_STORE_STEP,
    IMAGES_STEP,
    PROGRAM_SENT_STEP,
    UPGRADE_CONFIRM_TIMEOUT_S,
    WARNING_ONLY_CHECKS,
    OperationKind,
    images_removed_message,
)
from portal.domain.scheduling.policy_settings import SettingValue
from portal.domain.states import NodeTransport
from portal.errors import FairwayError
from portal.failpoints import failpoint
from portal.models import NodeOperation, NodePool
from portal.selectors.nodes.agent_version import bundled_agent
from portal.selectors.scheduling.settings import effective_pool_settings
from portal.services.environments.prefetch import protected_images
from portal.services.jobs.signals import claim_signals, record_signal_delivery
from portal.services.nodes import nodes
from portal.services.nodes.nodes import record_preflight_finished
from portal.services.nodes.operations import (
    due_operations,
    record_images_removed,
    record_operation_finished,
    record_operation_step,
    record_program_sent,
)
from scheduler.nodes.node_connection import NodeConnection


def run_due_operations(connection: NodeConnection, reconnect: Callable[[], None]) -> None:
    """Run all due operations of a node: signals first, then one operation after the other.

    ``reconnect`` closes the connection, so that the next one reaches the new agent. Raise OutcomeUnknownError
    when the node does not answer; unfinished operations stay due.
    """
    _send_signals(connection)
    for check in due_operations(connection.node.pk):
        if not connection.engine.is_open:
            return  # capabilities learned from this connection may be outdated
        operation = _Operation(connection, check)
        try:
            match OperationKind(check.kind):
                case OperationKind.UPGRADE:
                    if not _upgrade(operation):
                        reconnect()
                        return
                case OperationKind.PREFLIGHT:
                    _preflight(operation)
                case OperationKind.GC:
                    _collect_garbage(operation)
        except (AgentError, FairwayError) as error:
            operation.step(check.title, False, error.message)
            operation.finish(False)


def _send_signals(connection: NodeConnection) -> None:
    for row in claim_signals(connection.node.pk):
        attempt = row.attempt
        failpoint("signal.taken")
        try:
            signal = row.signal.removeprefix("SIG")
            place = {"epoch": connection.epoch(), "job": attempt.job.public_id, "attempt": attempt.number}
            connection.engine.command(verbs.SIGNAL, **place, signal=signal)
        except AgentError as error:
            record_signal_delivery(row, error.message)
        else:
            record_signal_delivery(row)


class _Operation:
    """An operation in progress; records its steps with the time each took."""

    def __init__(self, connection: NodeConnection, operation: NodeOperation) -> None:
        self.connection = connection
        self.operation = operation
        self._since_s = time.monotonic()

    def step(self, name: str, ok: bool, message: str) -> None:
        """Record a step with the time since the previous one."""
        now_s = time.monotonic()
        seconds, self._since_s = now_s - self._since_s, now_s
        record_operation_step(self.operation.public_id, name=name, ok=ok, message=message, seconds=seconds)

    def finish(self, ok: bool) -> None:
        record_operation_finished(self.operation.pk, ok)


# -- upgrade ---------------------------------------------------------------------------------------


def _upgrade(operation: _Operation) -> bool:
    """Run one part of an upgrade; return False when a new connection is needed to reach the new agent."""
    connection, check, ours = operation.connection, operation.operation, bundled_agent()
    running = connection.engine.hello.get("agent_digest")
    if running == ours.digest:
        if connection.node.transport == NodeTransport.SSH.value:
            connection.engine.confirm_upgrade(ours.digest)
        operation.step(
            "New agent",
            True,
            f"It responds: version {connection.engine.hello['agent_version']}, {ours.digest[:12]}.",
        )
        operation.finish(True)
        return True
    if check.program_sha256 == ours.digest:
        operation.step(
            "New agent",
            False,
            f"It did not respond within {UPGRADE_CONFIRM_TIMEOUT_S:.0f} s; the node runs the previous version.",
        )
        operation.finish(False)
        return True
    if connection.node.transport == NodeTransport.SSH.value:
        connection.engine.upgrade(
            ours.signed.program, ours.signed.signature, confirm_within_s=UPGRADE_CONFIRM_TIMEOUT_S
        )
        message = f"{len(ours.signed.program) // 1024} KiB are installed and their signature is valid."
    else:
        message = "This machine reads it from the portal's folder."
    record_program_sent(check.pk, ours.digest)
    operation.step(PROGRAM_SENT_STEP, True, message)
    return False


# -- checks and garbage collection -----------------------------------------------------------------


def _preflight(operation: _Operation) -> None:
    pool = NodePool.objects.get(pk=operation.connection.node.pool_id)
    checks = operation.connection.engine.preflight(
        _fabric_request(pool.fabric, operation.connection.node.runtime)
    )
    networks = operation.connection.engine.request(verbs.HELLO, read_reported_networks)
    nodes.record_network_info(operation.connection.node.pk, networks)
    for check in checks:
        operation.step(check.name.capitalize(), check.ok, check.message)
    record_preflight_finished(
        operation.operation.pk, all(check.ok or check.name in WARNING_ONLY_CHECKS for check in checks)
    )


def _fabric_request(fabric: GangFabric, runtime: str) -> dict[str, Any] | None:
    """Return the fabric that a pool names, for the node's preflight; None when it names none."""
    if fabric in (GangFabric(), GangFabric(adapters=fabric.adapters)):
        return None
    devices = list(fabric.devices)
    return {
        "runtime": runtime,
        "interface": fabric.interface,
        "network": fabric.network,
        "devices": devices,
    }


def _collect_garbage(operation: _Operation) -> None:
    node = operation.connection.node
    settings = effective_pool_settings([node.pool])[node.pool_id]
    freed = operation.connection.engine.request(
        verbs.GC,
        read_removals,
        min_age_s=int(settings["gc_keep_s"]),
        images=_image_gc_options(settings, node.pk),
    )
    for key, (name, words) in GC_COUNTER_LABELS.items():
        if freed.get(key) is not None:  # earlier agents do not report all counters
            operation.step(name, True, f"{freed[key]} {words}.")
    if freed.get("images") is not None:
        operation.step(IMAGES_STEP, True, images_removed_message(freed["images"]))
        record_images_removed(operation.operation, freed["images"])
    if freed.get("store_used_percent") is not None:
        operation.step(
            IMAGE_STORE_STEP, True, f"{freed['store_used_percent']:.0f} % of its file system is used."
        )
    operation.finish(True)


def _image_gc_options(settings: Mapping[str, SettingValue], node_id: int) -> dict[str, Any] | None:
    """Return the options of image removal for the verb ``gc``; None when it is off."""
    if settings["image_gc_scope"] == "none":
        return None
    return {
        "high_threshold_percent": settings["image_gc_high_threshold_percent"],
        "low_threshold_percent": settings["image_gc_low_threshold_percent"],
        "min_age_s": settings["image_min_age_s"],
        "include_unmanaged": settings["image_gc_scope"] == "all",
        "protected": protected_images(node_id),
    }
