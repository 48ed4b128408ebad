"""Elastic attempts: tasks join while others run, and leave while others go on.

A chapter of ``lifecycle`` with its rules: rows are locked in the order job, attempt, tasks, GPUs, every move leaves
an event, and a GPU is released on proof only. The number of the attempt, its epoch and its fencing stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from django.db import transaction
from django.utils import timezone

from portal.errors import Conflict
from portal.events import News, announce_all
from portal.models import Attempt, Job, JobEvent, Task
from portal.services.endings import goes_on_without, note_change, note_lost, staying
from portal.services.holdings import give_gpus, release_gpus, take_gpus
from portal.services.lifecycle import Seat, Stop, want_stops
from portal.services.moves import attempt_event, news_of_attempt
from portal.services.steps import move_task, note_event
from portal.wake import hint_nodes
from portal.words.ends import END_STATES
from portal.words.reasons import EndReason
from portal.words.states import ATTEMPT_LIVE, AttemptState, Desired, JobState

_LIVE = [state.value for state in ATTEMPT_LIVE]
_FOR_WHOM = {
    EndReason.PREEMPTED: "for {job}, which has a higher priority",
    EndReason.RECLAIMED: "for another project, to which they are owed",
    EndReason.CONSOLIDATED: "to stand elsewhere, so that a job that needs more room together can start",
}
"""Why tasks leave, for the job's own people; who they are in another project is not theirs to know."""


# -- tasks that join ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """Tasks that join a running attempt: ``seats`` for the numbers from ``first`` on, beside ``live`` others."""

    job: Job
    attempt: Attempt
    seats: Sequence[Seat]
    first: int
    live: int


