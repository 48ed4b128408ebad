"""What a process that decides keeps from cycle to cycle: the rows of its last photograph and what followed from them.

A photograph is read anew each time. Rows that say the same as before are exchanged for the objects of
before, since a decision knows by the object what it need not work out again (``scheduler.core.memory``).

Where many wait, saying why takes as long as deciding. Reasons are then told piece by piece, once what was decided is
written down (docs/decisions/telling-pace.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

from scheduler.collection import no_collection
from scheduler.core.cluster import JobId, NodeRow, PendingRow, RunningRow, Snapshot
from scheduler.core.decide import decide, decide_then_tell
from scheduler.core.memory import Memory
from scheduler.core.plan import Plan, Verdict
from scheduler.core.policy import Policy
from scheduler.core.telling import Telling

Row = TypeVar("Row", NodeRow, PendingRow, RunningRow)

TOLD_ALWAYS = 500
"""With at most so many waiting jobs a plan says itself why they wait."""

TOLD_AT_ONCE = 2_000
"""Waiting jobs of a piece: some hundredths of a second."""

TELLS_EVERY_S = 1.0
"""So often at least some of many waiting jobs are told why, whatever is asked for meanwhile."""


class Recall:
    """One chain of decisions; one at a time may use it."""

    def __init__(self) -> None:
        self._decisions = 0
        self.forget()

    def forget(self) -> None:
        """The next decision knows nothing of those before."""
        self._memory = Memory()
        self._telling: Telling | None = None
        self._waiting: Iterable[JobId] | None = None  # of the last plan; None once they are in order
        self._untold: list[JobId] = []  # who was told longest ago last
        self._told: dict[JobId, None] = {}  # who was told longest ago first
        self._rows: dict[str, dict[str, Any]] = {}  # by kind of row, then by the name of each

    def decide(self, snapshot: Snapshot, policy: Policy) -> Plan:
        """The same plan as without, but where many wait without verdicts, which ``tell`` gives; raises as ``decide``.

        Whoever raised has forgotten everything.
        """
        self._telling, self._waiting, self._untold = None, None, []
        known = replace(
            snapshot,
            nodes=self._same("nodes", snapshot.nodes, attrgetter("id")),
            running=self._same("running", snapshot.running, attrgetter("job")),
            pending=self._same("pending", snapshot.pending, attrgetter("job")),
        )
        self._decisions += 1
        try:
            with no_collection(self._decisions):
                if len(snapshot.pending) <= TOLD_ALWAYS:
                    self._told.clear()
                    return decide(known, policy, self._memory)
                plan, self._telling = decide_then_tell(known, policy, self._memory)
        except Exception:
            self.forget()
            raise
        starts = {start.job for start in plan.starts}
        self._waiting = (row.job for row in known.pending if row.job not in starts)
        return plan

    def tell(self) -> tuple[Verdict, ...]:
        """Why the next of those wait whom the last plan left untold: never told first, then told longest ago.

        Nobody is left when there are none. Valid until the next decision.
        """
        if self._telling is None or not self.tells_on:
            return ()
        now, self._untold = self._untold[-TOLD_AT_ONCE:], self._untold[:-TOLD_AT_ONCE]
        with no_collection():
            verdicts = tuple(self._telling.some(now))
        for job in now:
            self._told.pop(job, None)
        self._told.update(dict.fromkeys(now))
        return verdicts

    @property
    def tells_on(self) -> bool:
        """True while the last plan has left somebody untold."""
        if self._waiting is not None:  # often the next decision comes before anybody is told
            waiting, self._waiting = dict.fromkeys(self._waiting), None
            self._told = {job: None for job in self._told if job in waiting}
            self._untold = [*reversed(self._told), *(job for job in waiting if job not in self._told)]
        return bool(self._untold)

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
