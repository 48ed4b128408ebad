"""Adds duration and throughput estimates to snapshot rows, learned from jobs that ended.

History is read in full once and incrementally afterwards. Estimates depend only on the latest ended jobs and
the row, and are quantized (``scheduler.core.forecast.durations.QuantizedDurations``), so every process
computes the same values and rows rarely change.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from django.db.models import F

from agents.launchers import launcher_label
from portal.domain.scheduling.throughput import workload_fingerprint
from portal.domain.states import TERMINAL_JOB_STATES
from portal.models import AttemptProgress, Job
from portal.models.jobs.jobs import total_gpus, total_milli
from scheduler.core.capacity.throughput import ThroughputHistory
from scheduler.core.forecast.durations import DurationHistory, DurationKey, QuantizedDurations
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import JobId, PendingRow, RunningRow, Snapshot

SAMPLE_SIZE = 5_000
"""Ended jobs, the latest first, that durations and throughputs are learned from."""
LATE_COMMIT_WINDOW = dt.timedelta(minutes=2)
"""A job's end may become visible this much later than a later end of another job."""

Row = TypeVar("Row", PendingRow, RunningRow)
K = TypeVar("K")


class _EstimatedRow(NamedTuple):
    """A row as read and with its estimate, and the group that the estimate is made for."""

    source: Any
    estimated: Any
    group: Any


class DurationEstimator:
    """Durations and throughputs that one process has learned; thread-safe."""

    def __init__(self) -> None:
        self.durations = DurationHistory(SAMPLE_SIZE)
        self.throughputs = ThroughputHistory()
        self.template_of: dict[JobId, str | None] = {}
        """The template of each job of the last snapshot."""
        self._work_of: dict[JobId, str] = {}
        self._steps = QuantizedDurations(self.durations)
        self._newest_end: dt.datetime | None = None
        self._learned: set[int] = set()
        """Primary keys of the jobs that ended within LATE_COMMIT_WINDOW of the newest."""
        self._rows: dict[str, dict[JobId, _EstimatedRow]] = {}
        self._lock = threading.Lock()

    def fill(self, snapshot: Snapshot, policy: Policy) -> Snapshot:
        """Return the snapshot with estimates; unchanged when the policy uses no predictions.

        Runs one query, and up to three more when jobs are new or ended. A row whose estimate is unchanged is
        the object of the last call.
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
                snapshot.pending,
                "predicted_duration_s",
                self._group_by(attrgetter("total_milli")),
                self._expected_duration_s,
            )
            return replace(
                snapshot,
                pending=self._with_speeds(pending),
                running=self._with_estimates(
                    snapshot.running, "predicted_end_s", self._group_by(_held_milli), ends_s
                ),
            )

    def estimate(self, row: PendingRow, template: str | None, policy: Policy) -> PendingRow:
        """Return the row of a job that is not submitted, with the estimate that ``fill`` would set."""
        if policy.use_predictions == "no":
            return row
        with self._lock:
            kind = DurationKey(row.project, row.user, template, row.total_milli)
            return replace(row, predicted_duration_s=self._expected_duration_s(row, kind))

    def _learn(self) -> None:
        """Learn from the jobs that ended since the last call, or from the latest ``SAMPLE_SIZE`` at first."""
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
                total_milli(),
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
        """Learn throughputs of ended jobs (``numbers``: order by primary key); forget the oldest."""
        if not numbers:
            return
        reported = AttemptProgress.objects.filter(attempt__job__in=numbers, gpus__gt=0).select_related(
            "attempt"
        )
        for row in sorted(reported, key=lambda row: (numbers[row.attempt.job_id], row.attempt.number)):
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
        """Return the rows with expected throughput by layout; unchanged when none is known."""
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
            rows, "layout_speeds", lambda row: self._work_of[row.job], lambda _, work: speeds(work)
        )

    def _expected_duration_s(self, row: PendingRow, kind: DurationKey) -> float | None:
        return self._total_duration_s(kind, 0.0, row.time_limit_s)

    def _total_duration_s(self, kind: DurationKey, ran_s: float, limit_s: float | None) -> float | None:
        """Return the expected total duration after ``ran_s``, capped by the time limit; None if unknown."""
        in_all_s = self._steps.total_s(kind, ran_s) if self.durations.is_informative else None
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
        """Return the rows with the field ``name`` set to ``estimate``."""
        before, now, reported = self._rows.get(name, {}), {}, []
        for row in rows:
            known = before.get(row.job)
            if known is None or (known.source is not row and known.source != row):
                known = _EstimatedRow(row, row, kind_of(row))
            if (expected := estimate(row, known.group)) != getattr(known.estimated, name):
                known = known._replace(estimated=replace(known.source, **{name: expected}))
            now[row.job] = known
            reported.append(known.estimated)
        self._rows[name] = now
        return tuple(reported)


def _read_work_keys(jobs: list[JobId]) -> dict[JobId, str]:
    """Return the workload key of each job; without jobs that have no GPUs or no longer exist."""
    rows = Job.objects.filter(public_id__in=jobs).values_list(
        "public_id",
        "project__public_id",
        "environment__public_id",
        total_gpus(),
        "milli_per_gpu",
        "mig_profile",
        "command",
        "env",
        "launcher",
        "launcher_options",
    )
    found = {
        JobId(job): workload_fingerprint(*[*reported, launcher_label(launcher, options)])
        if reported[2]
        else ""
        for job, *reported, launcher, options in (rows if jobs else ())
    }
    return dict.fromkeys(jobs, "") | found


def _held_milli(row: RunningRow) -> int:
    return sum(share.milli for task in row.tasks for share in task.gpus)
