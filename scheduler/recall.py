"""What a process that decides keeps from cycle to cycle: the rows of its last photograph and what followed from them.

A photograph is read anew each time. Rows that say the same as before are exchanged for the objects of
before, since a decision knows by the object what it need not work out again (``scheduler.core.memory``).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from scheduler.core.cluster import NodeRow, PendingRow, RunningRow, Snapshot
from scheduler.core.decide import decide
from scheduler.core.memory import Memory
from scheduler.core.plan import Plan
from scheduler.core.policy import Policy

Row = TypeVar("Row", NodeRow, PendingRow, RunningRow)

COLLECTED_EVERY = 50
"""Circles of objects that a decision left are freed after so many decisions, at a third of a second each time."""


class Recall:
    """One chain of decisions; one at a time may use it."""

    def __init__(self) -> None:
        self._decisions = 0
        self.forget()

    def forget(self) -> None:
        """The next decision knows nothing of those before."""
        self._memory = Memory()
        self._rows: dict[str, Any] = {}

    def decide(self, snapshot: Snapshot, policy: Policy) -> Plan:
        """The same plan as without; raises what ``decide`` raises, and has forgotten everything then."""
        rows: dict[str, Any] = {}
        known = replace(
            snapshot,
            nodes=tuple(self._same(row, f"n{row.id}", rows) for row in snapshot.nodes),
            running=tuple(self._same(row, f"r{row.job}", rows) for row in snapshot.running),
            pending=tuple(self._same(row, f"p{row.job}", rows) for row in snapshot.pending),
        )
        self._rows = rows
        self._decisions += 1
        try:
            with _no_collection(collects=self._decisions % COLLECTED_EVERY == 0):
                return decide(known, policy, self._memory)
        except Exception:
            self.forget()
            raise

    def _same(self, row: Row, key: str, rows: dict[str, Any]) -> Row:
        """The object of before where it says the same; noted in ``rows`` for the next time."""
        before: Row | None = self._rows.get(key)
        rows[key] = found = before if before is not None and (before is row or before == row) else row
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
