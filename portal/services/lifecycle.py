"""The one writer of job, attempt and task states, and of the allocations that move with them.

Every function runs in the caller's transaction or opens one, locks rows in the order job, attempt, tasks,
GPUs (by id), leaves an event with a reason, and announces the change. It is made of ``steps`` (one step on the
graph), ``holdings`` (GPUs change hands) and ``endings`` (what becomes of the job), which are open to nobody else
but ``adoption``, its twin for attempts that a restored record forgot, ``elastic``, where tasks join and leave, and
``suspending``.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from django.db import transaction
from django.db.models import Case, F, Value, When
from django.db.models.functions import Coalesce
from django.utils import timezone

from portal.errors import Conflict
from portal.events import announce, announce_all
from portal.models import Attempt, Job, JobEvent, Node, NodePool, Rendezvous, Standing, Task
from portal.services import rendezvous
from portal.services.endings import finish_attempt, goes_on_without, note_change, note_lost, staying
from portal.services.holdings import give_gpus, release_gpus, take_gpus
from portal.services.moves import attempt_event, job_event, news_of_attempt, news_of_job
from portal.services.rendezvous import Gathering
from portal.services.rights import denial_of
from portal.services.steps import move_attempt, move_job, move_task, next_state, note_event, tell_job
from portal.wake import hint_nodes, wake
from portal.words.amounts import memory
from portal.words.ends import END_STATES
from portal.words.reasons import EndReason, end_sentence
from portal.words.states import (
    ATTEMPT_LIVE,
    JOB_ENDS,
    AttemptState,
    Desired,
    JobState,
)


@dataclass(frozen=True)
class Seat:
    """Where one rank goes: a node, and (GPU row, milli) pairs on it."""

    node: Node
    gpus: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Beginning:
    """A job that gets its GPUs: ``seats`` in rank order, one for each task, and a workspace's sealed secret.

    An elastic job may begin with fewer seats than it wants, but with no fewer than it needs.
    """

    job: Job
    pool: NodePool
    seats: Sequence[Seat]
    secret: str = ""


@dataclass(frozen=True)
class Stop:
    """An attempt that is to end, and why.

    ``for_job`` is the waiting job that gets its place: the promise stands until that job's next attempt, and
    as long as it waits.
    """

    attempt: int
    reason: EndReason
    sentence: str = ""
    for_job: Job | None = None


_STOP_FIELDS = (
    "state",
    "stop_wanted_at",
    "stop_reason",
    "stop_actor",
    "sentence",
    "stop_for",
    "stop_for_after",
)


# -- start -----------------------------------------------------------------------------------------


def begin_attempt(
    job: Job,
    pool: NodePool,
    seats: Sequence[Seat],
    *,
    epoch: int,
    secret: str = "",
    now: dt.datetime | None = None,
) -> Attempt:
    """``begin_attempts`` for a single job."""
    return begin_attempts([Beginning(job, pool, seats, secret)], epoch=epoch, now=now)[0]


def begin_attempts(
    beginnings: Sequence[Beginning], *, epoch: int, now: dt.datetime | None = None
) -> list[Attempt]:
    """Gives GPUs to PENDING jobs and starts the next attempt of each in CONFIGURING: all of them or none.

    The jobs must be different ones, locked by the caller. Raises IntegrityError when a GPU is already taken
    (the CHECK on ``used_milli`` refuses), Conflict when a job or a GPU moved on. The number of queries does
    not depend on how many they are.
    """
    now = now or timezone.now()
    for each in beginnings:
        job = each.job
        if job.state != JobState.PENDING or job.desired != Desired.RUN or job.held:
            raise Conflict(f"The job is {job.state.lower()}, not waiting.", code="job_moved_on")
        if not job.least_tasks <= len(each.seats) <= job.tasks:
            raise ValueError(f"{len(each.seats)} seats for {job.tasks} tasks")
    take_gpus(
        (gpu, milli, each.job.project_id)
        for each in beginnings
        for seat in each.seats
        for gpu, milli in seat.gpus
    )
    attempts = Attempt.objects.bulk_create(
        Attempt(
            job=each.job,
            number=each.job.attempts_made + 1,
            together=each.job.gang,
            pool=each.pool,
            leader_epoch=epoch,
            secret=each.secret,
            created_at=now,
        )
        for each in beginnings
    )
    placed = [
        (
            Task(
                attempt=attempt,
                rank=rank,
                node=seat.node,
                among=len(each.seats) if each.job.elastic else None,
            ),
            each.pool,
            seat.gpus,
        )
        for each, attempt in zip(beginnings, attempts, strict=True)
        for rank, seat in enumerate(each.seats)
    ]
    Task.objects.bulk_create(task for task, _, _ in placed)
    give_gpus(placed, now)
    rendezvous.meet(
        (attempt, Gathering(each.job, each.pool, [seat.node for seat in each.seats]))
        for each, attempt in zip(beginnings, attempts, strict=True)
    )
    Standing.objects.filter(job__in=[each.job for each in beginnings]).delete()
    # before the news, for nodes wait and pages do not
    hint_nodes(
        {seat.node.public_id: ("start", each.job.public_id) for each in beginnings for seat in each.seats}
    )
    _set_running(beginnings, attempts, now)
    return attempts


def _set_running(beginnings: Sequence[Beginning], attempts: Sequence[Attempt], now: dt.datetime) -> None:
    """PENDING jobs with a new attempt become RUNNING, with their events and news."""
    events, news = [], []
    by_sentence: dict[str, list[int]] = {}
    for each, attempt in zip(beginnings, attempts, strict=True):
        job, where = each.job, ", ".join(sorted({seat.node.name for seat in each.seats}))
        job.state, job.reason = JobState.RUNNING.value, "placed"
        job.sentence = f"Got its GPUs on {where}."[:1000]
        job.version += 1
        job.attempts_made = attempt.number
        job.started_at = job.started_at or now
        job.exit_code = None
        by_sentence.setdefault(job.sentence, []).append(job.pk)
        events.append(job_event(job, JobState.PENDING, attempt))
        events.append(
            attempt_event(
                attempt, "attempt_state", "", AttemptState.CONFIGURING, "placed", f"Starting on {where}."
            )
        )
        news += [*news_of_job(job), news_of_attempt(attempt, "attempt_state", events[-1].sentence)]
    Job.objects.filter(pk__in=[each.job.pk for each in beginnings]).update(
        state=JobState.RUNNING.value,
        reason="placed",
        sentence=Case(*(When(pk__in=jobs, then=Value(text)) for text, jobs in by_sentence.items())),
        version=F("version") + 1,
        attempts_made=F("attempts_made") + 1,
        started_at=Coalesce("started_at", now),
        exit_code=None,
    )
    JobEvent.objects.bulk_create(events)
    announce_all(news)


class NotPermitted(Exception):
    """The owner of a job may not run it any more; nothing of this task was sent."""


def task_sent(task: Task) -> bool:
    """Marks that a start command is about to go out; False when the task is no longer to be started.

    After a True the node may hold a container, whatever becomes of the answer (law 7). Raises NotPermitted when the
    owner of the job has lost a right that it needs. Whoever takes rights away locks the attempt after that
    (``portal.services.rights_changes``), so either this sees the loss, or the attempt counts as running there.
    """
    with transaction.atomic():
        attempt = Attempt.objects.select_for_update(no_key=True).get(pk=task.attempt_id)
        task.refresh_from_db(fields=["state", "leave_wanted_at", "sent_at", "prepared_at"])
        if not is_to_start(task, attempt):
            return False
        if denial := denial_of(Job.objects.get(pk=attempt.job_id)):
            raise NotPermitted(str(denial))
        if attempt.sent_at is None:
            attempt.sent_at = timezone.now()
            attempt.save(update_fields=["sent_at"])
        if attempt.together and task.sent_at is None:
            task.sent_at = timezone.now()
            task.save(update_fields=["sent_at"])
        return True


def is_to_start(task: Task, attempt: Attempt) -> bool:
    """True while a start command may and should go out; a task that joins later starts in a running attempt.

    One that was prepared before others of its gang waits for them.
    """
    begins = not attempt.together or (attempt.prepared_at is not None and not _awaits_first(task, attempt))
    return (
        task.state == AttemptState.CONFIGURING
        and attempt.state in (AttemptState.CONFIGURING, AttemptState.RUNNING)
        and attempt.stop_wanted_at is None
        and task.leave_wanted_at is None
        and (is_to_prepare(task, attempt) or begins)
    )


def _awaits_first(task: Task, attempt: Attempt) -> bool:
    """True while rank 0 has not begun where its node's agent listens in its place.

    Another rank would meet that agent, and take it for rank 0.
    """
    row: Rendezvous | None = getattr(attempt, "rendezvous", None)
    if task.rank == 0 or row is None or row.trying_since is None:
        return False
    return Task.objects.filter(attempt=attempt, rank=0, state=AttemptState.CONFIGURING.value).exists()


def is_to_prepare(task: Task, attempt: Attempt) -> bool:
    """True for a task that its node only makes ready, until all of its gang are."""
    return attempt.together and task.prepared_at is None


def task_prepared(task_id: int) -> None:
    """The node can start the task at once. With the last one of its gang all may begin."""
    with transaction.atomic():
        attempt, tasks = locked(task_id)
        task = next(row for row in tasks if row.pk == task_id)
        if task.prepared_at is not None or not is_to_start(task, attempt):
            return
        task.prepared_at, task.problem = timezone.now(), ""
        task.save(update_fields=["prepared_at", "problem"])
        let_begin(attempt, tasks)


def let_begin(attempt: Attempt, tasks: Sequence[Task]) -> None:
    """Lets a gang begin once each of its tasks is prepared, or runs already (as a restored record may find it).

    First its nodes try whether they reach each other, where that is to be tried.
    """
    if not attempt.together or attempt.prepared_at is not None:
        return
    ready = all(row.prepared_at is not None or row.state != AttemptState.CONFIGURING for row in tasks)
    if ready and not rendezvous.tries_first(attempt, tasks):
        attempt.prepared_at = timezone.now()
        attempt.save(update_fields=["prepared_at"])
        _hint_starts(attempt, tasks)


def _hint_starts(attempt: Attempt, tasks: Iterable[Task]) -> None:
    hint_nodes({row.node.public_id: ("start", attempt.job.public_id) for row in tasks})


def task_running(
    task_id: int, *, container: str, ports: dict[str, int], at: dt.datetime | None = None
) -> None:
    """The node says that the container runs.

    With the last task of a gang the attempt is RUNNING; of an elastic one as soon as it has enough.
    """
    now = at or timezone.now()
    with transaction.atomic():
        attempt, tasks = locked(task_id)
        task = next(row for row in tasks if row.pk == task_id)
        if task.state != AttemptState.CONFIGURING:
            return
        task.container, task.ports, task.running_at, task.problem = container, ports, now, ""
        move_task(task, AttemptState.RUNNING)
        let_begin(attempt, tasks)
        if attempt.together and task.rank == 0:
            _hint_starts(attempt, (row for row in tasks if row.state == AttemptState.CONFIGURING))
        run = sum(row.state == AttemptState.RUNNING for row in tasks)
        if attempt.state == AttemptState.CONFIGURING and run >= attempt.job.least_tasks:
            attempt.running_at = now
            attempt.save(update_fields=["running_at"])
            move_attempt(attempt, AttemptState.RUNNING, "started", "Its containers run.")


def task_problem(task_id: int, sentence: str) -> None:
    """Notes on the task what holds it up; the page shows it while the engine tries on."""
    moved = Task.objects.filter(pk=task_id).exclude(problem=sentence).update(problem=sentence[:1000])
    if moved:
        job = Job.objects.get(attempts__task_rows=task_id)
        announce(f"job.{job.public_id}", {"kind": "task_problem", "sentence": sentence})


def attempt_ready(attempt_id: int) -> None:
    """The workspace's server answered: it may be opened."""
    with transaction.atomic():
        attempt = Attempt.objects.select_for_update(no_key=True).get(pk=attempt_id)
        if attempt.ready_at is None and attempt.state == AttemptState.RUNNING:
            attempt.ready_at = timezone.now()
            attempt.save(update_fields=["ready_at"])
            note_event(attempt, "ready", "", "", "ready", "Its server answers; it can be opened.")


