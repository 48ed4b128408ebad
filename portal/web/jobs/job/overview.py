"""The overview of a job: status, verdict or failure, placement, history and actions."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.access import AccessPolicy, Permission, can, job_permissions, live_share
from portal.domain.jobs.job_spec import job_fields
from portal.domain.jobs.phases import Phase
from portal.domain.jobs.roles import ranks_of_role
from portal.domain.jobs.scaling import point_of
from portal.domain.jobs.signals import SIGNALS
from portal.domain.nodes.gang_fabric import format_endpoint
from portal.domain.requests.user_requests import RequestState
from portal.domain.states import (
    FAILED_ATTEMPT_STATES,
    LIVE_ATTEMPT_STATES,
    AttemptState,
    GpuState,
    JobKind,
    JobState,
)
from portal.hidden_fields import private_fields
from portal.models import (
    Attempt,
    EnvironmentRecord,
    Job,
    JobEvent,
    Rendezvous,
    Task,
    User,
    UserRequest,
)
from portal.selectors.cluster.cluster_overview import GpuSquare, build_square, free_gpu_rows
from portal.selectors.jobs.checkpoints import last_checkpoint, loss_now, stalled_since
from portal.selectors.jobs.failure_rules import identified_failure
from portal.selectors.jobs.idle import idle_status
from portal.selectors.jobs.jobs import (
    attempts_preempted_for,
    dependency_chain,
    get_attempt,
    get_job,
    job_events,
    list_attempts,
    list_jobs,
    visible_related_jobs,
)
from portal.selectors.jobs.phases import attempt_phases, pending_phases
from portal.selectors.jobs.progress import attempt_progress, compare_job_layouts, measure_program
from portal.selectors.jobs.reruns import rerun_relations
from portal.selectors.jobs.time_limits import extension_allowance_s, job_extensions, warning_lead_s
from portal.selectors.scheduling.fair_share_breakdown import list_breakdowns
from portal.selectors.scheduling.settings import effective_pool_settings
from portal.selectors.serving.model_servers import service_of_job
from portal.services.jobs.changes import applicable_suggestion, change_refusal
from portal.services.jobs.launching import attempt_ranks
from portal.services.jobs.notebooks import find_notebook_run
from portal.services.jobs.reruns import checked_out_commit, compare_with_source
from portal.services.jobs.time_limits import MIN_EXTENSION_S
from portal.stored_texts import translate_stored
from portal.web.display.formatting import duration
from portal.web.display.idle_text import idle_rule_text
from portal.web.display.job_rows import (
    STATE_DISPLAY,
    JobRow,
    current_verdict,
    job_rows,
    nodes_by_free,
    verdict_details,
)
from portal.web.jobs.job.failure import build_failure_summary
from portal.web.jobs.job.fair_share_breakdown import fair_share_texts, needed_milli
from portal.web.jobs.job.forecast_display import build_forecast_display
from portal.web.views import page, render_live

TIMELINE_EVENTS = 60
SHOWN_RANKS = 16
SHOWN_JOBS_AHEAD = 10
BREAKDOWN_DETAILS = ("used_gpus", "fair_share_gpus")
"""Of a verdict: what the fair-share breakdown beside it shows."""
EXTENSION_CHOICES_S = (1800, 3600, 4 * 3600, 12 * 3600, 24 * 3600)


@dataclass(frozen=True)
class JobPhase:
    """One phase of the bar: name, duration, and whether it is current, upcoming or failed."""

    name: str
    duration_text: str
    weight: float
    is_current: bool = False
    is_upcoming: bool = False
    is_failed: bool = False
    start: dt.datetime | None = None


@dataclass(frozen=True)
class RelatedJob:
    """A related job with its state; ``job`` is None where the viewer may not see it."""

    job: Job | None
    icon: str
    label: str

    @classmethod
    def visible_to(cls, job: Job, visible_ids: set[str]) -> RelatedJob:
        return cls(job if job.public_id in visible_ids else None, *STATE_DISPLAY[JobState(job.state)])


@page(AccessPolicy.SIGNED_IN)
def job(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Render the overview, or its live parts for htmx; ``shown`` is the attempt that the browser displays.

    ``sooner``: the browser displays the changes with which it would start sooner.
    """
    row = get_job(user, public_id)
    context = overview_context(user, row) | {
        "tab": "overview",
        "other_attempt": request.GET.get("shown", "") != str(row.attempt_count),
    }
    context["other_alternatives"] = ("sooner" in request.GET) != context["may_apply_changes"]
    return render_live(request, "jobs/job/overview.html", "jobs/job/live.html", context)


