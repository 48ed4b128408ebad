"""Elastic attempts: adds and evicts tasks while others run.

The rules of ``job_control`` apply: rows are locked in the order job, attempt, tasks, GPUs, every transition
writes an event, and a GPU is released only on proof. Attempt number, epoch and fencing do not change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from django.db import transaction
from django.utils import timezone

from portal.domain.jobs.end_states import END_STATES
from portal.domain.jobs.reasons import EndReason
from portal.domain.states import LIVE_ATTEMPT_STATES, AttemptState, DesiredState, JobState
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict
from portal.live_events import TopicEvent, publish_all_on_commit
from portal.models import Attempt, Job, JobEvent, Task
from portal.outbox import notify_nodes
from portal.services.lifecycle.allocations import release_gpus
from portal.services.lifecycle.attempt_end import (
    bump_job_version,
    is_staying,
    record_lost_tasks,
    survives_without,
    surviving_tasks,
)
from portal.services.lifecycle.job_control import (
    NewTasks,
    RankPlacement,
    StopRequest,
    allocate_placements,
    create_tasks,
    lock_attempts,
    request_stops,
)
from portal.services.lifecycle.job_notices import warn_of_reclaim
from portal.services.lifecycle.rendezvous import join_rendezvous
from portal.services.lifecycle.state_events import attempt_event, attempt_topic_event, record_event
from portal.services.lifecycle.transitions import save_fields, set_task_state

_PREEMPTOR_TEXT = {
    EndReason.PREEMPTED: stored_text("for {job_name}, which has a higher priority"),
    EndReason.RECLAIMED: stored_text("for another project, which reclaims them"),
    EndReason.MIGRATED: stored_text(
        "to move elsewhere so that a job that needs more GPUs together can start"
    ),
}
"""Why tasks are evicted, as the job's users may read it: jobs of other projects are not named."""


# -- scale up ----------------------------------------------------------------------------------------


