"""Reads who comes next: the waiting jobs in the order the scheduler would take them, and what that order rests on.

Everybody sees the whole queue, but names only in projects they may see. The order of a job is that of the newest
cycle (``jobs_ahead`` of its verdict); projects and people stand where their first job stands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from django.db.models import Case, F, IntegerField, Min, QuerySet, Sum, Value, When, Window
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, Coalesce
from django.utils import timezone

from portal.models import Job
from portal.selectors.past_use import past_use
from portal.selectors.receipts import newest_receipts
from portal.visibility import Visibility
from portal.words.reasons import VerdictCode
from portal.words.states import Desired, JobState

LAST = 1_000_000_000
"""The turn of jobs that stand in no queue: held, delayed, or not looked at yet."""


@dataclass(frozen=True)
class QueueFilter:
    """What the queue is narrowed to: a pool by name, one's own jobs, names that hold a text."""

    pool: str = ""
    mine: bool = False
    search: str = ""


@dataclass(frozen=True)
class Share:
    """What a project holds of a pool beside what it was given, as of the newest cycle; GPU milli."""

    pool: str
    guaranteed_milli: int
    allocated_milli: int
    fair_share_milli: float

    @property
    def first(self) -> bool:
        """It holds less than its guarantee, so it goes first."""
        return self.allocated_milli < self.guaranteed_milli

    @property
    def borrowed_milli(self) -> int:
        """What it holds beyond its guarantee."""
        return max(0, self.allocated_milli - self.guaranteed_milli)


def waiting_for(visibility: Visibility, wanted: QueueFilter) -> QuerySet[Job, tuple[int, int]]:
    """The waiting jobs in order, as row number and turn (1 is next; LAST: none); slice it for ``with_rows``."""
    ahead = Cast(KeyTextTransform("jobs_ahead", "standing__numbers"), IntegerField())
    turn = Coalesce(
        Case(
            When(held=True, then=Value(LAST)),
            When(standing__code=VerdictCode.RELEASING.value, then=Value(0)),
            When(standing__numbers__has_key="jobs_ahead", then=ahead + 1),
            default=Value(LAST),
        ),
        Value(LAST),
    )
    rows = Job.objects.filter(state=JobState.PENDING.value, desired=Desired.RUN.value)
    if wanted.pool:
        rows = rows.filter(pool__name=wanted.pool) | rows.filter(pool__isnull=True)
    if wanted.mine:
        rows = rows.filter(owner=visibility.user)
    if wanted.search:
        if visibility.projects is not None:
            rows = rows.filter(project_id__in=visibility.projects)
        rows = rows.filter(name__icontains=wanted.search) | rows.filter(owner__username=wanted.search)
    return (
        rows.annotate(turn=turn)
        .annotate(
            project_turn=Window(Min(turn), partition_by=[F("project_id")]),
            person_turn=Window(Min(turn), partition_by=[F("project_id"), F("owner_id")]),
        )
        .order_by(
            "project_turn", "project_id", "person_turn", "owner_id", "turn", "-priority", "submitted_at", "id"
        )
        .values_list("pk", "turn")
    )


def with_rows(turns: Iterable[tuple[int, int]]) -> list[Job]:
    """The jobs of a slice of the queue with what a row shows joined, each with its ``turn``: two queries."""
    order = dict(turns)
    found = Job.objects.select_related("project", "owner", "pool", "standing").in_bulk(order)
    jobs = [found[row] for row in order if row in found]
    for job in jobs:
        job.turn = order[job.pk]  # type: ignore[attr-defined]
    return jobs


def asked_milli() -> int:
    """What all waiting jobs ask for together, GPU milli."""
    total = Job.objects.filter(state=JobState.PENDING.value, desired=Desired.RUN.value).aggregate(
        milli=Sum(F("tasks") * F("gpus_per_task") * F("milli_per_gpu"))
    )
    return int(total["milli"] or 0)


def shares_by_project(pools: dict[str, str], projects: Collection[str]) -> dict[str, list[Share]]:
    """By public id of these projects, the pools in which they ask for more; from the newest cycle's receipts."""
    found: dict[str, list[Share]] = {}
    for receipt in newest_receipts(projects):
        if receipt["pool"] not in pools or receipt["requested_milli"] <= receipt["allocated_milli"]:
            continue
        found.setdefault(receipt["project"], []).append(
            Share(
                pools[receipt["pool"]],
                receipt["guaranteed_milli"],
                receipt["allocated_milli"],
                receipt["fair_share_milli"],
            )
        )
    return found


def past_parts(half_life_s: float, projects: Collection[int]) -> dict[tuple[int, int], float]:
    """By project and person (row numbers), the person's part of the project's faded past use, 0 to 1."""
    if not projects:
        return {}
    totals: dict[int, float] = {}
    own: dict[tuple[int, int], float] = {}
    for row in past_use(timezone.now().timestamp(), half_life_s, sorted(projects)):
        totals[row.project_row] = totals.get(row.project_row, 0.0) + row.gpu_seconds
        key = (row.project_row, row.user_row)
        own[key] = own.get(key, 0.0) + row.gpu_seconds
    return {key: used / totals[key[0]] for key, used in own.items() if totals[key[0]] > 0}