class Growing:
    """The attempts of running elastic jobs and how far they are, locked until the transaction ends."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        """``jobs`` are locked by the caller; no query where none of them runs and is elastic."""
        running = [job.pk for job in jobs if job.elastic and job.state == JobState.RUNNING]
        self._attempts: dict[int, Attempt] = {}
        self._tasks: dict[int, list[Task]] = defaultdict(list)
        if not running:
            return
        live = Attempt.objects.select_for_update(of=("self",), no_key=True).filter(
            job__in=running, state__in=_LIVE
        )
        self._attempts = {
            attempt.job_id: attempt for attempt in live.select_related("pool").order_by("job_id")
        }
        rows = Task.objects.filter(attempt__in=self._attempts.values()).order_by("pk")
        for task in rows:
            self._tasks[task.attempt_id].append(task)

    def growth(self, job: Job, seats: Sequence[Seat]) -> Growth:
        """What ``seats`` make of a running job; Conflict when its attempt takes no more tasks, or not so many."""
        attempt = self._attempts.get(job.pk)
        if attempt is None or attempt.state == AttemptState.COMPLETING or job.desired != Desired.RUN:
            raise Conflict("The job is about to end.", code="job_moved_on")
        attempt.job = job
        tasks = self._tasks[attempt.pk]
        live = sum(not task.gone for task in tasks)
        if not goes_on_without(attempt, job, tasks) or live + len(seats) > job.tasks:
            raise Conflict("The tasks of the job changed after the plan was made.", code="job_moved_on")
        return Growth(job, attempt, seats, 1 + max(task.rank for task in tasks), live)


def grow_attempts(growths: Sequence[Growth]) -> None:
    """Gives GPUs to tasks that join, and lets them start: all of ``growths`` or none.

    Of different jobs, as ``Growing`` found them. Raises IntegrityError when a GPU is already taken, Conflict
    when one is not healthy.
    """
    now = timezone.now()
    take_gpus(
        (gpu, milli, each.attempt.job.project_id)
        for each in growths
        for seat in each.seats
        for gpu, milli in seat.gpus
    )
    placed = [
        (
            Task(
                attempt=each.attempt,
                rank=each.first + number,
                node=seat.node,
                among=each.live + len(each.seats),
            ),
            each.attempt.pool,
            seat.gpus,
        )
        for each in growths
        for number, seat in enumerate(each.seats)
    ]
    Task.objects.bulk_create(task for task, _, _ in placed)
    give_gpus(placed, now)
    hint_nodes(
        {seat.node.public_id: ("start", each.job.public_id) for each in growths for seat in each.seats}
    )
    events: list[JobEvent] = []
    news: list[News] = []
    for each in growths:
        where = ", ".join(sorted({seat.node.name for seat in each.seats}))
        sentence = (
            f"Grows from {each.live} to {each.live + len(each.seats)} of {each.job.tasks} tasks: {where}."
        )
        events.append(attempt_event(each.attempt, "grows", "", "", "placed", sentence))
        news.append(news_of_attempt(each.attempt, "grows", sentence))
        note_change(each.job)
    JobEvent.objects.bulk_create(events)
    announce_all(news)


# -- tasks that leave --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leave:
    """Tasks of a running attempt that are to leave, and why; ``for_job`` gets their place."""

    attempt: int
    ranks: frozenset[int]
    reason: EndReason
    for_job: Job | None = None


def want_leaves(leaves: Sequence[Leave], *, actor: str = "") -> list[int]:
    """Asks tasks to leave while the others go on; gives the attempts that cannot spare them (any more).

    They keep their GPUs until their nodes say that they are gone. Repeatable: who was asked is not asked again.
    """
    wanted = {leave.attempt: leave for leave in leaves}
    kept: list[int] = []
    with transaction.atomic():
        live, tasks = _locked(wanted)
        for attempt in live:
            leave, mine = wanted.pop(attempt.pk), tasks[attempt.pk]
            going = [
                task
                for task in mine
                if task.rank in leave.ranks and task.state in ATTEMPT_LIVE and task.leave_wanted_at is None
            ]
            if not going or not goes_on_without(attempt, attempt.job, mine, {task.pk for task in going}):
                kept.append(attempt.pk)
                continue
            before = staying(mine)
            for_whom = _FOR_WHOM.get(leave.reason, "").format(job=leave.for_job.name if leave.for_job else "")
            sentence = f"Gives {len(going)} of {before} tasks back {for_whom}".strip() + "."
            _ask(attempt, going, leave.reason)
            note_event(attempt, "shrinks", "", "", leave.reason.value, sentence, actor)
            note_change(attempt.job)
    return [*kept, *wanted]


def end_tasks(ids: Iterable[int], reason: EndReason, *, sentence: str, actor: str = "") -> None:
    """Ends tasks (row numbers) that cannot go on: alone where the others can, else their whole attempts."""
    lost = set(ids)
    with transaction.atomic():
        live, tasks = _locked(Task.objects.filter(pk__in=lost).values_list("attempt_id", flat=True))
        stops = []
        for attempt in live:
            mine = tasks[attempt.pk]
            if not goes_on_without(attempt, attempt.job, mine, lost):
                stops.append(Stop(attempt.pk, reason, sentence))
                continue
            going = [
                task
                for task in mine
                if task.pk in lost and task.state in ATTEMPT_LIVE and task.leave_wanted_at is None
            ]
            if going:
                _ask(attempt, going, reason)
                note_lost(attempt, attempt.job, len(going), staying(mine), reason, sentence, actor)
        if stops:
            want_stops(stops, actor=actor)


def _locked(attempts: Iterable[int]) -> tuple[list[Attempt], dict[int, list[Task]]]:
    """Those of the attempts (row numbers) that live, with their jobs and tasks, all locked in order."""
    wanted = list(attempts)
    jobs = Job.objects.select_for_update(of=("self",), no_key=True).filter(attempts__in=wanted)
    by_id = {job.pk: job for job in jobs.select_related("owner", "project").order_by("pk")}
    live = list(
        Attempt.objects.select_for_update(no_key=True)
        .filter(pk__in=wanted, state__in=_LIVE)
        .order_by("job_id")
    )
    tasks: dict[int, list[Task]] = defaultdict(list)
    rows = Task.objects.select_for_update(of=("self",), no_key=True).select_related("node")
    for task in rows.filter(attempt__in=live).order_by("pk"):
        tasks[task.attempt_id].append(task)
    for attempt in live:
        attempt.job = by_id[attempt.job_id]
    return live, tasks


def _ask(attempt: Attempt, going: Sequence[Task], reason: EndReason) -> None:
    """Marks locked tasks as leaving and tells their nodes; where no start ever went out they are gone at once."""
    for task in going:
        task.leave_wanted_at, task.leave_reason = timezone.now(), reason.value
        if attempt.sent_at is None:
            task.ended_at = timezone.now()
            move_task(task, END_STATES[reason])
            release_gpus(task, "never_started")
    Task.objects.bulk_update(going, ["leave_wanted_at", "leave_reason"])
    hint_nodes({task.node.public_id: ("stop", attempt.job.public_id) for task in going})
