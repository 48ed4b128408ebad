"""Reads jobs: filtered lists, one job with its attempts, its timeline; fixed numbers of queries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import Count, Exists, OuterRef, Prefetch, Q, QuerySet, Subquery, Sum
from django.utils.translation import gettext as _

from portal.access import Requester, visible_jobs
from portal.domain.states import LIVE_JOB_STATES, AttemptState, DesiredState, JobKind, JobState
from portal.errors import NotFound
from portal.models import Allocation, Attempt, AttemptGpuDay, Job, JobEvent, Task
from portal.selectors.lookup import get_first, matches_key

MAX_PREEMPTED_SHOWN = 20
"""Maximum number of jobs listed as preempted for a job."""
MAX_DEPENDENTS_SHOWN = 20
"""Maximum number of dependents listed, newest first."""
ROW_RELATIONS = ("project", "owner", "pool", "environment", "verdict", "annotation")
"""Relations shown in a row: joined, so that a list is one query."""


@dataclass(frozen=True)
class JobFilter:
    """Filters of a job list; projects and owners by public id or name."""

    states: tuple[JobState, ...] = ()
    kinds: tuple[JobKind, ...] = ()
    project: str = ""
    owner: str = ""
    pool: str = ""
    search: str = ""
    tag: str = ""
    sweep: str = ""
    live: bool | None = None


def list_jobs(requester: Requester, filters: JobFilter | None = None) -> QuerySet[Job]:
    """Return the visible jobs that match the filter, newest first, with the relations of a row joined."""
    rows = visible_jobs(requester).select_related(*ROW_RELATIONS)
    if filters is None:
        return rows
    if filters.states:
        rows = rows.filter(state__in=[state.value for state in filters.states])
    if filters.kinds:
        rows = rows.filter(kind__in=[kind.value for kind in filters.kinds])
    if filters.project:
        rows = rows.filter(matches_key(filters.project, "project"))
    if filters.owner:
        rows = rows.filter(matches_key(filters.owner, "owner", name="username"))
    if filters.pool:
        rows = rows.filter(matches_key(filters.pool, "pool"))
    if filters.search:
        rows = rows.filter(Q(name__icontains=filters.search) | Q(public_id=filters.search))
    if filters.tag:
        rows = rows.filter(annotation__tags__contains=[filters.tag])
    if filters.sweep:
        rows = rows.filter(trial__sweep__public_id=filters.sweep)
    if filters.live is not None:
        living = Q(state__in=[state.value for state in LIVE_JOB_STATES])
        rows = rows.filter(living if filters.live else ~living)
    return rows


def one_row_per_sweep(rows: QuerySet[Job]) -> QuerySet[Job]:
    """Return the jobs without a sweep, and the newest of the jobs of each sweep."""
    newer = rows.filter(trial__sweep=OuterRef("trial__sweep"), pk__gt=OuterRef("pk"))
    return rows.filter(~Exists(newer))


def count_by_state(rows: QuerySet[Job], sweeps: Iterable[int]) -> dict[int, dict[JobState, int]]:
    """Return the number of jobs by state of each of the sweeps (ids)."""
    found: dict[int, dict[JobState, int]] = {}
    counted = rows.select_related(None).order_by().filter(trial__sweep__in=list(sweeps))
    for sweep, state, number in counted.values_list("trial__sweep", "state").annotate(number=Count("pk")):
        found.setdefault(sweep, {})[JobState(state)] = number
    return found


def get_job(requester: Requester, public_id: str) -> Job:
    """Return the job. Raise NotFound if it does not exist or the user may not see it."""
    rows = visible_jobs(requester).select_related(*ROW_RELATIONS, "template")
    return get_first(rows.filter(public_id=public_id), _("There is no such job."))


def get_jobs(requester: Requester, public_ids: Iterable[str]) -> list[Job]:
    """Return the jobs in the given order, each once. Raise NotFound if the user may not see one of them."""
    wanted = list(dict.fromkeys(public_ids))
    rows = visible_jobs(requester).select_related(*ROW_RELATIONS, "template")
    found = {job.public_id: job for job in rows.filter(public_id__in=wanted)}
    if missing := next((one for one in wanted if one not in found), None):
        raise NotFound(_("There is no job {missing}, or you may not see it.").format(missing=missing[:16]))
    return [found[one] for one in wanted]


_ENERGY_JOULES = Subquery(
    AttemptGpuDay.objects.filter(attempt=OuterRef("pk"))
    .order_by()
    .values("attempt")
    .annotate(joules=Sum("joules"))
    .values("joules")
)


def list_attempts(job: Job) -> list[Attempt]:
    """Return all attempts, newest first, with everything that a job page shows, in three queries."""
    allocations = Allocation.objects.select_related("gpu").order_by("gpu__index")
    tasks = Task.objects.select_related("node").prefetch_related(
        Prefetch("allocations", queryset=allocations)
    )
    return list(
        job.attempts.select_related(
            "pool",
            "progress",
            "activity",
            "observation",
            "work",
            "rendezvous__node",
            "preempted_for__project",
        )
        .annotate(energy_joules=_ENERGY_JOULES)
        .prefetch_related(Prefetch("task_rows", queryset=tasks.order_by("rank")))
        .order_by("-number")
    )


def get_attempt(job: Job, number: int | None = None) -> Attempt:
    """Return an attempt of the job, by default the newest, with its rendezvous. Raise NotFound."""
    rows = Attempt.objects.filter(job=job).select_related("job", "pool", "rendezvous").order_by("-number")
    found = (rows if number is None else rows.filter(number=number)).first()
    if found is None:
        raise NotFound(_("There is no such attempt, or nothing has been placed yet."), code="no_such_attempt")
    return found


def attempts_preempted_for(job: Job) -> list[Attempt]:
    """Return the attempts of other jobs preempted for this one, newest first, with job and project."""
    rows = Attempt.objects.filter(preempted_for=job).select_related("job__project")
    return list(rows.order_by("-id")[:MAX_PREEMPTED_SHOWN])


def visible_related_jobs(
    requester: Requester, attempts: Iterable[Attempt], made: Iterable[Attempt], chain: DependencyChain
) -> set[str]:
    """Return the public ids of preempting, preempted and dependent jobs that the user may see."""
    left_for = {attempt.preempted_for.public_id for attempt in attempts if attempt.preempted_for}
    left_for |= {attempt.job.public_id for attempt in made}
    return visible_job_ids(
        requester, left_for | {job.public_id for job in (*chain.dependencies, *chain.dependents)}
    )


@dataclass(frozen=True)
class DependencyChain:
    dependencies: list[Job]
    dependents: list[Job]


def dependency_chain(job: Job) -> DependencyChain:
    """Return dependencies and dependents of a job, with projects, in two queries."""
    rows = Job.objects.select_related("project")
    before = list(rows.filter(dependents__job=job).order_by("id"))
    return DependencyChain(
        before, list(rows.filter(dependencies__depends_on=job).order_by("-id")[:MAX_DEPENDENTS_SHOWN])
    )


def job_events(job: Job) -> QuerySet[JobEvent]:
    """Return the job's timeline, oldest first, with the attempt of each event joined."""
    return JobEvent.objects.filter(job=job).select_related("attempt").order_by("id")


