"""What the rows of a photograph say is expected of jobs: how long they run, and where faster, by those that ended.

The record is read once in full and then by difference. What is told follows from the latest jobs that ended and from
the row alone, in steps (``scheduler.core.forecast.durations.Steps``): every process tells the same, and a row rarely changes.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from django.db.models import F

from portal.domain.states import TERMINAL_JOB_STATES
from portal.domain.throughput import workload_fingerprint
from portal.models import AttemptProgress, Job
from scheduler.core.capacity.throughput import ThroughputHistory
from scheduler.core.forecast.durations import DurationHistory, DurationKey, QuantizedDurations
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import JobId, PendingRow, RunningRow, Snapshot

SAMPLE_SIZE = 5_000
"""So many of the jobs that ended last tell how long jobs run, and where faster."""
LATE_COMMIT_WINDOW = dt.timedelta(minutes=2)
"""A job that ended may come to be seen so much later than one that ended after it."""

Row = TypeVar("Row", PendingRow, RunningRow)
K = TypeVar("K")


class _EstimatedRow(NamedTuple):
    """A row as it was read and as it was told, and by what of its job that was: its kind, or its work."""

    source: Any
    estimated: Any
    group: Any


class DurationEstimator:
    """What one process knows of durations; its threads take turns."""

    def __init__(self) -> None:
        self.durations = DurationHistory(SAMPLE_SIZE)
        self.throughputs = ThroughputHistory()
        self.template_of: dict[JobId, str | None] = {}
        """From which templates the jobs of the last photograph were made."""
        self._work_of: dict[JobId, str] = {}
        self._steps = QuantizedDurations(self.durations)
        self._newest_end: dt.datetime | None = None
        self._learned: set[int] = (
            set()
        )  # row numbers of the jobs that ended within LATE_COMMIT_WINDOW of the newest
        self._rows: dict[str, dict[JobId, _EstimatedRow]] = {}
        self._lock = threading.Lock()

    def fill(self, snapshot: Snapshot, policy: Policy) -> Snapshot:
        """The photograph with what is expected of its jobs; the same where the policy uses no predictions.

        One query, and a second when jobs came; one more when jobs ended, and when jobs came while layouts are known
        to differ. A row of which the same is told as in the photograph before is the object of then.
        """
        with self._lock:
            self._learn()
            if not self.durations.learned_count:
                return snapshot
            self._load_templates({row.job for rows in (snapshot.pending, snapshot.running) for row in rows})
            if policy.use_predictions == "no":
                return snapshot

            def ends_s(row: RunningRow, kind: DurationKey) -> float | None:
                in_all_s = self._total_duration_s(kind, snapshot.now_s - row.started_s, row.time_limit_s)
                return None if in_all_s is None else row.started_s + in_all_s

            pending = self._with_estimates(
                snapshot.pending, "predicted_s", self._group_by(_requested_milli), self._expected_duration_s
            )
            return replace(
                snapshot,
                pending=self._with_speeds(pending),
                running=self._with_estimates(
                    snapshot.running, "predicted_end_s", self._group_by(_held_milli), ends_s
                ),
            )

    def estimate(self, row: PendingRow, template: str | None, policy: Policy) -> PendingRow:
        """The row of a job that nobody has submitted yet, as ``fill`` would tell it."""
        if policy.use_predictions == "no":
            return row
        with self._lock:
            kind = DurationKey(row.project, row.user, template, row.total_milli)
            return replace(row, predicted_duration_s=self._expected_duration_s(row, kind))

    def _learn(self) -> None:
        """Learns from the jobs that ended since the last time; from the latest of all at the first."""
        ended = Job.objects.filter(
            state__in=[state.value for state in TERMINAL_JOB_STATES],
            started_at__isnull=False,
            ended_at__isnull=False,
        )
        if self._newest_end is not None:
            ended = ended.filter(ended_at__gte=self._newest_end - LATE_COMMIT_WINDOW)
        rows = list(
            ended.order_by("-ended_at", "-id").values_list(
                "id",
                "ended_at",
                "project__public_id",
                "owner__public_id",
                "template__public_id",
                F("tasks") * F("gpus_per_task") * F("milli_per_gpu"),
                F("ended_at") - F("started_at"),
            )[:SAMPLE_SIZE]
        )
        numbers: dict[int, int] = {}
        for id_, _, project, user, template, milli, ran in reversed(rows):
            if id_ not in self._learned:
                numbers[id_] = self.durations.learned_count
                self.durations.learn(DurationKey(project, user, template, milli), ran.total_seconds())
        self._learn_speeds(numbers)
        if rows:
            self._newest_end = rows[0][1]
            self._learned = {row[0] for row in rows if row[1] >= self._newest_end - LATE_COMMIT_WINDOW}

    def _learn_speeds(self, numbers: dict[int, int]) -> None:
        """Learns from the attempts of jobs that ended, and forgets those of jobs whose durations are forgotten."""
        if not numbers:
            return
        told = AttemptProgress.objects.filter(attempt__job__in=numbers, gpus__gt=0).select_related("attempt")
        for row in sorted(told, key=lambda row: (numbers[row.attempt.job_id], row.attempt.number)):
            if per_s := row.per_s:
                self.throughputs.learn(
                    numbers[row.attempt.job_id], row.workload_fingerprint, row.layout, per_s
                )
        self.throughputs.forget_before(self.durations.learned_count - SAMPLE_SIZE)

    def _load_templates(self, jobs: set[JobId]) -> None:
        known = {job: template for job, template in self.template_of.items() if job in jobs}
        if new_jobs := jobs - known.keys():
            known |= dict.fromkeys(new_jobs)
            rows = Job.objects.filter(public_id__in=new_jobs, template__isnull=False)
            known |= {JobId(job): each for job, each in rows.values_list("public_id", "template__public_id")}
        self.template_of = known

    def _with_speeds(self, rows: tuple[PendingRow, ...]) -> tuple[PendingRow, ...]:
        """The rows with how fast work like theirs runs on each known layout; themselves where none is known."""
        if not self.throughputs.has_differences:
            self._work_of = {}
            return rows
        works = {row.job: self._work_of.get(row.job) for row in rows}
        new_jobs = [job for job, work in works.items() if work is None]
        self._work_of = {job: work for job, work in works.items() if work is not None} | _read_work_keys(
            new_jobs
        )
        speeds = self.throughputs.speeds
        return self._with_estimates(
            rows, "speeds", lambda row: self._work_of[row.job], lambda _, work: speeds(work)
        )

    def _expected_duration_s(self, row: PendingRow, kind: DurationKey) -> float | None:
        return self._total_duration_s(kind, 0.0, row.time_limit_s)

    def _total_duration_s(self, kind: DurationKey, ran_s: float, limit_s: float | None) -> float | None:
        """How long a job runs from its start; its limit caps that until it has passed."""
        in_all_s = self._steps.total_s(kind, ran_s)
        if in_all_s is None or limit_s is None or limit_s <= ran_s:
            return in_all_s
        return min(in_all_s, limit_s)

    def _group_by(self, milli: Callable[[Row], int]) -> Callable[[Row], DurationKey]:
        return lambda row: DurationKey(row.project, row.user, self.template_of.get(row.job), milli(row))

    def _with_estimates(
        self,
        rows: tuple[Row, ...],
        name: str,
        kind_of: Callable[[Row], K],
        estimate: Callable[[Row, K], object],
    ) -> tuple[Row, ...]:
        """The rows with the field ``name`` as ``expect`` says."""
        before, now, told = self._rows.get(name, {}), {}, []
        for row in rows:
            known = before.get(row.job)
            if known is None or (known.source is not row and known.source != row):
                known = _EstimatedRow(row, row, kind_of(row))
            if (expected := estimate(row, known.group)) != getattr(known.estimated, name):
                known = known._replace(estimated=replace(known.source, **{name: expected}))
            now[row.job] = known
            told.append(known.estimated)
        self._rows[name] = now
        return tuple(told)


def _read_work_keys(jobs: list[JobId]) -> dict[JobId, str]:
    """The work of each of these jobs; none of those without GPUs, and of a job that is gone."""
    rows = Job.objects.filter(public_id__in=jobs).values_list(
        "public_id",
        "project__public_id",
        "environment__public_id",
        F("tasks") * F("gpus_per_task"),
        "milli_per_gpu",
        "mig_profile",
        "command",
        "env",
    )
    found = {
        JobId(job): workload_fingerprint(*told) if told[2] else "" for job, *told in (rows if jobs else ())
    }
    return dict.fromkeys(jobs, "") | found


def _requested_milli(row: PendingRow) -> int:
    return row.total_milli


def _held_milli(row: RunningRow) -> int:
    return sum(share.milli for task in row.tasks for share in task.gpus)
