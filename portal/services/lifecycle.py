"""The one writer of job, attempt and task states, and of the allocations that move with them.

Every function runs in the caller's transaction or opens one, locks rows in the order job, attempt, tasks,
GPUs (by id), leaves an event with a reason, and announces the change. A GPU is released on proof only:
``task_gone`` is the one place where an allocation ends.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from django.db import transaction
from django.db.models import Case, F, Value, When
from django.db.models.functions import Coalesce
from django.utils import timezone

from portal.errors import Conflict
from portal.events import announce, announce_all
from portal.models import Allocation, Attempt, Gpu, Job, JobEvent, Node, NodePool, Standing, Task, UsageLedger
from portal.services.moves import attempt_event, job_event, news_of_attempt, news_of_job
from portal.wake import hint_nodes, leave_hint, wake
from portal.words.amounts import memory
from portal.words.ends import END_STATES, GIVEN_BACK, RETRIED
from portal.words.reasons import EndReason, end_sentence
from portal.words.states import (
    ATTEMPT_ENDS,
    ATTEMPT_LIVE,
    JOB_ENDS,
    JOB_LIVE,
    AttemptState,
    Desired,
    JobKind,
    JobState,
    may_move_attempt,
    may_move_job,
)


@dataclass(frozen=True)
class Seat:
    """Where one rank goes: a node, and (GPU row, milli) pairs on it."""

    node: Node
    gpus: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Beginning:
    """A job that gets its GPUs: ``seats`` in rank order, one for each task, and a workspace's sealed secret."""

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
        if len(each.seats) != job.tasks:
            raise ValueError(f"{len(each.seats)} seats for {job.tasks} tasks")
    _take_gpus(share for each in beginnings for seat in each.seats for share in seat.gpus)
    attempts = Attempt.objects.bulk_create(
        Attempt(
            job=each.job,
            number=each.job.attempts_made + 1,
            pool=each.pool,
            leader_epoch=epoch,
            secret=each.secret,
            created_at=now,
        )
        for each in beginnings
    )
    placed = [
        (Task(attempt=attempt, rank=rank, node=seat.node), each.pool, seat.gpus)
        for each, attempt in zip(beginnings, attempts, strict=True)
        for rank, seat in enumerate(each.seats)
    ]
    Task.objects.bulk_create(task for task, _, _ in placed)
    _give(placed, now)
    Standing.objects.filter(job__in=[each.job for each in beginnings]).delete()
    # before the news, for nodes wait and pages do not
    hint_nodes(
        {seat.node.public_id: ("start", each.job.public_id) for each in beginnings for seat in each.seats}
    )
    _set_running(beginnings, attempts, now)
    return attempts


def _take_gpus(shares: Iterable[tuple[int, int]]) -> None:
    """Moves ``used_milli`` by (GPU row, milli) pairs, locked in order; Conflict when one is not healthy."""
    wanted: Counter[int] = Counter()
    for gpu, milli in shares:
        wanted[gpu] += milli
    held = Gpu.objects.select_for_update(no_key=True).filter(pk__in=wanted).order_by("pk").in_bulk()
    by_milli: dict[int, list[int]] = {}
    for gpu, milli in wanted.items():
        row = held.get(gpu)
        if row is None or row.health != "ok" or not row.present:
            raise Conflict(f"GPU {row.uuid if row else gpu} is not healthy.", code="gpu_not_healthy")
        by_milli.setdefault(milli, []).append(gpu)
    for milli, gpus in by_milli.items():
        Gpu.objects.filter(pk__in=gpus).update(used_milli=F("used_milli") + milli)


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


@dataclass(frozen=True)
class Found:
    """A rank that runs already: where, with which GPUs, under which name, since when."""

    rank: int
    seat: Seat
    container: str
    ports: dict[str, int]
    started_at: dt.datetime