def overview_context(user: User, found: Job) -> dict[str, Any]:
    """Return the context of the overview in a fixed number of queries."""
    context = job_page_context(user, found)
    attempts: list[Attempt] = context["attempts"]
    last = attempts[0] if attempts else None
    row: JobRow = context["row"]
    verdict = current_verdict(found)
    preempted_jobs = attempts_preempted_for(found)
    chain = dependency_chain(found)
    visible = visible_related_jobs(user, attempts[:1], preempted_jobs, chain)
    events = list(job_events(found).order_by("-id")[:TIMELINE_EVENTS])
    idle = idle_status(found, last)
    measured = measure_program(found)
    saved = last_checkpoint(last) if last and found.kind == JobKind.TRAINING.value else None
    waits_for = verdict if found.state == JobState.PENDING and not found.held else None
    suggestion = applicable_suggestion(found, waits_for)
    breakdowns = (
        fair_share_texts(list_breakdowns(user, found), needed_milli(found, waits_for)) if waits_for else []
    )
    return context | {
        "phases": job_phases(row, last),
        "verdict": waits_for,
        "may_apply_suggestion": row.may_control and bool(suggestion),
        "suggestion_json": json.dumps(suggestion),
        "may_apply_changes": row.may_control and waits_for is not None and not change_refusal(found),
        "forecast": build_forecast_display(user, found, waits_for) if waits_for else None,
        "breakdowns": breakdowns,
        "verdict_details": verdict_details(verdict, BREAKDOWN_DETAILS if breakdowns else ())
        if verdict
        else [],
        "nodes_by_free": free_gpu_rows(nodes_by_free(waits_for)) if waits_for else [],
        "jobs_ahead": _jobs_ahead(user, found),
        "jobs_ahead_count": max(verdict.details.get("jobs_ahead", 0), len(verdict.jobs_ahead))
        if verdict
        else 0,
        "preempted_for": RelatedJob.visible_to(last.preempted_for, visible)
        if last and last.preempted_for
        else None,
        "preempted_jobs": [(one, RelatedJob.visible_to(one.job, visible)) for one in preempted_jobs],
        "dependencies": [RelatedJob.visible_to(one, visible) for one in chain.dependencies],
        "dependents": [RelatedJob.visible_to(one, visible) for one in chain.dependents],
        "failure": build_failure_summary(found, last, identified_failure(user, found, last)),
        "limit": job_time_limit(user, row, last),
        "idle": idle,
        "idle_rule": idle_rule_text(idle.settings_sheet, idle.kind) if idle else None,
        "may_revoke": bool(idle and idle.exemption) and can(user, Permission.MANAGE, found.project),
        "progress": attempt_progress(last) if last else None,
        "saved": saved,
        "loss": loss_now(found, last, saved.at if saved else None) if row.may_lose_work else None,
        "stalled_at": stalled_since(last) if last else None,
        "service": service_of_job(user, found) if found.kind == JobKind.SERVICE.value else None,
        "notebook": find_notebook_run(user, found),
        "layouts": compare_job_layouts(found),
        "scaling": measured.points,
        "scale_point": point_of(measured.points, found.total_gpus),
        "launcher_rates": measured.launchers,
        "task_rows": task_rows(last),
        "events": dedupe_events(events),
        "default_log_task": _default_log_task(last),
        "rendezvous": rendezvous_text(last) if found.is_gang else "",
    }


@dataclass(frozen=True)
class JobTimeLimit:
    ends_at: dt.datetime
    ends_soon: bool
    """True when users are warned of the deadline."""
    extensible_s: int
    """Seconds that members may still add."""
    requests: list[UserRequest]
    """Requests for more time, newest first."""
    may_decide: bool

    @property
    def pending_request(self) -> UserRequest | None:
        return next((one for one in self.requests if one.state == RequestState.OPEN), None)

    @property
    def choices(self) -> list[int]:
        """Extensions to offer, in seconds."""
        return [each for each in EXTENSION_CHOICES_S if each <= self.extensible_s] or (
            [self.extensible_s] if self.extensible_s >= MIN_EXTENSION_S else []
        )


