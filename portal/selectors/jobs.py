"""Reads jobs for people: lists with filters, one job with its attempts, its timeline; fixed query counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import OuterRef, Prefetch, Q, QuerySet, Subquery

from portal.access import Person, visible_jobs
from portal.errors import NotThere
from portal.models import Allocation, Attempt, AttemptEnergy, Job, JobEvent, Task
from portal.words.states import JOB_LIVE, AttemptState, Desired, JobKind, JobState

ROOM_SHOWN = 20
"""At most so many of those who made room for a job are listed."""
CHAIN_SHOWN = 20
"""At most so many of the jobs that start after one are listed, the newest."""
ROW_RELATIONS = ("project", "owner", "pool", "environment", "standing")
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


def jobs_for(person: Person, wanted: JobFilter | None = None) -> QuerySet[Job]:
    """The visible jobs that pass the filter, newest first, with what a row shows already joined."""
    rows = visible_jobs(person).select_related(*ROW_RELATIONS)
    if wanted is None:
        return rows
    if wanted.states:
        rows = rows.filter(state__in=[state.value for state in wanted.states])
    if wanted.kinds:
        rows = rows.filter(kind__in=[kind.value for kind in wanted.kinds])
    if wanted.project:
        rows = rows.filter(Q(project__public_id=wanted.project) | Q(project__name=wanted.project))
    if wanted.owner:
        rows = rows.filter(Q(owner__public_id=wanted.owner) | Q(owner__username=wanted.owner))
    if wanted.pool:
        rows = rows.filter(Q(pool__public_id=wanted.pool) | Q(pool__name=wanted.pool))
    if wanted.search:
        rows = rows.filter(Q(name__icontains=wanted.search) | Q(public_id=wanted.search))
    if wanted.live is not None:
        living = Q(state__in=[state.value for state in JOB_LIVE])
        rows = rows.filter(living if wanted.live else ~living)
    return rows


def job_for(person: Person, public_id: str) -> Job:
    """The job, when the person may see it; NotThere otherwise, whether it exists or not."""
    job = visible_jobs(person).select_related(*ROW_RELATIONS, "template").filter(public_id=public_id).first()
    if job is None:
        raise NotThere("There is no such job.")
    return job


def attempts_of(job: Job) -> list[Attempt]:
    """All attempts, newest first, with pool, progress, energy, meeting, tasks and GPUs; always three queries."""
    allocations = Allocation.objects.select_related("gpu").order_by("gpu__index")
    tasks = Task.objects.select_related("node").prefetch_related(
        Prefetch("allocations", queryset=allocations)
    )
    return list(
        Attempt.objects.filter(job=job)
        .select_related("pool", "progress", "activity", "energy", "rendezvous__node", "stop_for__project")
        .prefetch_related(Prefetch("task_rows", queryset=tasks.order_by("rank")))
        .order_by("-number")
    )


def room_made_for(job: Job) -> list[Attempt]:
    """The attempts of other jobs that were asked to leave for this one, newest first, with job and project."""
    rows = Attempt.objects.filter(stop_for=job).select_related("job__project")
    return list(rows.order_by("-id")[:ROOM_SHOWN])


def seen_around(
    person: Person, attempts: Iterable[Attempt], made: Iterable[Attempt], chain: Chain
) -> set[str]:
    """Of the jobs for which these attempts left, that left for them, or that stand in the chain: whom one may see."""
    left_for = {attempt.stop_for.public_id for attempt in attempts if attempt.stop_for}
    left_for |= {attempt.job.public_id for attempt in made}
    return seen_of(person, left_for | {job.public_id for job in (*chain.before, *chain.after)})


@dataclass(frozen=True)
class Chain:
    """The jobs after which one starts, and the newest that start after it."""

    before: list[Job]
    after: list[Job]


def chain_of(job: Job) -> Chain:
    """What stands before and after a job, with projects: two queries."""
    rows = Job.objects.select_related("project")
    before = list(rows.filter(next_jobs__job=job).order_by("id"))
    return Chain(before, list(rows.filter(dependencies__after=job).order_by("-id")[:CHAIN_SHOWN]))


def events_of(job: Job) -> QuerySet[JobEvent]:
    """The job's timeline, oldest first, with the attempt of each event joined."""
    return JobEvent.objects.filter(job=job).select_related("attempt").order_by("id")


def workspaces_for(person: Person, wanted: JobFilter | None = None) -> QuerySet[Job]:
    """As ``jobs_for``, workspaces only, each with ``ready_since`` and ``suspends_at``.

    When its server answered, and when it is suspended unless somebody uses or keeps it; or None.
    """
    ready = Attempt.objects.filter(
        job=OuterRef("pk"),
        state=AttemptState.RUNNING.value,
        ready_at__isnull=False,
        stop_wanted_at__isnull=True,
        job__desired=Desired.RUN.value,
    )
    rows = jobs_for(person, wanted).filter(kind=JobKind.WORKSPACE.value)
    return rows.annotate(
        ready_since=Subquery(ready.values("ready_at")[:1]),
        suspends_at=Subquery(ready.values("activity__stops_at")[:1]),
    )


def seen_of(person: Person, public_ids: Iterable[str]) -> set[str]:
    """Those of the jobs that the person may see."""
    wanted = list(public_ids)
    if not wanted:
        return set()
    return set(visible_jobs(person).filter(public_id__in=wanted).values_list("public_id", flat=True))


def joules_of(attempt: Attempt) -> float | None:
    """What the GPUs of an attempt used so far; None where none of it was measured. Joined by whoever reads many."""
    try:
        return attempt.energy.joules
    except AttemptEnergy.DoesNotExist:
        return None
