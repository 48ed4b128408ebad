"""What the process that runs cycles remembers from one to the next: what it read, wrote, learned and decided."""

from __future__ import annotations

import math

from scheduler.commit.verdict_store import VerdictStore
from scheduler.core.model.validation import Fault
from scheduler.forecast.duration_estimates import DurationEstimator
from scheduler.incremental import IncrementalDecider
from scheduler.snapshot.decision_input import SnapshotCache
from scheduler.snapshot.row_cache import database_identity


class CycleState:
    """One chain of cycles; one at a time may use it. Losing it costs a slow cycle and nothing else."""

    def __init__(self) -> None:
        self._database_identity: tuple[object, ...] = ()
        self.cycle_count = 0
        """How many of this process used it."""
        self.reset()

    def reset(self) -> None:
        """The next cycle reads and decides everything anew."""
        self.snapshot_cache = SnapshotCache()
        self.verdict_store = VerdictStore()
        self.duration_estimator = DurationEstimator()
        self.decider = IncrementalDecider()
        self.reported_faults: tuple[Fault, ...] | None = None
        """What was wrong with the last photograph, as it was reported; None: nothing was reported yet."""
        self.verdicts_written_s = -math.inf
        """When some of many waiting jobs were told last why they wait, by this process's clock."""

    def reset_if_database_changed(self) -> None:
        """Forgets everything when the record is another server's or another database than before."""
        identity = database_identity()
        if identity != self._database_identity:
            self.reset()
            self._database_identity = identity