# -- stop ------------------------------------------------------------------------------------------


def want_stop(attempt_id: int, reason: EndReason, *, actor: str = "", sentence: str = "") -> None:
    """``want_stops`` for a single attempt."""
    want_stops([Stop(attempt_id, reason, sentence)], actor=actor)


def want_stops(stops: Sequence[Stop], *, actor: str = "") -> None:
    """Asks that attempts end, all of them together; the first reason of each stays. Repeatable.

    Where no start command ever went out an attempt ends at once; otherwise it is COMPLETING until each node
    has said that its container is gone.
    """
    wanted = {stop.attempt: stop for stop in stops}
    with transaction.atomic():
        jobs = Job.objects.select_for_update(of=("self",), no_key=True).filter(
            pk__in=Attempt.objects.filter(pk__in=wanted).values("job_id")
        )
        by_id = {job.pk: job for job in jobs.select_related("owner", "project").order_by("pk")}
        live = list(
            Attempt.objects.select_for_update(no_key=True)
            .filter(pk__in=wanted, state__in=[state.value for state in ATTEMPT_LIVE])
            .order_by("job_id")
        )
        for attempt in live:
            attempt.job = by_id[attempt.job_id]
        _want_stops([(attempt, wanted[attempt.pk]) for attempt in live], actor)
        for attempt in live:
            if attempt.sent_at is None or attempt.together:
                tasks = list(attempt.task_rows.select_for_update(no_key=True).order_by("pk"))
                _release_unsent(attempt, tasks)
                if all(task.gone for task in tasks):
                    finish_attempt(attempt, attempt.job)


