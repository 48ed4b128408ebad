"""Operations on nodes (tests, upgrades, checks, garbage collection) and the order of an upgrade rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any


class OperationKind(StrEnum):
    TEST = "test"
    ENROL = "enrol"
    UPGRADE = "upgrade"
    PREFLIGHT = "preflight"
    GC = "gc"
    MOVE = "move"


CONTROL_CHANNEL_OPERATIONS = frozenset({OperationKind.UPGRADE, OperationKind.PREFLIGHT, OperationKind.GC})
"""Operations over the node's control channel; the others open their own connections."""

OPERATION_TITLES: dict[OperationKind, str] = {
    OperationKind.TEST: "Connection test",
    OperationKind.ENROL: "Enrolment",
    OperationKind.UPGRADE: "Agent upgrade",
    OperationKind.PREFLIGHT: "Node check",
    OperationKind.GC: "Clean-up",
    OperationKind.MOVE: "Change of address",
}

OPERATIONS = "orders"
"""The verb that notifies a node's actor of due operations."""

CONNECT = "connect"
"""The verb that has a node's actor connect at once, with the present name, address and host key of the node."""

WARNING_ONLY_CHECKS = frozenset({"version"})
"""Findings that are only warnings: vendors patch old versions without changing their number."""

UPGRADE_CONFIRM_TIMEOUT_S = 60.0
"""Time within which a new agent must answer hello and be confirmed; otherwise the node rolls back."""

OPERATION_TIMEOUT_S = 240.0
"""Unfinished operations fail after this time: two attempts, and a pause while the node does not respond."""

OWN_CONNECTION_TIMEOUT_S = 900.0
"""The same for operations that open their own connections. An enrolment takes at most ten minutes, its test one."""

MAX_PARALLEL_UPGRADES = 8
"""Nodes upgraded in parallel once the first has succeeded."""

PROGRAM_SENT_STEP = "Sent"
"""The step of an upgrade after which the new program is installed."""


GC_COUNTER_LABELS: dict[str, tuple[str, str]] = {
    "ended_tasks": ("Ended tasks", "removed with their logs, never released by the portal"),
    "orphan_dirs": ("Folders", "removed that belong to no task"),
    "uploads": ("Uploads", "abandoned and removed"),
    "scratch": ("Scratch folders", "of ended tasks removed"),
    "networks": ("Networks", "unused and removed"),
    "removed_jobs": ("Jobs", "not seen for thirty days, removed"),
    "freed_mib": ("Disk", "MiB freed"),
}
"""Counters of an agent's garbage collection: title, and the text after the number."""

IMAGES_STEP, IMAGE_STORE_STEP = "Images", "Image store"
"""Steps that report the removed images, and the usage of the file system that stores images."""


def images_removed_message(removed: Sequence[Mapping[str, Any]]) -> str:
    """Describe the removed images; each row of an agent's report has ``names`` and ``size_mib``."""
    if not removed:
        return "0 unused images removed."
    reported = [f"{', '.join(row['names'])} ({row['size_mib'] or 0} MiB)" for row in removed]
    return f"{len(reported)} unused images removed: {'; '.join(reported)}."


FULL_DISK_GC_INTERVAL_S = 900.0
"""Minimum time between garbage collections of a node whose disk stays full."""


class RolloutStatus(StrEnum):
    """Status of one node of a rollout."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


def startable_count(statuses: Sequence[RolloutStatus], max_parallel: int = MAX_PARALLEL_UPGRADES) -> int:
    """Return how many more nodes may start: one first, then up to ``max_parallel``, none after a failure."""
    if RolloutStatus.FAILED in statuses:
        return 0
    space = max_parallel if RolloutStatus.SUCCEEDED in statuses else 1
    return max(0, min(space - statuses.count(RolloutStatus.RUNNING), statuses.count(RolloutStatus.PENDING)))
