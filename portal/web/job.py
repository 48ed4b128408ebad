"""One job: where it stands, why it waits or failed, where it runs, what happened, and what can be done."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from portal.access import Policy, Verb, can, policy, signed_in
from portal.models import Attempt, Job, JobEvent, Rendezvous, Task, User
from portal.selectors.cluster import Square, square_of
from portal.selectors.idle import idleness_of
from portal.selectors.jobs import (
    attempts_of,
    chain_of,
    events_of,
    job_for,
    jobs_for,
    room_made_for,
    seen_around,
)
from portal.selectors.progress import layouts_compared, progress_of
from portal.selectors.receipts import receipts_for
from portal.services import workspaces
from portal.services.jobs import do_cancel_job, do_hold_job, do_resume_job, do_start_again, do_suspend_job
from portal.visibility import private_fields
from portal.web.failure import failure_of
from portal.web.idle_words import idle_rule
from portal.web.job_row import STATE_LOOKS, JobRow, numbers_of, rows_of, standing_of
from portal.web.job_time import time_limit_of
from portal.web.receipt import sums_of
from portal.web.when import when_of
from portal.web.words import duration
from portal.words.fabric import place
from portal.words.sent_signals import SIGNALS
from portal.words.states import ATTEMPT_LIVE, AttemptState, JobState

NEWEST_EVENTS = 60


@dataclass(frozen=True)
class Phase:
    """One stretch of the bar: its name, how long it took, and whether it is now, to come, or where it broke."""

    name: str
    note: str
    weight: float
    now: bool = False
    todo: bool = False
    bad: bool = False
    start: dt.datetime | None = None


@dataclass(frozen=True)
class OtherJob:
    """Another job that had to do with this one; ``job`` is None where the viewer may not see it."""

    job: Job | None

    @classmethod
    def of(cls, job: Job, seen: set[str]) -> OtherJob:
        """The job, if it is among those the viewer may see."""
        return cls(job if job.public_id in seen else None)


@dataclass(frozen=True)
class ChainedJob:
    """A job before or after this one: its name and where it stands, for those who may see it."""

    job: Job | None
    look: str
    word: str

    @classmethod
    def of(cls, job: Job, seen: set[str]) -> ChainedJob:
        """With the shape and the word of its state."""
        look, word = STATE_LOOKS[JobState(job.state)]
        return cls(job if job.public_id in seen else None, look, word)


@policy(Policy.SIGNED_IN)
@require_safe
def job(request: HttpRequest, public_id: str) -> HttpResponse:
    """The overview, or its live parts for htmx; ``shown`` is the attempt whose charts and log stand there."""
    user = signed_in(request.user)
    row = job_for(user, public_id)
    template = "job/live.html" if request.htmx else "job/overview.html"  # type: ignore[attr-defined]
    context = overview(user, row) | {"tab": "overview"}
    shown = request.GET.get("shown", "")
    return render(request, template, context | {"other_attempt": shown != str(row.attempts_made)})


def overview(user: User, found: Job) -> dict[str, Any]:
    """What the overview shows; a fixed number of queries."""
    context = heading(user, found)
    attempts: list[Attempt] = context["attempts"]
    last = attempts[0] if attempts else None
    row: JobRow = context["row"]
    standing = standing_of(found)
    room_made = room_made_for(found)
    chain = chain_of(found)
    seen = seen_around(user, attempts[:1], room_made, chain)
    events = list(events_of(found).order_by("-id")[:NEWEST_EVENTS])
    idle = idleness_of(found, last)
    waits_for = standing if found.state == JobState.PENDING and not found.held else None
    return context | {
        "phases": phases_of(row, last),
        "standing": waits_for,
        "when": when_of(user, found, waits_for) if waits_for else None,
        "sums": sums_of(receipts_for(user, found)) if waits_for else [],
        "numbers": numbers_of(standing) if standing else [],
        "ahead": _ahead(user, found),
        "left_for": OtherJob.of(last.stop_for, seen) if last and last.stop_for else None,
        "room_made": [(one, OtherJob.of(one.job, seen)) for one in room_made],
        "before": [ChainedJob.of(one, seen) for one in chain.before],
        "after": [ChainedJob.of(one, seen) for one in chain.after],
        "failure": failure_of(found, last),
        "limit": time_limit_of(user, row, last),
        "idle": idle,
        "idle_rule": idle_rule(idle.ruled) if idle else None,
        "may_cut": bool(idle and idle.excuse) and can(user, Verb.MANAGE, found.project),
        "told": progress_of(last) if last else None,
        "layouts": layouts_compared(found),
        "places": places_of(last),
        "events": without_echoes(events),
        "last_task": _telling_task(last),
        "meeting": meeting_words(last) if found.gang else "",
    }


def meeting_words(attempt: Attempt | None) -> str:
    """Where the ranks of an attempt meet; blank while nothing is placed."""
    if attempt is None:
        return ""
    row: Rendezvous | None = getattr(attempt, "rendezvous", None)
    if row is None:
        return "its tasks cannot reach each other from node to node"
    where = f"its tasks meet at {place(row.address, row.port)} ({row.node.name})"
    if row.network:
        return f"{row.network}, which its pool names; {where}"
    if not row.node_network:
        return f"its tasks meet on {row.node.name}"
    return f"that of its nodes; {where}"


def heading(user: User, found: Job) -> dict[str, Any]:
    """What the head of every tab of a job shows."""
    row = rows_of(user, [found])[0]
    attempts = attempts_of(found)
    may_read_logs = can(user, Verb.READ_LOGS, found)
    enters = not row.ended and can(user, Verb.ENTER, found)
    return {
        "job": found,
        "row": row,
        "attempts": attempts,
        "last": attempts[0] if attempts else None,
        "may_control": row.may_control,
        "signals": SIGNALS.items(),
        "may_enter": row.is_workspace and enters,
        "may_type": enters and found.state == JobState.RUNNING,
        "may_read_logs": may_read_logs,
        "tries": len(attempts),
    }


def phases_of(row: JobRow, last: Attempt | None) -> list[Phase]:
    """How long each stretch of the newest attempt took."""
    job, now = row.job, timezone.now()
    waits = row.job.state == JobState.PENDING
    begun = None if waits else (last.created_at if last else None)
    queued_from = (
        job.queued_at if waits or last is None or job.queued_at <= last.created_at else job.submitted_at
    )
    queued = _span("Waiting", queued_from, begun or (job.ended_at if row.ended else None), now)
    ahead = ["Starting", "Server", "Open"] if row.is_workspace else ["Starting", "Running"]
    if begun is None or last is None:
        return [queued, *([] if row.ended else _to_come(ahead))]
    ended = last.ended_at
    bad = AttemptState(last.state) in {
        AttemptState.FAILED,
        AttemptState.OUT_OF_MEMORY,
        AttemptState.NODE_FAIL,
        AttemptState.TIMEOUT,
    }
    starting = _span("Starting", begun, last.running_at or ended, now, bad=bad and last.running_at is None)
    if last.running_at is None:
        return [queued, starting, *([] if ended else _to_come(ahead[1:]))]
    if not row.is_workspace:
        return [queued, starting, _span("Running", last.running_at, ended, now, bad=bad)]
    server = _span("Server", last.running_at, last.ready_at or ended, now, bad=bad and last.ready_at is None)
    if last.ready_at is None:
        return [queued, starting, server, *([] if ended else _to_come(ahead[2:]))]
    return [queued, starting, server, _span("Open", last.ready_at, ended, now, bad=bad)]


def _span(
    name: str, start: dt.datetime, end: dt.datetime | None, now: dt.datetime, *, bad: bool = False
) -> Phase:
    seconds = max(0.0, ((end or now) - start).total_seconds())
    weight = min(6.0, 1.0 + seconds**0.25 / 2)
    return Phase(name, duration(seconds), round(weight, 2), now=end is None, bad=bad, start=start)


def _to_come(names: list[str]) -> list[Phase]:
    """Stretches that nobody knows the length of yet; the last is what the job is for."""
    return [Phase(name, "to come", 3 if name == names[-1] else 1, todo=True) for name in names]


def without_echoes(events: list[JobEvent]) -> list[JobEvent]:
    """Newest first, a sentence once: an end is told by the rank, the attempt and the job alike."""
    kept: list[JobEvent] = []
    for event in events:
        if not kept or not event.sentence or kept[-1].sentence != event.sentence:
            kept.append(event)
    return kept


@dataclass(frozen=True)
class Place:
    """One rank: its node, its GPUs as squares, and what its container says."""

    task: Task
    squares: list[Square]
    label: str


def places_of(attempt: Attempt | None) -> list[Place]:
    """Where the ranks of an attempt run or ran."""
    if attempt is None:
        return []
    live = AttemptState(attempt.state) in ATTEMPT_LIVE
    starting = attempt.state == AttemptState.CONFIGURING
    places = []
    for task in attempt.task_rows.all():
        gpus = [allocation.gpu for allocation in task.allocations.all()]
        squares = [
            square_of(gpu, task.node, starting=starting)
            if live
            else Square(gpu.uuid, "free", None, "", f"GPU {gpu.index}")
            for gpu in gpus
        ]
        label = f"rank {task.rank}: {len(gpus)} of the GPUs of {task.node.name}"
        places.append(Place(task, squares if live else [], label))
    return places


def _ahead(user: User, found: Job) -> list[JobRow]:
    standing = standing_of(found)
    if standing is None or found.state != JobState.PENDING or not standing.ahead:
        return []
    visible = {row.public_id: row for row in jobs_for(user).filter(public_id__in=standing.ahead[:10])}
    return rows_of(user, [visible[name] for name in standing.ahead[:10] if name in visible])


def _telling_task(attempt: Attempt | None) -> Task | None:
    """The rank whose log tells most: the one that failed first, else rank 0."""
    if attempt is None:
        return None
    tasks = list(attempt.task_rows.all())
    failed = [task for task in tasks if task.exit_code or task.oom]
    failed.sort(key=lambda task: (task.ended_at or timezone.now(), task.rank))
    return failed[0] if failed else (tasks[0] if tasks else None)


@policy(Policy.SIGNED_IN)
@require_safe
def run(request: HttpRequest, public_id: str) -> HttpResponse:
    """Environment and configuration: everything the job was asked to be, and each attempt."""
    user = signed_in(request.user)
    found = job_for(user, public_id)
    shown = {
        "tab": "run",
        "request_rows": request_rows(found),
        **private_fields(user, found)._asdict(),
    }
    return render(request, "job/run.html", heading(user, found) | shown)


def request_rows(found: Job) -> list[tuple[str, str]]:
    """The request, field by field, in the words of the API."""
    fields = (
        "tasks",
        "min_tasks",
        "gpus_per_task",
        "milli_per_gpu",
        "gpu_model",
        "min_gpu_memory_mib",
        "mig_profile",
        "min_compute_capability",
        "near",
        "cpu_milli",
        "memory_mib",
        "shm_mib",
        "priority",
        "preemptible",
        "time_limit_s",
        "stop_grace_s",
        "max_attempts",
        "retry_failures",
        "launcher",
    )
    return [
        (
            name,
            "none" if value in (None, "") else json.dumps(value) if isinstance(value, dict) else str(value),
        )
        for name in fields
        for value in [getattr(found, name)]
    ]


# -- acts --------------------------------------------------------------------------------------------


@policy(Policy.SIGNED_IN)
@require_POST
def cancel(request: HttpRequest, public_id: str) -> HttpResponse:
    """Stops it."""
    user = signed_in(request.user)
    found = do_cancel_job(user, job_for(user, public_id))
    ended = found.state == JobState.CANCELLED
    messages.success(
        request,
        f"{found.name} is stopped."
        if ended
        else f"{found.name} is stopping; its GPUs are free once its node says so.",
    )
    return redirect("job", public_id=public_id)


@policy(Policy.SIGNED_IN)
@require_POST
def hold(request: HttpRequest, public_id: str) -> HttpResponse:
    """Holds a waiting job back, or lets it go."""
    user = signed_in(request.user)
    held = request.POST.get("held") == "1"
    do_hold_job(user, job_for(user, public_id), held)
    return redirect("job", public_id=public_id)


@policy(Policy.SIGNED_IN)
@require_POST
def suspend(request: HttpRequest, public_id: str) -> HttpResponse:
    """Gives its GPUs back and keeps the rest."""
    user = signed_in(request.user)
    found = do_suspend_job(user, job_for(user, public_id))
    gone = found.state == JobState.SUSPENDED
    messages.success(
        request,
        f"{found.name} is suspended."
        if gone
        else f"{found.name} is being suspended; its GPUs are free once its node says so.",
    )
    return redirect("job", public_id=public_id)


@policy(Policy.SIGNED_IN)
@require_POST
def resume(request: HttpRequest, public_id: str) -> HttpResponse:
    """Puts it back into the queue."""
    user = signed_in(request.user)
    found = do_resume_job(user, job_for(user, public_id))
    messages.success(request, f"{found.name} waits for its GPUs again.")
    return redirect("job", public_id=public_id)


@policy(Policy.SIGNED_IN)
@require_POST
def again(request: HttpRequest, public_id: str) -> HttpResponse:
    """Starts the same request anew."""
    user = signed_in(request.user)
    fresh = do_start_again(user, job_for(user, public_id))
    messages.success(request, f"{fresh.name} is submitted again.")
    return redirect("job", public_id=fresh.public_id)


@policy(Policy.SIGNED_IN)
@require_POST
def open_workspace(request: HttpRequest, public_id: str) -> HttpResponse:
    """Answers with a page that posts a single-use ticket to the workspace's own origin."""
    user = signed_in(request.user)
    found = job_for(user, public_id)
    address, ticket = workspaces.do_open_workspace(user, found, request.session.session_key or "")
    response = render(request, "job/open.html", {"job": found, "address": address, "ticket": ticket})
    response.headers["Referrer-Policy"] = workspaces.HANDOVER_REFERRER_POLICY
    return response