def adopt_attempt(job: Job, number: int, found: Sequence[Found], *, actor: str, sentence: str) -> Attempt:
    """Takes an attempt into the record that runs on its nodes and was forgotten by a restore.

    ``job`` must be locked by the caller. Ranks of an attempt that is adopted already join it. The GPUs count
    from now on. Raises Conflict when the job cannot run that attempt any more, or when the record still
    promises one of its GPUs to somebody else (I1).
    """
    now = timezone.now()
    attempt = job.attempts.select_for_update(no_key=True).filter(number=number).first()
    if attempt is None:
        _check_may_adopt(job)
        first = min(found, key=lambda each: each.rank)
        attempt = Attempt.objects.create(
            job=job,
            number=number,
            pool=first.seat.node.pool,
            leader_epoch=0,
            sent_at=now,
            running_at=min(each.started_at for each in found),
            # nobody probes it: what its server would be asked with was in the record that is lost
            ready_at=now if job.kind == JobKind.WORKSPACE.value else None,
        )
        job.attempts_made = max(job.attempts_made, number)
        job.started_at = job.started_at or attempt.running_at
        job.exit_code = None
        Standing.objects.filter(job=job).delete()
        _move_job(job, JobState.RUNNING, reason="kept", sentence=sentence, attempt=attempt, actor=actor)
        _move_attempt(attempt, AttemptState.RUNNING, "kept", sentence, actor)
    elif attempt.state not in ATTEMPT_LIVE:
        raise Conflict(
            f"The record knows that attempt {number} of {job.name} has ended; it can only be stopped.",
            code="attempt_ended",
        )
    _check_free(found)
    for each in sorted(found, key=lambda each: each.rank):
        for gpu, milli in each.seat.gpus:
            Gpu.objects.filter(pk=gpu).update(used_milli=F("used_milli") + milli)
        task = Task.objects.create(
            attempt=attempt,
            rank=each.rank,
            node=each.seat.node,
            container=each.container,
            ports=each.ports,
            running_at=each.started_at,
        )
        _move_task(task, AttemptState.RUNNING)
        _give([(task, attempt.pool, each.seat.gpus)], now)
    return attempt


def skip_attempts(job_id: str, number: int) -> None:
    """Makes the next attempt of a job (public id) come after ``number``, which its node never starts again."""
    Job.objects.filter(public_id=job_id, attempts_made__lt=number).update(
        attempts_made=number, version=F("version") + 1
    )


def task_sent(task: Task) -> bool:
    """Marks that a start command is about to go out; False when the attempt is no longer to be started.

    After a True the node may hold a container, whatever becomes of the answer (law 7).
    """
    with transaction.atomic():
        attempt = Attempt.objects.select_for_update(no_key=True).get(pk=task.attempt_id)
        if attempt.state != AttemptState.CONFIGURING or attempt.stop_wanted_at is not None:
            return False
        if attempt.sent_at is None:
            attempt.sent_at = timezone.now()
            attempt.save(update_fields=["sent_at"])
        return True


def task_running(
    task_id: int, *, container: str, ports: dict[str, int], at: dt.datetime | None = None
) -> None:
    """The node says that the container runs. With the last task of a gang the attempt is RUNNING."""
    now = at or timezone.now()
    with transaction.atomic():
        attempt, tasks = _locked(task_id)
        task = next(row for row in tasks if row.pk == task_id)
        if task.state != AttemptState.CONFIGURING:
            return
        task.container, task.ports, task.running_at, task.problem = container, ports, now, ""
        _move_task(task, AttemptState.RUNNING)
        if attempt.state == AttemptState.CONFIGURING and all(
            row.state == AttemptState.RUNNING for row in tasks
        ):
            attempt.running_at = now
            attempt.save(update_fields=["running_at"])
            _move_attempt(attempt, AttemptState.RUNNING, "started", "Its containers run.")


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
            _event(attempt, "ready", "", "", "ready", "Its server answers; it can be opened.")


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
            if attempt.sent_at is None:
                for task in attempt.task_rows.select_for_update(no_key=True).order_by("pk"):
                    _release(task, "never_started")
                _finish(attempt, attempt.job)


def task_ended(
    task_id: int,
    *,
    exit_code: int | None,
    reason: EndReason,
    sentence: str = "",
    oom: bool = False,
    peak_memory_mib: int | None = None,
    proof: str = "gone",
) -> None:
    """The node proved that a task's container is no more; its GPUs are free, and the gang follows.

    ``reason`` says why when nothing had asked it to stop; ``proof`` is gone, rebooted or fenced.
    """
    with transaction.atomic():
        job = Job.objects.select_for_update(of=("self",), no_key=True).get(attempts__task_rows=task_id)
        attempt, tasks = _locked(task_id)
        task = next(row for row in tasks if row.pk == task_id)
        if task.gone:
            return
        asked = attempt.stop_wanted_at is not None
        task.exit_code, task.oom, task.peak_memory_mib = exit_code, oom, peak_memory_mib
        if task.state in ATTEMPT_LIVE:
            cause = EndReason(attempt.stop_reason) if asked else reason
            task.ended_at = timezone.now()
            _move_task(task, END_STATES[cause])
        _release(task, proof)
        if not asked and reason is not EndReason.FINISHED:
            if exit_code is not None:
                attempt.exit_code = exit_code
                attempt.save(update_fields=["exit_code"])
            facts = {"exit_code": exit_code, "memory": memory(job.memory_mib), "node": task.node.name}
            stop = Stop(attempt.pk, reason, sentence or end_sentence(reason, **facts))
            _want_stops([(attempt, stop)], "")
        if all(row.gone for row in tasks):
            _finish(attempt, job)


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
            _move_job(job, JobState.CANCELLED, reason=reason, sentence=sentence, actor=actor)
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
            _tell(job)
            wake("hold")
        return job


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
    _tell(job)


