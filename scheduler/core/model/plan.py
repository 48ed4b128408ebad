"""The result of a decision: starts, evictions, verdicts and fair-share breakdowns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from portal.domain.jobs.reasons import VerdictCode
from portal.domain.stored_texts import stored_text
from scheduler.core.model.snapshot import GpuShare, JobId, NodeId, PoolId, ProjectId


@dataclass(frozen=True, slots=True)
class TaskPlacement:
    rank: int
    node: NodeId
    gpus: tuple[GpuShare, ...]


@dataclass(frozen=True, slots=True)
class JobPlacement:
    """A placement of some or all tasks of a gang. ``version`` is the pending row's; commit checks it."""

    job: JobId
    pool: PoolId
    version: int
    tasks: tuple[TaskPlacement, ...]


class EvictionReason(StrEnum):
    RECLAIMED = "reclaimed"  # for another project
    PREEMPTED = "preempted"  # for a job of higher priority in its own project
    MIGRATED = "migrated"  # so that another job fits; the same plan nominates a new placement
    GANG_INCOMPLETE = "gang_incomplete"  # fewer live tasks than it can run with


@dataclass(frozen=True, slots=True)
class Eviction:
    """The eviction of a running job, and the pending job it is evicted for (itself, if it was stale).

    Empty ``ranks`` evict the whole job; an elastic job may lose some ranks and continue.
    """

    job: JobId
    reason: EvictionReason
    for_job: JobId
    ranks: tuple[int, ...] = ()


class AlternativeKind(StrEnum):
    """What to change in a request."""

    FEWER_CPUS = "fewer_cpus"
    """Or less memory."""
    FEWER_GPUS = "fewer_gpus"
    FEWER_TASKS = "fewer_tasks"
    MIXED_GPUS = "mixed_gpus"
    OTHER_SHAPE = "other_shape"
    OTHER_MODEL = "other_model"
    OTHER_POOL = "other_pool"
    PREEMPTIBLE = "preemptible"
    RELAX_TOPOLOGY = "relax_topology"
    SHORTER_LIMIT = "shorter_limit"


@dataclass(frozen=True, slots=True)
class Alternative:
    """A verified change of a request with which the job would start now; ``fields`` are the new values.

    ``change`` is a phrase such as "with 4 GPUs instead of 8".
    """

    kind: AlternativeKind
    change: str
    fields: dict[str, int | str | bool | None] = field(default_factory=dict)

    @property
    def message(self) -> str:
        return stored_text(f"It would start now {self.change}.")


@dataclass(frozen=True, slots=True)
class StartInterval:
    """When a job is expected to start: nominal 80 % between p10 and p90, seconds since the epoch.

    ``simulated_s`` is the simulated wait in seconds before calibration by past forecasts.
    """

    p10_s: float
    p50_s: float
    p90_s: float
    simulated_s: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why one job is pending: one dominant reason, details, jobs ahead, and the cheapest helpful change."""

    job: JobId
    code: VerdictCode
    message: str
    details: dict[str, int | float | str | None] = field(default_factory=dict)
    jobs_ahead: tuple[JobId, ...] = ()
    suggestion: Alternative | None = None
    interval: StartInterval | None = None


@dataclass(frozen=True, slots=True)
class ShareStep:
    """One step of a fair-share breakdown: what it added and the numbers it was computed from."""

    kind: str  # "guaranteed" | "round" | "remainder"
    amount_milli: float
    details: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FairShareBreakdown:
    """How the fair share of a project in a pool was computed; the steps add up to ``fair_share_milli``."""

    project: ProjectId
    pool: PoolId
    guaranteed_milli: int
    limit_milli: int | None
    allocated_milli: int  # held after the plan, without what stopping jobs release
    requested_milli: int  # held and requested, capped by its limit and by user limits
    fair_share_milli: float
    steps: tuple[ShareStep, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision. If ``explained``, every pending job is in ``starts`` or in ``verdicts``, exactly once."""

    starts: tuple[JobPlacement, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    share_breakdowns: tuple[FairShareBreakdown, ...] = ()
    steps_used: int = 0
    truncated: bool = False
    explained: bool = True
    """False if verdicts were not requested; then there are none."""
    nominations: tuple[JobPlacement, ...] = ()
    """Placements that start once evicted jobs are gone; the new placement of a migrated job is one too."""


@dataclass(frozen=True, slots=True)
class RequestPreview:
    starts_now: bool
    placement: JobPlacement | None
    verdict: Verdict | None
    alternatives: tuple[Alternative, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    """The evictions that would make it start."""
    plan: Plan = Plan()
    """The plan of the whole queue, with the request in it."""

    @property
    def is_unsatisfiable(self) -> bool:
        """True if the job could not run even in an empty cluster."""
        return self.verdict is not None and self.verdict.code is VerdictCode.UNSATISFIABLE
