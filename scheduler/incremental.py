"""What a process that decides keeps from cycle to cycle: the rows of its last photograph and what followed from them.

A photograph is read anew each time. Rows that say the same as before are exchanged for the objects of
before, since a decision knows by the object what it need not work out again (``scheduler.core.session.cache``).

Where many wait, saying why takes as long as deciding. Reasons are then told piece by piece, once what was decided is
written down (docs/decisions/telling-pace.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

from scheduler.core.decide import decide, decide_deferring_verdicts
from scheduler.core.model.plan import Plan, Verdict
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import JobId, NodeRow, PendingRow, RunningRow, Snapshot
from scheduler.core.session.cache import DecisionCache
from scheduler.core.verdicts.report import VerdictReport
from scheduler.gc_pause import gc_paused

Row = TypeVar("Row", NodeRow, PendingRow, RunningRow)

EXPLAIN_ALL_LIMIT = 500
"""With at most so many pending jobs a plan says itself why they wait."""

EXPLAIN_BATCH_SIZE = 2_000
"""Waiting jobs of a piece: some hundredths of a second."""

EXPLAIN_INTERVAL_S = 1.0
"""So often at least some of many pending jobs are told why, whatever is asked for meanwhile."""


class IncrementalDecider:
    """One chain of decisions; one at a time may use it."""

    def __init__(self) -> None:
        self._decisions = 0
        self.reset()

    def reset(self) -> None:
        """The next decision knows nothing of those before."""
        self._cache = DecisionCache()
        self._report: VerdictReport | None = None
        self._pending: Iterable[JobId] | None = None  # of the last plan; None once they are in order
        self._unexplained: list[JobId] = []  # who was told longest ago last
        self._explained: dict[JobId, None] = {}  # who was told longest ago first
        self._rows: dict[str, dict[str, Any]] = {}  # by kind of row, then by the name of each

    def decide(self, snapshot: Snapshot, policy: Policy) -> Plan:
        """The same plan as without, but where many wait without verdicts, which ``explain_next`` gives; raises as ``decide``.

        Whoever raised has forgotten everything.
        """
        self._report, self._pending, self._unexplained = None, None, []
        known = replace(
            snapshot,
            nodes=self._reuse_equal_rows("nodes", snapshot.nodes, attrgetter("id")),
            running=self._reuse_equal_rows("running", snapshot.running, attrgetter("job")),
            pending=self._reuse_equal_rows("pending", snapshot.pending, attrgetter("job")),
        )
        self._decisions += 1
        try:
            with gc_paused(self._decisions):
                if len(snapshot.pending) <= EXPLAIN_ALL_LIMIT:
                    self._explained.clear()
                    return decide(known, policy, self._cache)
                plan, self._report = decide_deferring_verdicts(known, policy, self._cache)
        except Exception:
            self.reset()
            raise
        starts = {start.job for start in plan.starts}
        self._pending = (row.job for row in known.pending if row.job not in starts)
        return plan

    def explain_next(self) -> tuple[Verdict, ...]:
        """Why the next of those wait whom the last plan left untold: never told first, then told longest ago.

        Nobody is left when there are none. Valid until the next decision.
        """
        if self._report is None or not self.has_unexplained:
            return ()
        now, self._unexplained = (
            self._unexplained[-EXPLAIN_BATCH_SIZE:],
            self._unexplained[:-EXPLAIN_BATCH_SIZE],
        )
        with gc_paused():
            verdicts = tuple(self._report.for_jobs(now))
        for job in now:
            self._explained.pop(job, None)
        self._explained.update(dict.fromkeys(now))
        return verdicts

    @property
    def has_unexplained(self) -> bool:
        """True while the last plan has left somebody untold."""
        if self._pending is not None:  # often the next decision comes before anybody is told
            pending, self._pending = dict.fromkeys(self._pending), None
            self._explained = {job: None for job in self._explained if job in pending}
            self._unexplained = [
                *reversed(self._explained),
                *(job for job in pending if job not in self._explained),
            ]
        return bool(self._unexplained)

    def _reuse_equal_rows(self, kind: str, rows: Sequence[Row], key: Callable[[Row], str]) -> tuple[Row, ...]:
        """The rows of a kind, as the objects of before where they say the same; noted for the next time."""
        before = self._rows.get(kind, {})
        names = [key(row) for row in rows]
        olds = [before.get(each) for each in names]
        found = tuple(
            row if old is row or old is None or old != row else old
            for row, old in zip(rows, olds, strict=True)
        )
        self._rows[kind] = dict(zip(names, found, strict=True))
        return found
