"""Steps of the database's clock: how much earlier than now the time limit of an attempt has to be judged.

A clock that is set forward must not end a job. The clock is compared with the time since the machine started, which
nobody can set; each step is kept with the newest attempt at that time. Valkey keeps them for the next process; when
they are lost there, this process writes them again.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from portal.domain.states import LIVE_ATTEMPT_STATES
from portal.models import Attempt
from portal.valkey.client import record_valkey_error, valkey_client
from scheduler.snapshot.cluster import read_now_s

log = logging.getLogger(__name__)

STEP_S = 30.0
"""A smaller difference between two passes is a clock that is being corrected slowly, or a slow pass."""
CAUTION_S = 3_600.0
"""For this long after a step forward nothing is evicted for a date, or deleted for its age."""
MAX_STEPS = 100
SAVE_EVERY_S = 60.0
KEY = "fairway:clock"
VALKEY_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class ClockStep:
    """The clock changed by ``change_s`` while ``last_attempt`` was the newest one, ``steady_s`` after boot."""

    last_attempt: int
    change_s: float
    steady_s: float


@dataclass(frozen=True)
class ClockRecord:
    """``offset_s``: the clock minus the time since the start of the machine that ``boot`` identifies."""

    boot: str
    offset_s: float
    steps: tuple[ClockStep, ...] = ()

    def after(self, boot: str, now_s: float, steady_s: float, last_attempt: int) -> ClockRecord:
        """Return the record of a later reading. Between two starts of the machine no step can be seen."""
        offset_s = now_s - steady_s
        change_s = offset_s - self.offset_s
        if (
            boot != self.boot
        ):  # times since the former start mean nothing now: recent steps may still be recent
            steps = tuple(replace(step, steady_s=0.0) for step in self.steps)
            return replace(self, boot=boot, offset_s=offset_s, steps=steps)
        if abs(change_s) <= STEP_S:
            return replace(self, offset_s=offset_s)
        step = ClockStep(last_attempt, change_s, steady_s)
        return replace(self, offset_s=offset_s, steps=_merged((*self.steps, step)))

    def without_ended(self, first_live: int) -> ClockRecord:
        """Return the record without steps that no live attempt has seen and that are not recent."""
        steady_s = _steady_s()
        kept = (s for s in self.steps if s.last_attempt >= first_live or steady_s - s.steady_s < CAUTION_S)
        return replace(self, steps=tuple(kept))

    def ahead_s(self, attempt: int) -> float:
        """Return how much of the time since the start of an attempt did not pass."""
        return max(0.0, sum(step.change_s for step in self.steps if step.last_attempt >= attempt))

    def was_set_forward(self, steady_s: float) -> bool:
        recent = (step.change_s for step in self.steps if 0 <= steady_s - step.steady_s < CAUTION_S)
        return sum(recent) > STEP_S


def _merged(steps: tuple[ClockStep, ...]) -> tuple[ClockStep, ...]:
    """Return at most ``MAX_STEPS`` steps with the same sums: a dropped step forward would end jobs early.

    Steps between which no attempt began are one step for every attempt. Of more, the two oldest become one: an
    attempt that began between them sees the greater of what either way would be forgiven.
    """
    merged: list[ClockStep] = []
    for step in steps:
        if len(steps) > MAX_STEPS and merged and merged[-1].last_attempt == step.last_attempt:
            merged[-1] = replace(step, change_s=merged[-1].change_s + step.change_s)
        else:
            merged.append(step)
    while len(merged) > MAX_STEPS:
        first, second = merged[:2]
        if first.change_s >= 0:
            merged[:2] = [replace(second, change_s=first.change_s + second.change_s)]
        else:  # the older attempts saw the clock set back; they lose no time by forgetting it
            merged[:2] = [second]
    return tuple(merged)


_lock = threading.Lock()
_record: ClockRecord | None = None
_saved_s = -SAVE_EVERY_S


def observe() -> ClockRecord:
    """Read the clock and return the steps so far. Call it before anything is ended for its age.

    Raise RedisError or OSError if this process does not know the earlier steps and Valkey does not answer: without
    them a job might end early, and a record without them must not replace the one that is stored.
    """
    global _record, _saved_s
    with _lock:
        known = _record or _load()
        now_s, steady_s, boot = read_now_s(), _steady_s(), _boot()
        if known is None:
            record = ClockRecord(boot, now_s - steady_s)
        else:
            record = known.after(boot, now_s, steady_s, _newest_attempt())
            if len(record.steps) > len(known.steps) or record.steps[-1:] != known.steps[-1:]:
                log.error(
                    "the clock of the database was set by %+.0f s: time limits of running jobs are not affected",
                    record.steps[-1].change_s,
                )
            if record.steps:
                record = record.without_ended(_oldest_live_attempt())
        if known is None or record.steps != known.steps or steady_s - _saved_s >= SAVE_EVERY_S:
            _save(record)
            _saved_s = steady_s
        _record = record
    return record


def was_set_forward() -> bool:
    """Return whether the clock was set forward within the last hour and not set back since."""
    return observe().was_set_forward(_steady_s())


def _steady_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _newest_attempt() -> int:
    return Attempt.objects.order_by("-pk").values_list("pk", flat=True).first() or 0


def _oldest_live_attempt() -> int:
    live = Attempt.objects.filter(state__in=LIVE_ATTEMPT_STATES)
    return live.order_by("pk").values_list("pk", flat=True).first() or _newest_attempt() + 1


def _load() -> ClockRecord | None:
    text: Any = valkey_client(VALKEY_TIMEOUT_S).get(KEY)
    try:
        found = json.loads(text) if text else None
        if found is None:
            return None
        steps = tuple(
            ClockStep(int(s["last_attempt"]), float(s["change_s"]), float(s["steady_s"]))
            for s in found["steps"]
        )
        return ClockRecord(str(found["boot"]), float(found["offset_s"]), steps)
    except (ValueError, KeyError, TypeError) as error:
        log.warning("earlier steps of the clock are unknown: %s", error)
        return None


def _save(record: ClockRecord) -> None:
    try:
        valkey_client(VALKEY_TIMEOUT_S).set(KEY, json.dumps(asdict(record)))
    except (RedisError, OSError) as error:
        record_valkey_error(error)