def list_workspaces(requester: Requester, filters: JobFilter | None = None) -> QuerySet[Job]:
    """As ``list_jobs``, workspaces only, each with ``ready_since`` and ``suspends_at``.

    These are the time its server answered and the time of its idle suspension, or None.
    """
    ready = Attempt.objects.filter(
        job=OuterRef("pk"),
        state=AttemptState.RUNNING.value,
        ready_at__isnull=False,
        stop_requested_at__isnull=True,
        job__desired_state=DesiredState.RUN.value,
    )
    rows = list_jobs(requester, filters).filter(kind=JobKind.WORKSPACE.value)
    return rows.annotate(
        ready_since=Subquery(ready.values("ready_at")[:1]),
        suspends_at=Subquery(ready.values("activity__suspend_at")[:1]),
    )


def visible_job_ids(requester: Requester, public_ids: Iterable[str]) -> set[str]:
    """Return those of the public ids whose jobs the user may see."""
    wanted = list(public_ids)
    if not wanted:
        return set()
    return set(visible_jobs(requester).filter(public_id__in=wanted).values_list("public_id", flat=True))


def attempt_energy_joules(attempt: Attempt) -> float | None:
    """Return the energy of the GPUs of an attempt of ``list_attempts`` so far, or None if not measured."""
    joules: float | None = attempt.__dict__["energy_joules"]
    return joules
