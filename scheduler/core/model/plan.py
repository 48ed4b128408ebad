"""What a decision says: who starts where, who leaves, why each other job waits, and each project's sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from portal.domain.reasons import VerdictCode
from scheduler.core.model.snapshot import GpuShare, JobId, NodeId, PoolId, ProjectId


@dataclass(frozen=True, slots=True)
class TaskPlacement:
    """The place of one rank."""

    rank: int
    node: NodeId
    gpus: tuple[GpuShare, ...]


@dataclass(frozen=True, slots=True)
class JobPlacement:
    """A gang with a place for every rank. ``version`` is the pending row's: commit refuses another."""

    job: JobId
    pool: PoolId
    version: int
    tasks: tuple[TaskPlacement, ...]


class EvictionReason(StrEnum):
    """Why a running job has to leave."""

    RECLAIMED = "reclaimed"  # for another project
    PREEMPTED = "preempted"  # for a job of higher priority in its own project
    MIGRATED = "migrated"  # moved, so that another job fits; it has a new place in the same plan
    GANG_INCOMPLETE = "gang_incomplete"  # fewer of its tasks live than it can work with


@dataclass(frozen=True, slots=True)
class Eviction:
    """A running job that leaves, and the pending job it makes room for (itself, if it was stale).

    ``ranks`` empty is all of it; an elastic job may lose some ranks and work on.
    """

    job: JobId
    reason: EvictionReason
    for_job: JobId
    ranks: tuple[int, ...] = ()


class AlternativeKind(StrEnum):
    """What one could change in a request."""

    FEWER_GPUS = "fewer_gpus"
    FEWER_TASKS = "fewer_tasks"
    OTHER_MODEL = "other_model"
    OTHER_POOL = "other_pool"
    PREEMPTIBLE = "preemptible"
    RELAX_TOPOLOGY = "relax_topology"


@dataclass(frozen=True, slots=True)
class Alternative:
    """A change that lets a job start now, found by asking again; ``fields`` are the request's new values."""

    kind: AlternativeKind
    message: str
    fields: dict[str, int | str | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StartInterval:
    """When a job is expected to start: nominal 80 % between p10 and p90, seconds since the epoch.

    ``simulated_s`` is in how many seconds, before what past forecasts taught was counted in.
    """

    p10_s: float
    p50_s: float
    p90_s: float
    simulated_s: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why one job waits: one dominant reason, its numbers, who is ahead, and the cheapest way out."""

    job: JobId
    code: VerdictCode
    message: str
    details: dict[str, int | float | str | None] = field(default_factory=dict)
    jobs_ahead: tuple[JobId, ...] = ()
    suggestion: Alternative | None = None
    interval: StartInterval | None = None


@dataclass(frozen=True, slots=True)
class ShareStep:
    """One line of a receipt: what this step added and the numbers it was computed from."""

    kind: str  # "guaranteed" | "round" | "remainder"
    amount_milli: float
    details: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FairShareBreakdown:
    """How a project's fair share in a pool came about; the steps add up to ``fair_share_milli``."""

    project: ProjectId
    pool: PoolId
    guaranteed_milli: int
    limit_milli: int | None
    allocated_milli: int
    requested_milli: int  # what it holds and asks for, cut at its limit and what each person may hold
    fair_share_milli: float
    steps: tuple[ShareStep, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole decision. Every pending job stands in ``starts`` or in ``verdicts``, once, if it is ``told``."""

    starts: tuple[JobPlacement, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    share_breakdowns: tuple[FairShareBreakdown, ...] = ()
    steps_used: int = 0
    truncated: bool = False
    explained: bool = True
    """False: nobody asked why jobs wait; then there are no verdicts."""
    nominations: tuple[JobPlacement, ...] = ()
    """Places kept for gangs that start there once others have left; a victim's place elsewhere is one too."""


@dataclass(frozen=True, slots=True)
class RequestPreview:
    """What would happen to one request if it were submitted now."""

    starts_now: bool
    placement: JobPlacement | None
    verdict: Verdict | None
    alternatives: tuple[Alternative, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    """Who would be asked to leave for it."""

    @property
    def is_unsatisfiable(self) -> bool:
        """True when this cluster could not run it even if it were empty."""
        return self.verdict is not None and self.verdict.code is VerdictCode.UNSATISFIABLE