# -- inside ----------------------------------------------------------------------------------------


def _give(placed: Sequence[tuple[Task, NodePool, Sequence[tuple[int, int]]]], now: dt.datetime) -> None:
    """The allocations of tasks with their ledger rows; ``used_milli`` has moved already."""
    made = [
        (Allocation(task=task, gpu_id=gpu, milli=milli, whole=milli == 1000, started_at=now), pool)
        for task, pool, gpus in placed
        for gpu, milli in gpus
    ]
    Allocation.objects.bulk_create(allocation for allocation, _ in made)
    UsageLedger.objects.bulk_create(
        UsageLedger(
            allocation=allocation,
            project_id=allocation.task.attempt.job.project_id,
            user_id=allocation.task.attempt.job.owner_id,
            pool=pool,
            job=allocation.task.attempt.job,
            milli=allocation.milli,
            started_at=now,
        )
        for allocation, pool in made
    )


def _check_may_adopt(job: Job) -> None:
    if job.state == JobState.PENDING:
        return
    if job.state in JOB_ENDS:
        sentence = (
            f"The record knows that {job.name} has ended ({job.state.lower()}); it can only be stopped."
        )
        raise Conflict(sentence, code="job_ended")
    live = job.attempts.filter(state__in=ATTEMPT_LIVE).first()
    raise Conflict(
        f"The record still holds {'attempt ' + str(live.number) if live else 'another attempt'} of {job.name} "
        "as running. Once the end of that is proved, this one can be kept.",
        code="job_runs",
    )


def _check_free(found: Sequence[Found]) -> None:
    """Locks the GPUs in order and raises Conflict, with who holds it, where one has no room."""
    wanted: dict[int, int] = {}
    for each in found:
        for gpu, milli in each.seat.gpus:
            wanted[gpu] = wanted.get(gpu, 0) + milli
    rows = Gpu.objects.select_for_update(of=("self",), no_key=True).select_related("node").order_by("pk")
    for row in rows.filter(pk__in=wanted):
        if row.used_milli + wanted[row.pk] > 1000:
            held = Allocation.objects.filter(gpu=row, ended_at__isnull=True).select_related(
                "task__attempt__job"
            )
            names = ", ".join(sorted({one.task.attempt.job.name for one in held}))
            raise Conflict(
                f"The record still promises GPU {row.index} of {row.node.name} to {names}. Once the end of that "
                "is proved, or it is cancelled, this one can be kept.",
                code="gpu_taken",
                facts={"gpu": row.uuid, "used_milli": row.used_milli},
            )


def _locked(task_id: int) -> tuple[Attempt, list[Task]]:
    attempt = (
        Attempt.objects.select_for_update(of=("self",), no_key=True)
        .select_related("job")
        .get(task_rows=task_id)
    )
    return attempt, list(
        attempt.task_rows.select_for_update(of=("self",), no_key=True).select_related("node").order_by("pk")
    )


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
            old = _next_state(attempt, AttemptState.COMPLETING)
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


def _release(task: Task, proof: str) -> None:
    """Ends a task's allocations with their proof, and frees the GPUs: the only place that does."""
    now = timezone.now()
    rows = list(task.allocations.filter(ended_at__isnull=True).order_by("gpu_id"))
    list(
        Gpu.objects.select_for_update(no_key=True).filter(pk__in=[row.gpu_id for row in rows]).order_by("pk")
    )
    for row in rows:
        Gpu.objects.filter(pk=row.gpu_id).update(used_milli=F("used_milli") - row.milli)
        row.ended_at, row.proof = now, proof
        row.save(update_fields=["ended_at", "proof"])
        UsageLedger.objects.filter(allocation=row).update(ended_at=now)
    task.gone = True
    task.save(update_fields=["gone"])