def task_ended(
    task_id: int,
    *,
    exit_code: int | None,
    reason: EndReason,
    sentence: str = "",
    oom: bool = False,
    peak_memory_mib: int | None = None,
    proof: str = "gone",
    facts: Mapping[str, object] | None = None,
) -> bool:
    """The node proved that a task's container is no more; its GPUs are free, and the gang follows.

    ``reason`` says why when nothing had asked it to stop, with ``facts`` for its message; ``proof`` is gone,
    rebooted or fenced. True when this is news and the task failed by itself.
    """
    with transaction.atomic():
        job = Job.objects.select_for_update(of=("self",), no_key=True).get(attempts__task_rows=task_id)
        attempt, tasks = locked(task_id)
        task = next(row for row in tasks if row.pk == task_id)
        if task.gone:
            return False
        asked, leaves = attempt.stop_wanted_at is not None, task.leave_wanted_at is not None
        failed = not asked and not leaves and reason is not EndReason.FINISHED
        task.exit_code, task.oom, task.peak_memory_mib = exit_code, oom, peak_memory_mib
        if task.state in ATTEMPT_LIVE:
            cause = EndReason(attempt.stop_reason or task.leave_reason) if asked or leaves else reason
            task.ended_at = timezone.now()
            move_task(task, END_STATES[cause])
        release_gpus(task, proof)
        if leaves:
            note_change(job)
        elif failed:
            known = {"exit_code": exit_code, "memory": memory(job.memory_mib), "node": task.node.name}
            sentence = sentence or end_sentence(reason, **known, **(facts or {}))
            if goes_on_without(attempt, job, tasks):
                note_lost(attempt, job, 1, staying(tasks), reason, sentence)
            else:
                if exit_code is not None:
                    attempt.exit_code = exit_code
                    attempt.save(update_fields=["exit_code"])
                _want_stops([(attempt, Stop(attempt.pk, reason, sentence))], "")
                _release_unsent(attempt, tasks)
        if all(row.gone for row in tasks):
            finish_attempt(attempt, job)
        return failed