def job_time_limit(user: User, row: JobRow, last: Attempt | None) -> JobTimeLimit | None:
    """Return the time limit of a running job; None where there is none."""
    if row.deadline is None or last is None or row.stopping or last.state != AttemptState.RUNNING:
        return None
    settings = effective_pool_settings([last.pool])[last.pool_id]
    lead_s = warning_lead_s(row.job.time_limit_s or 0, float(settings["time_limit_warning_s"]))
    requests = job_extensions(row.job)
    return JobTimeLimit(
        ends_at=row.deadline,
        ends_soon=(row.deadline - timezone.now()).total_seconds() <= lead_s,
        extensible_s=extension_allowance_s(row.job, float(settings["max_extension_s"])),
        requests=requests,
        may_decide=any(
            one.state == RequestState.OPEN and can(user, Permission.CHANGE, one) for one in requests
        ),
    )


def rendezvous_text(attempt: Attempt | None) -> str:
    """Return the rendezvous address of an attempt; blank before placement."""
    if attempt is None:
        return ""
    row: Rendezvous | None = getattr(attempt, "rendezvous", None)
    if row is None:
        return _("its tasks cannot reach each other across nodes")
    where = _("rendezvous at {endpoint} ({name})").format(
        endpoint=format_endpoint(row.address, row.port), name=row.node.name
    )
    if row.network:
        return _("{network}, set for its pool; {where}").format(network=row.network, where=where)
    if not row.node_network:
        return _("rendezvous on {name}").format(name=row.node.name)
    return _("host network; {where}").format(where=where)


def job_page_context(user: User, found: Job) -> dict[str, Any]:
    """Return the context of the header on every tab of a job."""
    row = job_rows(user, [found])[0]
    attempts = list_attempts(found)
    permissions = job_permissions(user, found)
    enters = not row.ended and Permission.ENTER in permissions
    return {
        "job": found,
        "row": row,
        "attempts": attempts,
        "last": attempts[0] if attempts else None,
        "may_control": row.may_control,
        "signals": SIGNALS.items(),
        "may_enter": row.is_workspace and enters,
        "may_visit": row.is_workspace
        and (enters or (not row.ended and found.owner_id != user.pk and live_share(user, found) is not None)),
        "may_type": enters and found.state == JobState.RUNNING,
        "may_read_logs": Permission.READ_LOGS in permissions,
        "may_read_files": Permission.READ_FILES in permissions,
        "attempt_count": len(attempts),
        "role_ranks": [
            (role.name, ",".join(map(str, ranks_of_role(found.job_roles, role.name))))
            for role in found.job_roles
        ],
    }


PHASE_NAMES = {
    Phase.QUEUED: gettext_noop("Queued"),
    Phase.RESERVED: gettext_noop("Reserved"),
    Phase.PULLING: gettext_noop("Image"),
    Phase.STARTING: gettext_noop("Starting"),
    Phase.STAGING: gettext_noop("Code"),
    Phase.SERVER: gettext_noop("Server"),
    Phase.RUNNING: gettext_noop("Running"),
}


def job_phases(row: JobRow, last: Attempt | None) -> list[JobPhase]:
    """Return the durations of the newest attempt's phases."""
    job, now = row.job, timezone.now()
    attempt = None if job.state == JobState.PENDING else last
    spans = attempt_phases(attempt) if attempt else pending_phases(job)
    reached = [span for span in spans if span.started_at is not None]
    failed = attempt is not None and AttemptState(attempt.state) in FAILED_ATTEMPT_STATES
    phases = [
        _phase(
            _(PHASE_NAMES[span.phase]),
            span.started_at,
            span.ended_at,
            now,
            bad=failed and span is reached[-1],
        )
        for span in reached
        if span.started_at is not None
    ]
    if reached[-1].ended_at is None:
        phases += _upcoming_phases([_(PHASE_NAMES[span.phase]) for span in spans if span.started_at is None])
    return phases


def _phase(
    name: str, start: dt.datetime, end: dt.datetime | None, now: dt.datetime, *, bad: bool = False
) -> JobPhase:
    seconds = max(0.0, ((end or now) - start).total_seconds())
    weight = min(6.0, 1.0 + seconds**0.25 / 2)
    return JobPhase(
        name, duration(seconds), round(weight, 2), is_current=end is None, is_failed=bad, start=start
    )


