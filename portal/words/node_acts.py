"""What the portal asks of nodes themselves: tests, upgrades, checks and tidying, and which node comes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any


class NodeAct(StrEnum):
    """One such act."""

    TEST = "test"
    ENROL = "enrol"
    UPGRADE = "upgrade"
    PREFLIGHT = "preflight"
    GC = "gc"


BY_ACTOR = frozenset({NodeAct.UPGRADE, NodeAct.PREFLIGHT, NodeAct.GC})
"""Acts that go over the node's control channel; the others open connections of their own."""

ACT_TITLES: dict[NodeAct, str] = {
    NodeAct.TEST: "Connection test",
    NodeAct.ENROL: "Enrolment",
    NodeAct.UPGRADE: "Upgrade of its agent",
    NodeAct.PREFLIGHT: "Check of the node",
    NodeAct.GC: "Tidying up",
}

WARNS = frozenset({"version"})
"""What a check finds and yet keeps a node from nothing: vendors mend old versions without a new number."""

TRIAL_S = 60.0
"""So long a new agent may take until it answers hello and is confirmed; then the node goes back to the one before."""

WITHIN_S = 240.0
"""An act that is not over by then has failed: two trials, and a node that is silent for a while between them."""

UPGRADES_AT_ONCE = 8
"""Nodes that are upgraded side by side, once the first has done well."""

SENT = "Sent"
"""The step of an upgrade after which the new program is in place."""


FREED: dict[str, tuple[str, str]] = {
    "ended_tasks": ("Ended tasks", "removed with their logs, of which nobody took leave"),
    "folders": ("Folders", "removed that belonged to no task"),
    "uploads": ("Uploads", "removed that nobody went on with"),
    "scratch": ("Scratch folders", "removed of tasks that have ended"),
    "networks": ("Networks", "removed that no task has"),
    "forgotten_jobs": ("Jobs", "forgotten that were not heard of for thirty days"),
    "freed_mib": ("Disk", "MiB freed"),
}
"""What an agent counts when it tidies up: a name, and the words after the number."""

IMAGES, STORE = "Images", "Image store"
"""The steps that tell which images were removed, and how full the file system is that holds them."""


def images_sentence(removed: Sequence[Mapping[str, Any]]) -> str:
    """Which images were removed, with their sizes: rows as an agent tells them, ``names`` and ``size_mib``."""
    if not removed:
        return "0 removed that nobody needs."
    told = [f"{', '.join(row['names'])} ({row['size_mib'] or 0} MiB)" for row in removed]
    return f"{len(told)} removed that nobody needed: {'; '.join(told)}."


FULL_AGAIN_S = 900.0
"""A node whose disk stays full is tidied no more often than this."""


class Turn(StrEnum):
    """Where one node of an upgrade of many stands."""

    WAITS = "waits"
    BEGUN = "begun"
    WORKED = "worked"
    FAILED = "failed"


def may_begin(turns: Sequence[Turn], at_once: int = UPGRADES_AT_ONCE) -> int:
    """How many more nodes may begin: the first alone, then ``at_once`` side by side, none after a failure."""
    if Turn.FAILED in turns:
        return 0
    room = at_once if Turn.WORKED in turns else 1
    return max(0, min(room - turns.count(Turn.BEGUN), turns.count(Turn.WAITS)))