# -- job level -------------------------------------------------------------------------------------


def cancel(job_id: int, reason: EndReason, *, actor: str, sentence: str = "") -> Job:
    """Cancels a job: at once when it holds nothing, else once its nodes let go. Ended jobs stay."""
    with transaction.atomic():
        job = Job.objects.select_for_update(no_key=True).get(pk=job_id)
        if job.state in JOB_ENDS or job.desired == Desired.CANCELLED:
            return job
        job.desired = Desired.CANCELLED.value
        job.version += 1
        job.save(update_fields=["desired", "version"])
        sentence = sentence or end_sentence(reason, actor=actor)
        attempt = (
            Attempt.objects.select_for_update(no_key=True).filter(job=job, state__in=ATTEMPT_LIVE).first()
        )
        if attempt is None:
            Standing.objects.filter(job=job).delete()
            move_job(job, JobState.CANCELLED, reason=reason, sentence=sentence, actor=actor)
        else:
            want_stop(attempt.pk, reason, actor=actor, sentence=sentence)
        job.refresh_from_db()
        return job


def set_held(job_id: int, held: bool, *, actor: str) -> Job:
    """Holds a job back from starting, or lets it go; what runs keeps running."""
    with transaction.atomic():
        job = Job.objects.select_for_update(no_key=True).get(pk=job_id)
        if job.state in JOB_ENDS:
            raise Conflict(f"The job has already ended: {job.state.lower()}.", code="job_ended")
        if job.held != held:
            job.held = held
            job.version += 1
            job.save(update_fields=["held", "version"])
            JobEvent.objects.create(
                job=job,
                kind="held" if held else "released",
                actor=actor,
                sentence=f"Held by {actor}." if held else f"Released by {actor}.",
            )
            tell_job(job)
            wake("hold")
        return job


