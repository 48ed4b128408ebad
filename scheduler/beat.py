"""Beat for a clock that may be set: Celery's own sends nothing until a clock that was set back is right again."""

from __future__ import annotations

import time
from typing import Any

from celery.beat import PersistentScheduler

STEP_S = 5.0


class ClockTolerantScheduler(PersistentScheduler):  # type: ignore[misc]
    """Sends every task at once after the clock was set, and begins its intervals anew."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._offset_s = _offset_s()
        super().__init__(*args, **options)

    def setup_schedule(self) -> None:
        super().setup_schedule()
        self._forget_future()  # a file that was written before the clock was set back

    def tick(self, *args: Any, **options: Any) -> float:
        change_s = _offset_s() - self._offset_s
        if abs(change_s) > STEP_S:  # since the last time it was set, also by several smaller steps
            self._offset_s += change_s
            self._forget_future()
            self._heap = None  # its times are those of the former clock
        delay_s: float = super().tick(*args, **options)
        return delay_s

    def _forget_future(self) -> None:
        for entry in self.schedule.values():
            if entry.last_run_at is not None and entry.last_run_at > entry.default_now():
                entry.last_run_at = entry.default_now()


def _offset_s() -> float:
    """Return the clock minus the time since the machine started."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
