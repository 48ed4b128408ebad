"""Reads the queue: pending jobs in the scheduler's order, and the shares that determine it.

All users see the whole queue, but names only in projects that they may see. Positions are those of the newest
cycle (``jobs_ahead`` of the verdict); projects and users are ordered by their first job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from django.db.models import Case, F, IntegerField, Min, QuerySet, Sum, Value, When, Window
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, Coalesce
from django.utils import timezone

from portal.domain.reasons import VerdictCode
from portal.domain.states import DesiredState, JobState
from portal.models import Job
from portal.models.jobs import total_milli
from portal.selectors.scheduling.decayed_usage import decayed_usage
from portal.selectors.scheduling.fair_share_breakdown import latest_breakdown_rows
from portal.visibility import NameVisibility

NO_POSITION = 1_000_000_000
"""Position of jobs that are not in the queue: held, delayed, or not examined yet."""


@dataclass(frozen=True)
class QueueFilter:
    """Filters: pool name, own jobs only, text contained in names."""

    pool: str = ""
    mine: bool = False
    search: str = ""


@dataclass(frozen=True)
class ProjectPoolShare:
    """Allocation, guarantee and fair share of a project in a pool in the newest cycle, GPU milli."""

    pool: str
    guaranteed_milli: int
    allocated_milli: int
    fair_share_milli: float

    @property
    def is_below_guarantee(self) -> bool:
        """True if its jobs come first because it holds less than its guarantee."""
        return self.allocated_milli < self.guaranteed_milli

    @property
    def borrowed_milli(self) -> int:
        return max(0, self.allocated_milli - self.guaranteed_milli)


def pending_jobs(visibility: NameVisibility, filters: QueueFilter) -> QuerySet[Job, tuple[int, int]]:
    """Return (job id, position) of pending jobs in order; slice it for ``with_job_rows``.

    Position 1 is next; ``NO_POSITION`` means none.
    """
    ahead = Cast(KeyTextTransform("jobs_ahead", "verdict__details"), IntegerField())
    turn = Coalesce(
        Case(
            When(held=True, then=Value(NO_POSITION)),
            When(verdict__code=VerdictCode.WAITING_FOR_EVICTION.value, then=Value(0)),
            When(verdict__details__has_key="jobs_ahead", then=ahead + 1),
            default=Value(NO_POSITION),
        ),
        Value(NO_POSITION),
    )
    rows = Job.objects.filter(state=JobState.PENDING.value, desired_state=DesiredState.RUN.value)
    if filters.pool:
        rows = rows.filter(pool__name=filters.pool) | rows.filter(pool__isnull=True)
    if filters.mine:
        rows = rows.filter(owner=visibility.user)
    if filters.search:
        if visibility.projects is not None:
            rows = rows.filter(project_id__in=visibility.projects)
        rows = rows.filter(name__icontains=filters.search) | rows.filter(owner__username=filters.search)
    return (
        rows.annotate(turn=turn)
        .annotate(
            project_turn=Window(Min(turn), partition_by=[F("project_id")]),
            person_turn=Window(Min(turn), partition_by=[F("project_id"), F("owner_id")]),
        )
        .order_by(
            "project_turn",
            "project_id",
            "person_turn",
            "owner_id",
            "-priority",
            "queue_rank",
            "turn",
            "submitted_at",
            "id",
        )
        .values_list("pk", "turn")
    )


def with_job_rows(positions: Iterable[tuple[int, int]]) -> list[Job]:
    """Return the jobs of a slice of the queue with related rows joined and their position, in two queries."""
    order = dict(positions)
    found = Job.objects.select_related("project", "owner", "pool", "verdict").in_bulk(order)
    jobs = [found[row] for row in order if row in found]
    for job in jobs:
        job.turn = order[job.pk]  # type: ignore[attr-defined]
    return jobs


def total_requested_milli() -> int:
    total = Job.objects.filter(state=JobState.PENDING.value, desired_state=DesiredState.RUN.value).aggregate(
        milli=Sum(total_milli())
    )
    return int(total["milli"] or 0)


def shares_by_project(pools: dict[str, str], projects: Collection[str]) -> dict[str, list[ProjectPoolShare]]:
    """Return the pools in which these projects (public ids) request more, from the newest cycle."""
    found: dict[str, list[ProjectPoolShare]] = {}
    for breakdown in latest_breakdown_rows(projects):
        if breakdown["pool"] not in pools or breakdown["requested_milli"] <= breakdown["allocated_milli"]:
            continue
        found.setdefault(breakdown["project"], []).append(
            ProjectPoolShare(
                pools[breakdown["pool"]],
                breakdown["guaranteed_milli"],
                breakdown["allocated_milli"],
                breakdown["fair_share_milli"],
            )
        )
    return found


def usage_fractions(usage_half_life_s: float, projects: Collection[int]) -> dict[tuple[int, int], float]:
    """Return each user's fraction (0 to 1) of the project's decayed usage, by (project id, user id)."""
    if not projects:
        return {}
    totals: dict[int, float] = defaultdict(float)
    own: dict[tuple[int, int], float] = defaultdict(float)
    for row in decayed_usage(timezone.now().timestamp(), usage_half_life_s, sorted(projects)):
        totals[row.project_row] += row.gpu_seconds
        own[row.project_row, row.user_row] += row.gpu_seconds
    return {key: used / totals[key[0]] for key, used in own.items() if totals[key[0]] > 0}
