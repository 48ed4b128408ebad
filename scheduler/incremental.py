"""Incremental decisions: reuses what the last decision derived from rows that have not changed.

Every snapshot is read anew. Rows equal to those of the last snapshot are replaced by the earlier objects,
because the decision caches by object identity (``scheduler.core.session.cache``). With many pending jobs,
verdicts take as long as the decision; they are then built in batches after the commit
(docs/decisions/deferred-verdicts.md).
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
from scheduler.python_gc import gc_paused

Row = TypeVar("Row", NodeRow, PendingRow, RunningRow)

EXPLAIN_ALL_LIMIT = 500
"""With at most this many pending jobs, the plan contains all verdicts."""

EXPLAIN_BATCH_SIZE = 2_000
"""Pending jobs per batch of deferred verdicts; a batch takes some 10 ms."""

EXPLAIN_INTERVAL_S = 1.0
"""At least one batch of deferred verdicts is written in this interval, even if another cycle is requested."""


class IncrementalDecider:
    """One series of decisions; not thread-safe."""

    def __init__(self) -> None:
        self._decisions = 0
        self.reset()

    def reset(self) -> None:
        self._cache = DecisionCache()
        self._report: VerdictReport | None = None
        # of the last plan; None once ``_unexplained`` is ordered
        self._pending: Iterable[JobId] | None = None
        self._unexplained: list[JobId] = []  # in reverse order: the next to explain last
        self._explained: dict[JobId, None] = {}  # the longest ago first
        self._rows: dict[str, dict[str, Any]] = {}  # by kind of row, then by key

    def decide(self, snapshot: Snapshot, policy: Policy) -> Plan:
        """Return the plan of ``decide``, raising the same errors and forgetting everything when it does.

        With more than ``EXPLAIN_ALL_LIMIT`` pending jobs the plan has no verdicts; ``explain_next`` returns
        them.
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
        """Return the next batch of deferred verdicts: jobs never explained first, then the longest ago.

        Empty when none is left. Valid until the next decision.
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
        if self._pending is not None:  # ordered on first use: the next decision often comes earlier
            pending, self._pending = dict.fromkeys(self._pending), None
            self._explained = {job: None for job in self._explained if job in pending}
            self._unexplained = [
                *reversed(self._explained),
                *(job for job in pending if job not in self._explained),
            ]
        return bool(self._unexplained)

    def _reuse_equal_rows(self, kind: str, rows: Sequence[Row], key: Callable[[Row], str]) -> tuple[Row, ...]:
        """Return the rows, replaced by equal objects of the last decision; remember them."""
        before = self._rows.get(kind, {})
        names = [key(row) for row in rows]
        olds = [before.get(each) for each in names]
        found = tuple(
            row if old is row or old is None or old != row else old
            for row, old in zip(rows, olds, strict=True)
        )
        self._rows[kind] = dict(zip(names, found, strict=True))
        return found
