"""What the rows of a photograph say is expected of jobs: how long they run, learned from those that ended.

The record is read once in full and then by difference. What is told follows from the latest jobs that ended and from
the row alone, in steps (``scheduler.core.predict.Steps``): every process tells the same, and a row rarely changes.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from django.db.models import F

from portal.models import Job
from portal.words.states import JOB_ENDS
from scheduler.core.cluster import JobId, PendingRow, RunningRow, Snapshot
from scheduler.core.policy import Policy
from scheduler.core.predict import Durations, Kind, Steps

LEARNED_FROM = 5_000
"""So many of the jobs that ended last tell how long jobs run."""
LATE = dt.timedelta(minutes=2)
"""A job that ended may come to be seen so much later than one that ended after it."""

Row = TypeVar("Row", PendingRow, RunningRow)


class _Known(NamedTuple):
    """A row as it was read and as it was told, and of which kind its job is."""

    read: Any
    told: Any
    kind: Kind


class Expectations:
    """What one process knows of durations; its threads take turns."""

    def __init__(self) -> None:
        self.durations = Durations(LEARNED_FROM)
        self.template_of: dict[JobId, str | None] = {}
        """From which templates the jobs of the last photograph were made."""
        self._steps = Steps(self.durations)
        self._newest: dt.datetime | None = None
        self._learned: set[int] = set()  # row numbers of the jobs that ended within LATE of the newest
        self._known: dict[str, dict[JobId, _Known]] = {}
        self._turn = threading.Lock()

    def fill(self, snapshot: Snapshot, policy: Policy) -> Snapshot:
        """The photograph with what is expected of its jobs; the same where the policy uses no predictions.

        One query, and a second when jobs came. A row of which the same is told as in the photograph before is the
        object of then.
        """
        with self._turn:
            self._learn()
            if not self.durations.learned:
                return snapshot
            self._ask_templates({row.job for rows in (snapshot.pending, snapshot.running) for row in rows})
            if policy.use_predictions == "no":
                return snapshot

            def ends_s(row: RunningRow, kind: Kind) -> float | None:
                in_all_s = self._in_all_s(kind, snapshot.now_s - row.started_s, row.time_limit_s)
                return None if in_all_s is None else row.started_s + in_all_s

            return replace(
                snapshot,
                pending=self._told(snapshot.pending, "predicted_s", _asked_milli, self._runs_s),
                running=self._told(snapshot.running, "predicted_end_s", _held_milli, ends_s),
            )

    def expect(self, row: PendingRow, template: str | None, policy: Policy) -> PendingRow:
        """The row of a job that nobody has submitted yet, as ``fill`` would tell it."""
        if policy.use_predictions == "no":
            return row
        with self._turn:
            kind = Kind(row.project, row.user, template, row.total_milli)
            return replace(row, predicted_s=self._runs_s(row, kind))

    def _learn(self) -> None:
        """Learns from the jobs that ended since the last time; from the latest of all at the first."""
        ended = Job.objects.filter(
            state__in=[state.value for state in JOB_ENDS], started_at__isnull=False, ended_at__isnull=False
        )
        if self._newest is not None:
            ended = ended.filter(ended_at__gte=self._newest - LATE)
        rows = list(
            ended.order_by("-ended_at", "-id").values_list(
                "id",
                "ended_at",
                "project__public_id",
                "owner__public_id",
                "template__public_id",
                F("tasks") * F("gpus_per_task") * F("milli_per_gpu"),
                F("ended_at") - F("started_at"),
            )[:LEARNED_FROM]
        )
        for id_, _, project, user, template, milli, ran in reversed(rows):
            if id_ not in self._learned:
                self.durations.learn(Kind(project, user, template, milli), ran.total_seconds())
        if rows:
            self._newest = rows[0][1]
            self._learned = {row[0] for row in rows if row[1] >= self._newest - LATE}

    def _ask_templates(self, jobs: set[JobId]) -> None:
        known = {job: template for job, template in self.template_of.items() if job in jobs}
        if came := jobs - known.keys():
            known |= dict.fromkeys(came)
            rows = Job.objects.filter(public_id__in=came, template__isnull=False)
            known |= {JobId(job): each for job, each in rows.values_list("public_id", "template__public_id")}
        self.template_of = known

    def _runs_s(self, row: PendingRow, kind: Kind) -> float | None:
        return self._in_all_s(kind, 0.0, row.time_limit_s)

    def _in_all_s(self, kind: Kind, ran_s: float, limit_s: float | None) -> float | None:
        """How long a job runs from its start; its limit caps that until it has passed."""
        in_all_s = self._steps.in_all_s(kind, ran_s)
        if in_all_s is None or limit_s is None or limit_s <= ran_s:
            return in_all_s
        return min(in_all_s, limit_s)

    def _told(
        self,
        rows: tuple[Row, ...],
        name: str,
        milli: Callable[[Row], int],
        expect: Callable[[Row, Kind], float | None],
    ) -> tuple[Row, ...]:
        """The rows with the field ``name`` as ``expect`` says."""
        before, now, told = self._known.get(name, {}), {}, []
        for row in rows:
            known = before.get(row.job)
            if known is None or (known.read is not row and known.read != row):
                kind = Kind(row.project, row.user, self.template_of.get(row.job), milli(row))
                known = _Known(row, row, kind)
            if (expected_s := expect(row, known.kind)) != getattr(known.told, name):
                known = known._replace(told=replace(known.read, **{name: expected_s}))
            now[row.job] = known
            told.append(known.told)
        self._known[name] = now
        return tuple(told)


def _asked_milli(row: PendingRow) -> int:
    return row.total_milli


def _held_milli(row: RunningRow) -> int:
    return sum(share.milli for task in row.tasks for share in task.gpus)
