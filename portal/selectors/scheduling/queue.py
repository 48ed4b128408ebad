"""Reads the queue: pending jobs in the scheduler's order, and the shares that determine it.

All users see the whole queue, but names only in projects that they may see. Positions are those of the newest
cycle (``jobs_ahead`` of the verdict); projects and users are ordered by their first job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from django.db.models import Case, Count, F, IntegerField, Min, QuerySet, Sum, Value, When, Window
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, Coalesce
from django.utils import timezone

from portal.domain.jobs.reasons import VerdictCode
from portal.domain.states import DesiredState, JobState
from portal.hidden_fields import NameVisibility
from portal.models import Job
from portal.models.jobs.jobs import total_milli
from portal.selectors.scheduling.decayed_usage import decayed_usage
from portal.selectors.scheduling.fair_share_breakdown import latest_breakdown_rows

NO_POSITION = 1_000_000_000
"""Position of jobs that are not in the queue: held, delayed, or not examined yet."""


ROW_COLUMNS = (
    *("public_id", "name", "held", "priority", "submitted_at"),
    *("kind", "state", "desired_state", "attempt_count", "roles", "version"),
    *("role_gpus", "tasks", "gpus_per_task", "milli_per_gpu"),
    *("project__public_id", "project__name", "owner__public_id", "owner__username", "owner__full_name"),
    *("pool__public_id", "pool__name", "verdict__code", "verdict__message", "verdict__suggestion"),
    *("verdict__forecast_at", "verdict__p10_at", "verdict__p50_at", "verdict__p90_at"),
)
"""Of a pending job and what it refers to, what the page and REST show: jobs and users have a hundred columns."""


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


class PendingJobs(Sequence[tuple[int, int]]):
    """The pending jobs in order, as (job id, position); a slice reads only the projects that it contains.

    Position 1 is next; ``NO_POSITION`` means none. The order is by project, then by user, each at the position of
    its first job.
    """

    def __init__(self, visibility: NameVisibility, filters: QueueFilter) -> None:
        self._rows = _pending_rows(visibility, filters).annotate(turn=_turn())
        projects = self._rows.order_by().values("project_id")
        sums = projects.annotate(first=Min("turn"), jobs=Count("pk"), milli=Sum(total_milli()))
        self._projects = list(sums.order_by("first", "project_id").values_list("project_id", "jobs", "milli"))

    def __len__(self) -> int:
        return sum(jobs for _project, jobs, _milli in self._projects)

    @property
    def requested_milli(self) -> int:
        return sum(int(milli or 0) for _project, _jobs, milli in self._projects)

    @overload
    def __getitem__(self, part: int) -> tuple[int, int]: ...

    @overload
    def __getitem__(self, part: slice) -> list[tuple[int, int]]: ...

    def __getitem__(self, part: int | slice) -> tuple[int, int] | list[tuple[int, int]]:
        if isinstance(part, int):
            return self._read(part, part + 1)[0]
        start, stop, _step = part.indices(len(self))
        return self._read(start, stop)

    def _read(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return a part, in one query."""
        before, offset = 0, 0
        projects: list[int] = []
        for project, jobs, _milli in self._projects:
            if before + jobs > start and before < stop:
                offset = offset if projects else before
                projects.append(project)
            before += jobs
        if not projects:
            return []
        of_project = Window(Min("turn"), partition_by=[F("project_id")])
        of_user = Window(Min("turn"), partition_by=[F("project_id"), F("owner_id")])
        rows = (
            self._rows.filter(project_id__in=projects)
            .annotate(project_turn=of_project, user_turn=of_user)
            .order_by(
                *("project_turn", "project_id", "user_turn", "owner_id"),
                *("-priority", "queue_rank", "turn", "submitted_at", "id"),
            )
        )
        return list(rows.values_list("pk", "turn")[start - offset : stop - offset])


def _turn() -> Coalesce:
    ahead = Cast(KeyTextTransform("jobs_ahead", "verdict__details"), IntegerField())
    return Coalesce(
        Case(
            When(held=True, then=Value(NO_POSITION)),
            When(verdict__code=VerdictCode.WAITING_FOR_EVICTION.value, then=Value(0)),
            When(verdict__details__has_key="jobs_ahead", then=ahead + 1),
            default=Value(NO_POSITION),
        ),
        Value(NO_POSITION),
    )


def _pending_rows(visibility: NameVisibility, filters: QueueFilter) -> QuerySet[Job]:
    rows = Job.objects.filter(state=JobState.PENDING.value, desired_state=DesiredState.RUN.value)
    if filters.pool:
        rows = rows.filter(pool__name=filters.pool) | rows.filter(pool__isnull=True)
    if filters.mine:
        rows = rows.filter(owner=visibility.user)
    if filters.search:
        if visibility.projects is not None:
            rows = rows.filter(project_id__in=visibility.projects)
        rows = rows.filter(name__icontains=filters.search) | rows.filter(owner__username=filters.search)
    return rows


def with_job_rows(positions: Iterable[tuple[int, int]]) -> list[Job]:
    """Return the jobs of a slice of the queue with related rows joined and their position, in two queries."""
    order = dict(positions)
    found = (
        Job.objects.select_related("project", "owner", "pool", "verdict").only(*ROW_COLUMNS).in_bulk(order)
    )
    jobs = [found[row] for row in order if row in found]
    for job in jobs:
        job.turn = order[job.pk]  # type: ignore[attr-defined]
    return jobs


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
