"""State of a scheduler process between cycles: caches, learned durations, incremental decider."""

from __future__ import annotations

import math

from scheduler.commit.verdict_store import VerdictStore
from scheduler.core.model.validation import Fault
from scheduler.forecast.duration_estimates import DurationEstimator
from scheduler.incremental import IncrementalDecider
from scheduler.snapshot.decision_input import SnapshotCache
from scheduler.snapshot.row_cache import database_identity


class CycleState:
    """State of one series of cycles; not thread-safe. Losing it only makes the next cycle slow."""

    def __init__(self) -> None:
        self._database_identity: tuple[object, ...] = ()
        self.cycle_count = 0
        """Cycles of this process that used the state."""
        self.reset()

    def reset(self) -> None:
        """Make the next cycle read and decide everything again."""
        self.snapshot_cache = SnapshotCache()
        self.verdict_store = VerdictStore()
        self.duration_estimator = DurationEstimator()
        self.decider = IncrementalDecider()
        self.reported_faults: tuple[Fault, ...] | None = None
        """Faults of the last snapshot as reported; None when nothing has been reported yet."""
        self.verdicts_written_s = -math.inf
        """Monotonic time of the last batch of deferred verdicts."""

    def reset_if_database_changed(self) -> None:
        """Reset when the connection leads to another server or database than before."""
        identity = database_identity()
        if identity != self._database_identity:
            self.reset()
            self._database_identity = identity
