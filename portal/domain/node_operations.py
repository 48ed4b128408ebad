"""What the portal asks of nodes themselves: tests, upgrades, checks and tidying, and which node comes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any


class OperationKind(StrEnum):
    """One such act."""

    TEST = "test"
    ENROL = "enrol"
    UPGRADE = "upgrade"
    PREFLIGHT = "preflight"
    GC = "gc"


CONTROL_CHANNEL_OPERATIONS = frozenset({OperationKind.UPGRADE, OperationKind.PREFLIGHT, OperationKind.GC})
"""Acts that go over the node's control channel; the others open connections of their own."""

OPERATION_TITLES: dict[OperationKind, str] = {
    OperationKind.TEST: "Connection test",
    OperationKind.ENROL: "Enrolment",
    OperationKind.UPGRADE: "Upgrade of its agent",
    OperationKind.PREFLIGHT: "Check of the node",
    OperationKind.GC: "Tidying up",
}

WARNING_ONLY_CHECKS = frozenset({"version"})
"""What a check finds and yet keeps a node from nothing: vendors mend old versions without a new number."""

UPGRADE_CONFIRM_TIMEOUT_S = 60.0
"""So long a new agent may take until it answers hello and is confirmed; then the node goes back to the one before."""

OPERATION_TIMEOUT_S = 240.0
"""An act that is not over by then has failed: two trials, and a node that is silent for a while between them."""

MAX_PARALLEL_UPGRADES = 8
"""Nodes that are upgraded side by side, once the first has done well."""

PROGRAM_SENT_STEP = "Sent"
"""The step of an upgrade after which the new program is in place."""


GC_COUNTER_LABELS: dict[str, tuple[str, str]] = {
    "ended_tasks": ("Ended tasks", "removed with their logs, of which nobody took leave"),
    "orphan_dirs": ("Folders", "removed that belonged to no task"),
    "uploads": ("Uploads", "removed that nobody went on with"),
    "scratch": ("Scratch folders", "removed of tasks that have ended"),
    "networks": ("Networks", "removed that no task has"),
    "removed_jobs": ("Jobs", "forgotten that were not heard of for thirty days"),
    "freed_mib": ("Disk", "MiB freed"),
}
"""What an agent counts when it tidies up: a name, and the words after the number."""

IMAGES_STEP, IMAGE_STORE_STEP = "Images", "Image store"
"""The steps that tell which images were removed, and how full the file system is that holds them."""


def images_removed_message(removed: Sequence[Mapping[str, Any]]) -> str:
    """Which images were removed, with their sizes: rows as an agent tells them, ``names`` and ``size_mib``."""
    if not removed:
        return "0 removed that nobody needs."
    told = [f"{', '.join(row['names'])} ({row['size_mib'] or 0} MiB)" for row in removed]
    return f"{len(told)} removed that nobody needed: {'; '.join(told)}."


FULL_DISK_GC_INTERVAL_S = 900.0
"""A node whose disk stays full is tidied no more often than this."""


class RolloutStatus(StrEnum):
    """Where one node of an upgrade of many stands."""

    PENDING = "waits"
    RUNNING = "begun"
    SUCCEEDED = "worked"
    FAILED = "failed"


def startable_count(statuses: Sequence[RolloutStatus], max_parallel: int = MAX_PARALLEL_UPGRADES) -> int:
    """How many more nodes may begin: the first alone, then ``at_once`` side by side, none after a failure."""
    if RolloutStatus.FAILED in statuses:
        return 0
    room = max_parallel if RolloutStatus.SUCCEEDED in statuses else 1
    return max(0, min(room - statuses.count(RolloutStatus.RUNNING), statuses.count(RolloutStatus.PENDING)))
