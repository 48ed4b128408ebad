"""Reads jobs for people: lists with filters, one job with its attempts, its timeline; fixed query counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import OuterRef, Prefetch, Q, QuerySet, Subquery

from portal.access import Requester, visible_jobs
from portal.domain.states import LIVE_JOB_STATES, AttemptState, DesiredState, JobKind, JobState
from portal.errors import NotFound
from portal.models import Allocation, Attempt, AttemptEnergy, Job, JobEvent, Task

MAX_PREEMPTED_SHOWN = 20
"""At most so many of those who made room for a job are listed."""
MAX_DEPENDENTS_SHOWN = 20
"""At most so many of the jobs that start after one are listed, the newest."""
ROW_RELATIONS = ("project", "owner", "pool", "environment", "verdict")
"""What a row of a list shows besides its own columns: joined, so that a list is one query."""


@dataclass(frozen=True)
class JobFilter:
    """What a list of jobs is narrowed to; projects and owners by public id or by name."""

    states: tuple[JobState, ...] = ()
    kinds: tuple[JobKind, ...] = ()
    project: str = ""
    owner: str = ""
    pool: str = ""
    search: str = ""
    live: bool | None = None


def list_jobs(requester: Requester, filters: JobFilter | None = None) -> QuerySet[Job]:
    """The visible jobs that pass the filter, newest first, with what a row shows already joined."""
    rows = visible_jobs(requester).select_related(*ROW_RELATIONS)
    if filters is None:
        return rows
    if filters.states:
        rows = rows.filter(state__in=[state.value for state in filters.states])
    if filters.kinds:
        rows = rows.filter(kind__in=[kind.value for kind in filters.kinds])
    if filters.project:
        rows = rows.filter(Q(project__public_id=filters.project) | Q(project__name=filters.project))
    if filters.owner:
        rows = rows.filter(Q(owner__public_id=filters.owner) | Q(owner__username=filters.owner))
    if filters.pool:
        rows = rows.filter(Q(pool__public_id=filters.pool) | Q(pool__name=filters.pool))
    if filters.search:
        rows = rows.filter(Q(name__icontains=filters.search) | Q(public_id=filters.search))
    if filters.live is not None:
        living = Q(state__in=[state.value for state in LIVE_JOB_STATES])
        rows = rows.filter(living if filters.live else ~living)
    return rows


def get_job(requester: Requester, public_id: str) -> Job:
    """The job, when the person may see it; NotThere otherwise, whether it exists or not."""
    job = (
        visible_jobs(requester).select_related(*ROW_RELATIONS, "template").filter(public_id=public_id).first()
    )
    if job is None:
        raise NotFound("There is no such job.")
    return job


def list_attempts(job: Job) -> list[Attempt]:
    """All attempts, newest first, with pool, progress, energy, meeting, tasks and GPUs; always three queries."""
    allocations = Allocation.objects.select_related("gpu").order_by("gpu__index")
    tasks = Task.objects.select_related("node").prefetch_related(
        Prefetch("allocations", queryset=allocations)
    )
    return list(
        Attempt.objects.filter(job=job)
        .select_related(
            "pool", "progress", "activity", "energy", "rendezvous__node", "preempted_for__project"
        )
        .prefetch_related(Prefetch("task_rows", queryset=tasks.order_by("rank")))
        .order_by("-number")
    )


def attempts_preempted_for(job: Job) -> list[Attempt]:
    """The attempts of other jobs that were asked to leave for this one, newest first, with job and project."""
    rows = Attempt.objects.filter(preempted_for=job).select_related("job__project")
    return list(rows.order_by("-id")[:MAX_PREEMPTED_SHOWN])


def visible_related_jobs(
    requester: Requester, attempts: Iterable[Attempt], made: Iterable[Attempt], chain: DependencyChain
) -> set[str]:
    """Of the jobs for which these attempts left, that left for them, or that stand in the chain: whom one may see."""
    left_for = {attempt.preempted_for.public_id for attempt in attempts if attempt.preempted_for}
    left_for |= {attempt.job.public_id for attempt in made}
    return visible_job_ids(
        requester, left_for | {job.public_id for job in (*chain.dependencies, *chain.dependents)}
    )


@dataclass(frozen=True)
class DependencyChain:
    """The jobs after which one starts, and the newest that start after it."""

    dependencies: list[Job]
    dependents: list[Job]


def dependency_chain(job: Job) -> DependencyChain:
    """What stands before and after a job, with projects: two queries."""
    rows = Job.objects.select_related("project")
    before = list(rows.filter(dependents__job=job).order_by("id"))
    return DependencyChain(
        before, list(rows.filter(dependencies__depends_on=job).order_by("-id")[:MAX_DEPENDENTS_SHOWN])
    )


def job_events(job: Job) -> QuerySet[JobEvent]:
    """The job's timeline, oldest first, with the attempt of each event joined."""
    return JobEvent.objects.filter(job=job).select_related("attempt").order_by("id")


def list_workspaces(requester: Requester, filters: JobFilter | None = None) -> QuerySet[Job]:
    """As ``jobs_for``, workspaces only, each with ``ready_since`` and ``suspends_at``.

    When its server answered, and when it is suspended unless somebody uses or keeps it; or None.
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
    """Those of the jobs that the person may see."""
    wanted = list(public_ids)
    if not wanted:
        return set()
    return set(visible_jobs(requester).filter(public_id__in=wanted).values_list("public_id", flat=True))


def attempt_energy_joules(attempt: Attempt) -> float | None:
    """What the GPUs of an attempt used so far; None where none of it was measured. Joined by whoever reads many."""
    try:
        return attempt.energy.joules
    except AttemptEnergy.DoesNotExist:
        return None