class ScaleUpSession:
    """Attempts and tasks of running elastic jobs, locked until the transaction ends."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        """Lock the attempts of ``jobs``, which are locked; no query if none is running and elastic."""
        running = [job.pk for job in jobs if job.is_elastic and job.state == JobState.RUNNING]
        self._attempts: dict[int, Attempt] = {}
        self._tasks: dict[int, list[Task]] = defaultdict(list)
        if not running:
            return
        live = Attempt.objects.select_for_update(of=("self",), no_key=True).filter(
            job__in=running, state__in=LIVE_ATTEMPT_STATES
        )
        self._attempts = {
            attempt.job_id: attempt for attempt in live.select_related("pool").order_by("job_id")
        }
        rows = Task.objects.filter(attempt__in=self._attempts.values()).order_by("pk")
        for task in rows:
            self._tasks[task.attempt_id].append(task)

    def scale_up(self, job: Job, placements: Sequence[RankPlacement]) -> NewTasks:
        """Return the tasks to add. Raise Conflict if the attempt does not accept this many."""
        attempt = self._attempts.get(job.pk)
        if (
            attempt is None
            or attempt.state == AttemptState.COMPLETING
            or job.desired_state != DesiredState.RUN
        ):
            raise Conflict("The job is stopping.", code="job_changed")
        attempt.job = job
        tasks = self._tasks[attempt.pk]
        live = sum(not task.container_removed for task in tasks)
        if not survives_without(attempt, job, tasks) or live + len(placements) > job.tasks:
            raise Conflict("The tasks of the job changed after the plan was computed.", code="job_changed")
        return NewTasks(attempt, placements, 1 + max(task.rank for task in tasks), live)


def scale_up_attempts(scale_ups: Sequence[NewTasks]) -> None:
    """Allocate GPUs to the added tasks and start them: all or none.

    ``scale_ups`` must be of different jobs, from a ``ScaleUpSession``. Raise IntegrityError if a GPU is
    already allocated, Conflict if one is not healthy.
    """
    allocate_placements((each.attempt.job, each.placements) for each in scale_ups)
    created = create_tasks(scale_ups, timezone.now())
    join_rendezvous((each.attempt, tasks) for each, tasks in zip(scale_ups, created, strict=True))
    events: list[JobEvent] = []
    news: list[TopicEvent] = []
    for each in scale_ups:
        where = ", ".join(sorted({placement.node.name for placement in each.placements}))
        new_count = each.live_count + len(each.placements)
        message = stored_text(
            f"Scales up from {each.live_count} to {new_count} of {each.attempt.job.tasks} tasks: {where}."
        )
        events.append(attempt_event(each.attempt, "grows", "placed", message))
        news.append(attempt_topic_event(each.attempt, "grows", message))
        bump_job_version(each.attempt.job)
    JobEvent.objects.bulk_create(events)
    publish_all_on_commit(news)


# -- evict tasks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskEviction:
    """Tasks of a running attempt to evict, and why; ``for_job`` gets their GPUs."""

    attempt: int
    ranks: frozenset[int]
    reason: EndReason
    for_job: Job | None = None


def request_task_evictions(evictions: Sequence[TaskEviction], *, actor: str = "") -> list[int]:
    """Evict tasks while the others continue; return the ids of attempts that cannot continue without them.

    The tasks keep their GPUs until their nodes prove that they are gone. Repeatable.
    """
    wanted = {leave.attempt: leave for leave in evictions}
    kept: list[int] = []
    shrunk: list[tuple[Attempt, str, str]] = []
    with transaction.atomic():
        for attempt, mine in lock_attempts(wanted).items():
            leave = wanted.pop(attempt.pk)
            going = [task for task in mine if task.rank in leave.ranks and is_staying(task)]
            if not going or not survives_without(attempt, attempt.job, mine, {task.pk for task in going}):
                kept.append(attempt.pk)
                continue
            before = surviving_tasks(mine)
            beneficiary = (
                _PREEMPTOR_TEXT.get(leave.reason, "")
                .format(job_name=leave.for_job.name if leave.for_job else "")
                .strip()
            )
            count = len(going)
            message = stored_text(
                f"Scales down by {count} of {before} tasks{f' {beneficiary}' if beneficiary else ''}."
            )
            _request_eviction(attempt, going, leave.reason)
            record_event(attempt, "shrinks", leave.reason.value, message, actor)
            shrunk.append((attempt, leave.reason.value, message))
            bump_job_version(attempt.job)
        warn_of_reclaim(shrunk)
    return [*kept, *wanted]


def end_tasks(ids: Iterable[int], reason: EndReason, *, message: str, actor: str = "") -> None:
    """End tasks (ids) that cannot continue: alone if the others can, else with their whole attempt."""
    lost = set(ids)
    with transaction.atomic():
        stops = []
        ids = Task.objects.filter(pk__in=lost).values_list("attempt_id", flat=True)
        for attempt, mine in lock_attempts(ids).items():
            if not survives_without(attempt, attempt.job, mine, lost):
                stops.append(StopRequest(attempt.pk, reason, message))
                continue
            going = [task for task in mine if task.pk in lost and is_staying(task)]
            if going:
                _request_eviction(attempt, going, reason)
                record_lost_tasks(
                    attempt, attempt.job, len(going), surviving_tasks(mine), reason, message, actor
                )
        if stops:
            request_stops(stops, actor=actor)


def _request_eviction(attempt: Attempt, leaving: Sequence[Task], reason: EndReason) -> None:
    """Mark locked tasks as evicted and notify their nodes; a task without a start command is gone at once."""
    now = timezone.now()
    for task in leaving:
        task.eviction_requested_at, task.eviction_reason = now, reason.value
        if attempt.start_sent_at is None:
            task.ended_at = now
            set_task_state(task, END_STATES[reason])
    save_fields(leaving, "eviction_requested_at", "eviction_reason", "ended_at", "state")
    if attempt.start_sent_at is None:
        release_gpus(dict.fromkeys(leaving, "never_started"))
    notify_nodes({task.node.public_id: ("stop", attempt.job.public_id) for task in leaving})