def _finish(attempt: Attempt, job: Job) -> None:
    """Ends an attempt whose every task is gone, and decides what becomes of the job."""
    reason = EndReason(attempt.stop_reason) if attempt.stop_reason else EndReason.FINISHED
    state = END_STATES[reason]
    sentence = attempt.sentence or end_sentence(reason)
    for task in attempt.task_rows.select_for_update(no_key=True).order_by("pk"):
        if task.state in ATTEMPT_LIVE:
            task.ended_at = timezone.now()
            _move_task(task, state)
    attempt.ended_at = timezone.now()
    if reason is EndReason.FINISHED:
        attempt.exit_code = 0
    attempt.save(update_fields=["ended_at", "exit_code"])
    _move_attempt(attempt, state, reason.value, sentence, attempt.stop_actor)
    job.exit_code = attempt.exit_code
    after = _job_after(job, attempt, reason, state)
    if after is JobState.PENDING and not sentence.endswith("waits again."):
        sentence = f"{sentence} It waits again."
    _move_job(job, after, reason=reason, sentence=sentence, attempt=attempt, actor=attempt.stop_actor)
    wake("ended")


def _job_after(job: Job, attempt: Attempt, reason: EndReason, state: AttemptState) -> JobState:
    if job.desired == Desired.CANCELLED:
        return JobState.CANCELLED
    if job.desired == Desired.SUSPENDED or state is AttemptState.SUSPENDED:
        return JobState.SUSPENDED
    if job.stub and (reason in GIVEN_BACK or reason in RETRIED):
        return JobState.FAILED  # nobody knows what to start again
    if reason in GIVEN_BACK:
        return JobState.PENDING
    if reason in RETRIED:
        return JobState.PENDING if _tries_used(job) < job.max_attempts else JobState.FAILED
    return {
        AttemptState.COMPLETED: JobState.COMPLETED,
        AttemptState.CANCELLED: JobState.CANCELLED,
        AttemptState.TIMEOUT: JobState.TIMEOUT,
    }.get(state, JobState.FAILED)


def _tries_used(job: Job) -> int:
    """Attempts that count against ``max_attempts``: those that did not give their GPUs back for others."""
    return job.attempts.exclude(
        state__in=[AttemptState.PREEMPTED.value, AttemptState.SUSPENDED.value]
    ).count()


def _move_task(task: Task, to: AttemptState) -> None:
    old = AttemptState(task.state)
    if old is to:
        task.save()
        return
    if not may_move_attempt(old, to):
        raise Conflict(f"A task cannot move from {old} to {to}.", code="illegal_move")
    task.state = to.value
    task.save()


def _next_state(attempt: Attempt, to: AttemptState) -> AttemptState:
    """Sets the state of an attempt, unsaved, and gives the one before. Raises Conflict off the graph."""
    old = AttemptState(attempt.state)
    if not may_move_attempt(old, to):
        raise Conflict(f"An attempt cannot move from {old} to {to}.", code="illegal_move")
    attempt.state = to.value
    return old


def _move_attempt(attempt: Attempt, to: AttemptState, reason: str, sentence: str, actor: str = "") -> None:
    old = _next_state(attempt, to)
    if to in ATTEMPT_ENDS:
        attempt.reason = reason
        attempt.sentence = sentence[:1000]
    attempt.save(update_fields=["state", "reason", "sentence"])
    _event(attempt, "attempt_state", old, to, reason, sentence, actor)


def _move_job(
    job: Job, to: JobState, *, reason: str, sentence: str, attempt: Attempt | None = None, actor: str = ""
) -> None:
    old = JobState(job.state)
    if not may_move_job(old, to):
        raise Conflict(f"A job cannot move from {old} to {to}.", code="illegal_move")
    now = timezone.now()
    job.state, job.reason, job.sentence = to.value, str(reason), sentence[:1000]
    job.version += 1
    if to in JOB_ENDS:
        job.ended_at = now
    elif to is JobState.PENDING:
        job.queued_at = now
    job.save()
    job_event(job, old, attempt, actor).save()
    _tell(job)
    if to in JOB_LIVE and to is not JobState.RUNNING:
        wake("requeue")
    if to in JOB_ENDS and job.next_jobs.exists():
        leave_hint("scheduler.dependents", [], "cycle")


def _event(
    attempt: Attempt, kind: str, before: str, after: str, reason: str, sentence: str, actor: str = ""
) -> None:
    attempt_event(attempt, kind, before, after, reason, sentence, actor).save()
    announce_all([news_of_attempt(attempt, kind, sentence)])


def _tell(job: Job) -> None:
    announce_all(news_of_job(job))