def hold_jobs(sentences: Mapping[int, str], *, actor: str) -> None:
    """Holds many jobs back from starting, each with the sentence of its event; those that are held stay so."""
    with transaction.atomic():
        rows = Job.objects.select_for_update(no_key=True).filter(pk__in=sentences, held=False)
        jobs = list(rows.exclude(state__in=[state.value for state in JOB_ENDS]).order_by("pk"))
        for job in jobs:
            job.held, job.version = True, job.version + 1
        Job.objects.bulk_update(jobs, ["held", "version"], batch_size=1000)
        JobEvent.objects.bulk_create(
            JobEvent(job=job, kind="held", actor=actor, sentence=sentences[job.pk][:1000]) for job in jobs
        )
        announce_all([news for job in jobs for news in news_of_job(job)])
        wake("hold")


def note_submitted(job: Job, *, actor: str) -> None:
    """The first event of a job, in the transaction that inserts it."""
    JobEvent.objects.create(
        job=job,
        kind="submitted",
        after=JobState.PENDING.value,
        actor=actor,
        sentence=f"Submitted by {actor}.",
    )
    wake("submit")
    tell_job(job)


# -- inside ----------------------------------------------------------------------------------------


def locked(task_id: int) -> tuple[Attempt, list[Task]]:
    """The attempt of a task with its job, and all its tasks with their nodes, locked until the transaction ends."""
    attempt = (
        Attempt.objects.select_for_update(of=("self",), no_key=True)
        .select_related("job")
        .get(task_rows=task_id)
    )
    return attempt, list(
        attempt.task_rows.select_for_update(of=("self",), no_key=True).select_related("node").order_by("pk")
    )


def _release_unsent(attempt: Attempt, tasks: Sequence[Task]) -> None:
    """Frees what an attempt that ends holds for tasks of which no node was ever told."""
    for task in tasks:
        told = task.sent_at if attempt.together else attempt.sent_at
        if told is None and not task.gone:
            release_gpus(task, "never_started")


def _want_stops(stops: Sequence[tuple[Attempt, Stop]], actor: str) -> None:
    """Writes the reasons of locked attempts that were not asked yet, and tells the nodes of all of them."""
    asked, events, news = [], [], []
    for attempt, stop in stops:
        if attempt.stop_wanted_at is not None:
            continue
        asked.append(attempt)
        attempt.stop_wanted_at = timezone.now()
        attempt.stop_reason = stop.reason.value
        attempt.stop_actor = actor
        attempt.sentence = (stop.sentence or end_sentence(stop.reason, actor=actor))[:1000]
        attempt.stop_for = stop.for_job
        attempt.stop_for_after = stop.for_job.attempts_made if stop.for_job else None
        if attempt.sent_at is not None:
            old = next_state(attempt, AttemptState.COMPLETING)
            events.append(
                attempt_event(
                    attempt, "attempt_state", old, attempt.state, attempt.stop_reason, attempt.sentence, actor
                )
            )
            news.append(news_of_attempt(attempt, "attempt_state", attempt.sentence))
    if asked:
        Attempt.objects.bulk_update(asked, _STOP_FIELDS)
        JobEvent.objects.bulk_create(events)
        announce_all(news)
    jobs = {attempt.pk: attempt.job.public_id for attempt, _ in stops}
    nodes = Task.objects.filter(attempt__in=jobs, gone=False).values_list("node__public_id", "attempt_id")
    hint_nodes({node: ("stop", jobs[attempt]) for node, attempt in nodes})
