"""What happens to the jobs of a node that is drained."""

from __future__ import annotations

from enum import StrEnum


class DrainChoice(StrEnum):
    """``WAIT``: run until they end. ``MOVE``: requeue after the next checkpoint. ``END``: requeue now."""

    WAIT = "wait"
    MOVE = "move"
    END = "end"


SAVE_WAIT_S = 600
"""Longest time for which a job that is to be moved may run on until its next checkpoint."""
MOVE_EVENT, MOVE_CANCELLED_EVENT = "drain_move", "drain_move_cancelled"
"""Kinds of events in the timeline of a job: it is to be moved; it stays. The later of both applies."""