def _upcoming_phases(names: list[str]) -> list[JobPhase]:
    """Return phases of unknown duration; the last one is the run itself."""
    return [JobPhase(name, _("upcoming"), 3 if name == names[-1] else 1, is_upcoming=True) for name in names]


def dedupe_events(events: list[JobEvent]) -> list[JobEvent]:
    """Return events newest first; of the rank, the attempt and the job that report the same, only one."""
    kept: list[JobEvent] = []
    for event in events:
        last = kept[-1] if kept and event.message else None
        if last is None or (last.message, last.attempt_id) != (event.message, event.attempt_id):
            kept.append(event)
    return kept


@dataclass(frozen=True)
class TaskRow:
    """One rank: node, GPUs as squares, container state."""

    task: Task
    squares: list[GpuSquare]
    label: str


def task_rows(attempt: Attempt | None) -> list[TaskRow]:
    if attempt is None:
        return []
    live = AttemptState(attempt.state) in LIVE_ATTEMPT_STATES
    starting = attempt.state == AttemptState.CONFIGURING
    places = []
    for task in attempt.task_rows.all():
        gpus = [allocation.gpu for allocation in task.allocations.all()]
        squares = [
            build_square(gpu, task.node, state=GpuState.HELD.value, starting=starting)
            if live
            else GpuSquare(gpu.uuid, "free", None, "", f"GPU {gpu.index}")
            for gpu in gpus
        ]
        label = _("{label}: {count} of the GPUs of {name}").format(
            label=translate_stored(task.label), count=len(gpus), name=task.node.name
        )
        places.append(TaskRow(task, squares if live else [], label))
    return places


def _jobs_ahead(user: User, found: Job) -> list[tuple[int, JobRow]]:
    """Return the visible jobs among the first ahead of it, with their positions among these."""
    verdict = current_verdict(found)
    if verdict is None or found.state != JobState.PENDING or not verdict.jobs_ahead:
        return []
    first = verdict.jobs_ahead[:SHOWN_JOBS_AHEAD]
    visible = {row.public_id: row for row in list_jobs(user).filter(public_id__in=first)}
    rows = job_rows(user, [visible[name] for name in first if name in visible])
    return [(first.index(row.job.public_id) + 1, row) for row in rows]


def _default_log_task(attempt: Attempt | None) -> Task | None:
    """Return the rank with the most useful log: the first that failed, else rank 0."""
    if attempt is None:
        return None
    tasks = list(attempt.task_rows.all())
    # a cancelled task was stopped because others ended
    failed = [task for task in tasks if (task.exit_code or task.oom) and task.state != AttemptState.CANCELLED]
    failed.sort(key=lambda task: (task.ended_at or timezone.now(), task.rank))
    return failed[0] if failed else (tasks[0] if tasks else None)


@page(AccessPolicy.SIGNED_IN)
def request_page(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Show environment and configuration: the request, and each attempt."""
    found = get_job(user, public_id)
    context = job_page_context(user, found)
    last: Attempt | None = context["last"]
    ranks = []
    if last is not None and context["may_control"] and found.kind != JobKind.WORKSPACE.value:
        ranks = attempt_ranks(get_attempt(found, last.number), 0, SHOWN_RANKS)
    shown = {
        "tab": "run",
        "request_rows": request_rows(found),
        "ranks": ranks,
        **private_fields(user, found)._asdict(),
        "record": EnvironmentRecord.objects.filter(job=found).first(),
        "commit": checked_out_commit(found),
        "repetition": rerun_relations(found),
        "differences": compare_with_source(found),
    }
    return render(request, "jobs/job/request.html", context | shown)


SHOWN_ELSEWHERE = {
    "name", "kind", "command", "env", "rank_overrides", "volumes", "secrets", "held", "ignore_dependency_failure",
    "roles", "program", "parameters", "template_version",
}  # fmt: skip
"""Fields of the request that other parts of the job's pages show."""


def _request_text(value: Any) -> str:
    if isinstance(value, dt.datetime):
        return f"{value.astimezone(dt.UTC):%Y-%m-%d %H:%M} UTC"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value in (None, "") else json.dumps(value) if isinstance(value, dict) else str(value)


def request_rows(found: Job) -> list[tuple[str, str]]:
    return [
        (
            name,
            _request_text(value),
        )
        for name in job_fields()
        if name not in SHOWN_ELSEWHERE
        for value in [getattr(found, name)]
    ]
