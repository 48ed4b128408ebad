"""What a process that decides keeps from cycle to cycle: the rows of its last photograph and what followed from them.

A photograph is read anew each time. Rows that say the same as before are exchanged for the objects of
before, since a decision knows by the object what it need not work out again (``scheduler.core.memory``).

Where many wait, saying why takes as long as deciding. Cycles that follow each other closely therefore start jobs each
time and tell the reasons once a second (docs/decisions/telling-pace.md).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

from scheduler.core.cluster import NodeRow, PendingRow, RunningRow, Snapshot
from scheduler.core.decide import decide
from scheduler.core.memory import Memory
from scheduler.core.plan import Plan
from scheduler.core.policy import Policy

Row = TypeVar("Row", NodeRow, PendingRow, RunningRow)

COLLECTED_EVERY = 100
"""Circles of objects that a decision left are freed after so many decisions: they leave about a megabyte each."""

TELLS_EVERY_S = 1.0
"""How old what people are told of a waiting job may be, where many wait."""

TOLD_ALWAYS = 500
"""With at most so many waiting jobs every decision tells why they wait."""


class Recall:
    """One chain of decisions; one at a time may use it."""

    def __init__(self) -> None:
        self._decisions = 0
        self.forget()

    def forget(self) -> None:
        """The next decision knows nothing of those before."""
        self._memory = Memory()
        self._told_s = -math.inf  # when reasons were told last, by the photograph's clock
        self._rows: dict[str, dict[str, Any]] = {}  # by kind of row, then by the name of each

    def decide(self, snapshot: Snapshot, policy: Policy) -> Plan:
        """The same plan as without, but told only now and then; raises what ``decide`` raises.

        Whoever raised has forgotten everything.
        """
        known = replace(
            snapshot,
            nodes=self._same("nodes", snapshot.nodes, attrgetter("id")),
            running=self._same("running", snapshot.running, attrgetter("job")),
            pending=self._same("pending", snapshot.pending, attrgetter("job")),
        )
        self._decisions += 1
        tells = self._tells(snapshot)
        try:
            with _no_collection(collects=self._decisions % COLLECTED_EVERY == 0):
                plan = decide(known, policy, self._memory, tells=tells)
        except Exception:
            self.forget()
            raise
        if tells:
            self._told_s = snapshot.now_s
        return plan

    def _tells(self, snapshot: Snapshot) -> bool:
        """Whether it is time to say why jobs wait; a clock that went back says so too."""
        if len(snapshot.pending) <= TOLD_ALWAYS:
            return True
        return not 0.0 <= snapshot.now_s - self._told_s < TELLS_EVERY_S

    def _same(self, kind: str, rows: Sequence[Row], name: Callable[[Row], str]) -> tuple[Row, ...]:
        """The rows of a kind, as the objects of before where they say the same; noted for the next time."""
        before = self._rows.get(kind, {})
        names = [name(row) for row in rows]
        olds = [before.get(each) for each in names]
        found = tuple(
            row if old is row or old is None or old != row else old
            for row, old in zip(rows, olds, strict=True)
        )
        self._rows[kind] = dict(zip(names, found, strict=True))
        return found


@contextmanager
def _no_collection(*, collects: bool) -> Iterator[None]:
    """A decision makes much and leaves little: looking for what to collect took a quarter of its time.

    What it made is put where the collector does not look, once in a while to be looked through all the same.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if collects:
                gc.unfreeze()
                gc.collect()
            gc.freeze()
            gc.enable()
