"""What the process that runs cycles remembers from one to the next: what it read, wrote, learned and decided."""

from __future__ import annotations

import math

from scheduler.album import name_of_record
from scheduler.core.check import Fault
from scheduler.expectations import Expectations
from scheduler.recall import Recall
from scheduler.snapshot import Album
from scheduler.standings import Standings


class Remembered:
    """One chain of cycles; one at a time may use it. Losing it costs a slow cycle and nothing else."""

    def __init__(self) -> None:
        self._record: tuple[object, ...] = ()
        self.cycles = 0
        """How many of this process used it."""
        self.forget()

    def forget(self) -> None:
        """The next cycle reads and decides everything anew."""
        self.album = Album()
        self.standings = Standings()
        self.expectations = Expectations()
        self.recall = Recall()
        self.faults: tuple[Fault, ...] | None = None
        """What was wrong with the last photograph, as it was reported; None: nothing was reported yet."""
        self.told_s = -math.inf
        """When some of many waiting jobs were told last why they wait, by this process's clock."""

    def open(self) -> None:
        """Forgets everything when the record is another server's or another database than before."""
        record = name_of_record()
        if record != self._record:
            self.forget()
            self._record = record
