"""Reads the progress of attempts, and the layouts and numbers of GPUs on which comparable jobs ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from agents.launchers import launcher_label
from portal.domain.jobs.scaling import LauncherRate, ScalePoint, launcher_rates, scale_points
from portal.domain.scheduling.throughput import (
    MAX_SAMPLES,
    Layout,
    compare_layouts,
    median_rates,
    newest_rates,
    workload_fingerprint,
)
from portal.models import Attempt, AttemptProgress, Environment, Job, Project

MAX_ATTEMPTS_READ = 8 * MAX_SAMPLES
"""Number of latest comparable attempts read for a page."""


def attempt_progress(attempt: Attempt) -> AttemptProgress | None:
    """Return the progress of an attempt, or None. Lists should join ``progress``."""
    return getattr(attempt, "progress", None)


def job_workload_fingerprint(job: Job) -> str:
    """Return the key that the job shares with jobs of comparable rates."""
    return workload_fingerprint(
        job.project.public_id,
        job.environment.public_id,
        job.total_gpus,
        job.milli_per_gpu,
        job.mig_profile,
        job.command,
        job.env,
        launcher_label(job.launcher, job.launcher_options),
    )


class Workload(Protocol):
    """What identifies a program: a job, or a request for one."""

    @property
    def project(self) -> Project: ...
    @property
    def environment(self) -> Environment: ...
    @property
    def milli_per_gpu(self) -> int: ...
    @property
    def mig_profile(self) -> str: ...
    @property
    def gpu_model(self) -> str: ...
    @property
    def command(self) -> Sequence[str]: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def launcher(self) -> str: ...
    @property
    def launcher_options(self) -> Mapping[str, Any]: ...
    @property
    def total_gpus(self) -> int: ...


def job_scaling_fingerprint(job: Workload) -> str:
    """Return the key that the job shares with jobs that differ only by their number of GPUs and their launcher."""
    return workload_fingerprint(
        job.project.public_id,
        job.environment.public_id,
        None,
        job.milli_per_gpu,
        job.mig_profile,
        job.command,
        job.env,
        None,
    )


@dataclass(frozen=True)
class MeasuredProgram:
    """Rates of a program: on numbers of GPUs with the job's launcher, and by launcher on its number of GPUs."""

    points: list[ScalePoint]
    launchers: list[LauncherRate]


def measure_program(job: Workload) -> MeasuredProgram:
    """Return the measured rates of the job's program, in one query.

    Only attempts on one GPU model are compared: the requested one, else that of the newest attempt.
    """
    rates, label = _measured_rates(job), launcher_label(job.launcher, job.launcher_options)
    return MeasuredProgram(
        scale_points((row.gpus, per_s) for row, per_s in rates if row.launcher == label),
        launcher_rates((row.launcher, per_s) for row, per_s in rates if row.gpus == job.total_gpus),
    )


@dataclass(frozen=True)
class MeasuredSpeeds:
    """The median rate of a program on numbers of (GPUs, nodes) of one model."""

    rates: Mapping[tuple[int, int], float]

    def relative_percent(self, before: tuple[int, int], after: tuple[int, int]) -> int | None:
        """Return the rate of ``after`` in percent of ``before``; None unless both were measured."""
        old, new = self.rates.get(before), self.rates.get(after)
        return round(100 * new / old) if old and new else None


def measure_speeds(job: Workload) -> MeasuredSpeeds:
    """Return the measured rates of the job's program by GPUs and nodes, in one query; as ``measure_program``."""
    label = launcher_label(job.launcher, job.launcher_options)
    rates = (((row.gpus, row.nodes), per_s) for row, per_s in _measured_rates(job) if row.launcher == label)
    return MeasuredSpeeds({size: median(mine) for size, mine in newest_rates(rates).items()})


def _measured_rates(job: Workload) -> list[tuple[AttemptProgress, float]]:
    reported = AttemptProgress.objects.filter(scaling_fingerprint=job_scaling_fingerprint(job), gpus__gt=0)
    rows = list(reported.order_by("-attempt")[:MAX_ATTEMPTS_READ])
    model = job.gpu_model or (rows[0].gpu_model if rows else "")
    return [(row, per_s) for row in rows if row.gpu_model == model and (per_s := row.per_s) is not None]


@dataclass(frozen=True)
class MeasuredLayout:
    """Speed on one layout: the median of several attempts, absolute and relative to the fastest."""

    layout: Layout
    per_s: float
    percent: int
    attempts: int


def compare_job_layouts(job: Job) -> list[MeasuredLayout]:
    """Return the layouts of ended comparable jobs, fastest first; empty unless two differ. One query.

    Comparable jobs are of the same project, so whoever may see the job may see this.
    """
    if not job.total_gpus:
        return []
    reported = AttemptProgress.objects.filter(
        workload_fingerprint=job_workload_fingerprint(job), attempt__ended_at__isnull=False
    )
    rates = [
        (row.layout, per_s)
        for row in reported.order_by("-attempt")[:MAX_ATTEMPTS_READ]
        if (per_s := row.per_s) is not None
    ]
    known = median_rates(rates)
    counted = Counter(layout for layout, _ in rates)
    return [
        MeasuredLayout(layout, known[layout], percent, min(counted[layout], MAX_SAMPLES))
        for layout, percent in compare_layouts(known)
    ]
