"""A job for display: state icon and label, summary, GPUs and time."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext, pgettext

from portal.access import Permission, permitted_job_ids
from portal.domain.formatting import short_gpu_model
from portal.domain.jobs.reasons import VerdictCode
from portal.domain.states import (
    LIVE_ATTEMPT_STATES,
    TERMINAL_JOB_STATES,
    AttemptState,
    DesiredState,
    JobKind,
    JobState,
)
from portal.models import Attempt, AttemptActivity, Gpu, Job, JobEvent, JobVerdict, Task, User
from portal.selectors.jobs.idle import attempt_activity
from portal.selectors.jobs.phases import run_time_s
from portal.selectors.jobs.time_limits import ends_at
from portal.web.display.formatting import NBSP, duration, gpu_amount, memory, no_gpu, plural

VERDICT_LABELS: dict[str, str] = {
    VerdictCode.PROJECT_LIMIT: gettext_noop("Project limit"),
    VerdictCode.WAITING_FOR_EVICTION: gettext_noop("Waiting for eviction"),
    VerdictCode.BEGIN_TIME: gettext_noop("Scheduled"),
    VerdictCode.RESERVED_FOR_OTHER_JOB: gettext_noop("Reserved"),
    VerdictCode.DEPENDENCY: gettext_noop("Dependency"),
    VerdictCode.USER_LIMIT: gettext_noop("At the user's limit"),
    VerdictCode.UNSATISFIABLE: gettext_noop("Cannot start"),
    VerdictCode.OWNER_NOT_PERMITTED: gettext_noop("Not permitted"),
    VerdictCode.INVALID_DATA: gettext_noop("Invalid data"),
}
"""Of verdicts that a list of jobs names instead of "Waiting"."""
END_STATE_DISPLAY = {
    JobState.COMPLETED: ("done", gettext_noop("Completed")),
    JobState.FAILED: ("failed", gettext_noop("Failed")),
    JobState.CANCELLED: ("stopped", gettext_noop("Stopped")),
    JobState.TIMEOUT: ("warning", gettext_noop("Time is up")),
}


STATE_DISPLAY = END_STATE_DISPLAY | {
    JobState.PENDING: ("waiting", gettext_noop("Waiting")),
    JobState.RUNNING: ("running", gettext_noop("Running")),
    JobState.SUSPENDED: ("stopped", gettext_noop("Suspended")),
}
"""Icon and label of a state where nothing else of the job is known."""
STATE_LABELS: dict[str, str] = {state.value: label for state, (_icon, label) in STATE_DISPLAY.items()} | {
    AttemptState.CONFIGURING.value: gettext_noop("Starting"),
    AttemptState.COMPLETING.value: gettext_noop("Stopping"),
    AttemptState.NODE_FAIL.value: gettext_noop("Node failed"),
    AttemptState.PREEMPTED.value: gettext_noop("Preempted"),
    AttemptState.OUT_OF_MEMORY.value: gettext_noop("Out of memory"),
}
"""Labels of the states of jobs, attempts and tasks."""

ATTEMPT_ICONS = {
    AttemptState.CONFIGURING: "starting",
    AttemptState.RUNNING: "running",
    AttemptState.COMPLETING: "starting",
    AttemptState.COMPLETED: "done",
    AttemptState.FAILED: "failed",
    AttemptState.OUT_OF_MEMORY: "failed",
    AttemptState.NODE_FAIL: "failed",
    AttemptState.TIMEOUT: "warning",
}
"""Icons of the states of attempts and tasks; the others are "stopped"."""


_TERMINAL_STATES = frozenset(state.value for state in TERMINAL_JOB_STATES)


@dataclass
class JobRow:
    """A job as lists show it; what several cells need is computed once."""

    job: Job
    attempt: Attempt | None = None
    tasks: list[Task] = field(default_factory=list)
    gpu_models: list[str] = field(default_factory=list)
    may_control: bool = False
    mine: bool = False
    group: Any = None
    """The sweep for whose jobs it stands in the job list (``portal.web.jobs.job_list.SweepGroup``)."""
    is_member: bool = False
    """True below the row of its sweep."""
    ran_s: float | None = None
    """Run time of an ended job; None if none of its programs started."""

    @property
    def verdict(self) -> JobVerdict | None:
        """Why a waiting job that is not held does not start."""
        return current_verdict(self.job) if self.job.state == JobState.PENDING and not self.job.held else None

    @property
    def verdict_numbers(self) -> list[tuple[str, Any]]:
        return verdict_details(self.verdict) if self.verdict else []

    @property
    def ended(self) -> bool:
        return self.job.state in _TERMINAL_STATES

    @property
    def stopping(self) -> bool:
        """True when a stop was requested and the job has not ended."""
        cancelled = self.job.desired_state == DesiredState.CANCELLED
        leaving = self.attempt is not None and self.attempt.state == AttemptState.COMPLETING
        return not self.ended and (cancelled or leaving)

    @property
    def suspended(self) -> bool:
        """True when suspension was requested: the job holds no GPU, or is releasing its GPUs."""
        return not self.ended and self.job.desired_state == DesiredState.SUSPENDED

    @property
    def may_resume(self) -> bool:
        return self.may_control and self.suspended

    @property
    def may_suspend(self) -> bool:
        runs = self.job.state == JobState.RUNNING and not self.stopping
        return self.may_control and runs and not self.suspended and not self.job.is_placeholder

    @property
    def idle(self) -> AttemptActivity | None:
        """Its idle countdown, once users are notified of it."""
        found = attempt_activity(self.attempt) if self.attempt and not self.stopping else None
        return found if found and found.idle_notified_at else None

    @property
    def is_unreachable(self) -> bool:
        """True when one of its nodes does not answer."""
        return any(not task.node.reachable for task in self.tasks if not task.container_removed)

    @property
    def is_workspace(self) -> bool:
        return self.job.kind == JobKind.WORKSPACE.value

    @property
    def ready(self) -> bool:
        """True when the workspace can be opened: its server answered."""
        return bool(
            self.attempt
            and self.attempt.ready_at
            and self.attempt.state == AttemptState.RUNNING
            and not self.stopping
        )

    @property
    def may_lose_work(self) -> bool:
        """True for a running training job that can be preempted."""
        trains = self.job.kind == JobKind.TRAINING.value and self.job.preemptible
        return trains and self.attempt is not None and self.attempt.state == AttemptState.RUNNING

    @cached_property
    def state_display(self) -> tuple[str, str]:
        job = self.job
        if self.ended:
            icon, label = END_STATE_DISPLAY[JobState(job.state)]
            return icon, _(label)
        if self.stopping:
            return "starting", _("Suspending") if self.suspended else _("Stopping")
        if job.state == JobState.SUSPENDED:
            return "stopped", _("Suspended")
        if job.state == JobState.PENDING:
            if job.held:
                return "stopped", pgettext("state of a job", "Held")
            verdict = current_verdict(job)
            return "waiting", _(VERDICT_LABELS.get(verdict.code, "Waiting")) if verdict else _("Waiting")
        if self.is_unreachable:
            return "unreachable", _("Unreachable")
        if self.attempt is None or self.attempt.state == AttemptState.CONFIGURING:
            return "starting", _("Starting")
        if self.is_workspace and self.attempt.ready_at is None:
            return "starting", _("Starting")
        return ("idle", _("Idle, holds GPUs")) if self.idle else ("running", _("Running"))

    @property
    def icon(self) -> str:
        return self.state_display[0]

    @property
    def label(self) -> str:
        return self.state_display[1]

    @property
    def summary(self) -> str:
        """The line below the name."""
        job = self.job
        if self.ended:
            return job.message
        problem = next(
            (
                task.status_message
                for task in self.tasks
                if task.status_message and not task.container_removed
            ),
            "",
        )
        if self.stopping:
            return (self.attempt.message if self.attempt else "") or _("It is releasing its GPUs.")
        if job.state == JobState.PENDING:
            verdict = current_verdict(job)
            if job.held:
                return _("Held: it cannot start until it is released.")
            if verdict is not None:
                return verdict.message
            return job.message or _("Just submitted; the next cycle considers it.")
        if self.is_unreachable:
            names = sorted({task.node.name for task in self.tasks if not task.node.reachable})
            return ngettext(
                "{names} does not answer. The job keeps running there and keeps its GPUs.",
                "{names} does not answer. The job keeps running there and keeps its GPUs.",
                len(names),
            ).format(names=", ".join(names))
        if problem:
            return problem
        if self.attempt is not None and self.attempt.state == AttemptState.CONFIGURING:
            return _("Its containers are starting on {nodes}.").format(nodes=self.node_names)
        if self.is_workspace and self.attempt is not None and self.attempt.ready_at is None:
            return _("Its container is running; you can open it once its server answers.")
        if not self.node_names:
            return job.message
        text = _("{size} on {nodes}.") if self.elastic_size else _("On {nodes}.")
        return text.format(size=self.elastic_size, nodes=self.node_names)

    @property
    def suggestion(self) -> str:
        """The smallest change that would let it start now, as a message; empty when there is none."""
        verdict = current_verdict(self.job)
        change = verdict.suggestion if verdict and self.job.state == JobState.PENDING else None
        return str(change.get("message", "")) if change else ""

    @property
    def node_names(self) -> str:
        return ", ".join(sorted({task.node.name for task in self._running_tasks}))

    @property
    def node_count(self) -> int:
        return len({task.node_id for task in self._running_tasks})

    @property
    def _running_tasks(self) -> list[Task]:
        """Its tasks; of an elastic job those that hold GPUs now."""
        return [task for task in self.tasks if not (self.job.is_elastic and task.container_removed)]

    @property
    def elastic_size(self) -> str:
        """2 of 4 tasks, while an elastic job runs; empty otherwise."""
        if not self.job.is_elastic or self.job.state != JobState.RUNNING:
            return ""
        return _("{count} of {tasks} tasks").format(count=len(self._running_tasks), tasks=self.job.tasks)

    @property
    def gpus(self) -> str:
        """16 × H200, 0.5 × A100, no GPU."""
        job = self.job
        if job.total_gpus == 0:
            return no_gpu()
        waits = job.state == JobState.PENDING  # GPUs of an earlier attempt do not determine those of the next
        models = [] if waits else sorted({short_gpu_model(model) for model in self.gpu_models})
        model = ", ".join(models) or (short_gpu_model(job.gpu_model) if job.gpu_model else "GPU")
        milli = len(self._running_tasks) * job.task_milli if self.elastic_size else job.total_milli
        return f"{gpu_amount(milli)}{NBSP}×{NBSP}{model}"

    @property
    def size_text(self) -> str:
        """Text below the GPUs: 2 nodes, or 2 tasks of 8."""
        if self.elastic_size:
            return self.elastic_size
        if self.node_count > 1:
            return plural(self.node_count, "node")
        if self.job.roles:
            return ", ".join(f"{role.tasks} {role.name}" for role in self.job.job_roles)
        if self.job.is_elastic:
            return _("{required_tasks} to {tasks} tasks of {gpus_per_task}").format(
                required_tasks=self.job.required_tasks,
                tasks=self.job.tasks,
                gpus_per_task=self.job.gpus_per_task,
            )
        if self.job.tasks > 1:
            return _("{tasks} tasks of {gpus_per_task}").format(
                tasks=self.job.tasks, gpus_per_task=self.job.gpus_per_task
            )
        return ""

    @property
    def timer_start(self) -> dt.datetime:
        """Start of its timer: when its programs started, before that when it was placed or became pending."""
        if self.job.state == JobState.PENDING:
            return self.job.pending_since
        begun = (self.attempt.running_at or self.attempt.created_at) if self.attempt else None
        return begun or self.job.started_at or self.job.submitted_at

    @property
    def elapsed(self) -> str:
        """Run time of an ended job, of all its attempts together."""
        return _("never started") if self.ran_s is None else duration(self.ran_s)

    @cached_property
    def deadline(self) -> dt.datetime | None:
        return None if self.ended else ends_at(self.job, self.attempt)

    @property
    def time_used_percent(self) -> int:
        if self.deadline is None or not self.job.time_limit_s:
            return 0
        left = (self.deadline - timezone.now()).total_seconds()
        return max(0, min(100, round(100 - 100 * left / self.job.time_limit_s)))


def current_verdict(job: Job) -> JobVerdict | None:
    """Return the job's newest verdict, if any; selectors join it."""
    try:
        return job.verdict
    except JobVerdict.DoesNotExist:
        return None


def job_rows(user: User, jobs: Iterable[Job]) -> list[JobRow]:
    """Return the jobs as rows, with five additional queries regardless of their number."""
    listed = list(jobs)
    live = [job.pk for job in listed if job.state == JobState.RUNNING]
    ended = [job.pk for job in listed if job.ended_at is not None]
    is_live = Q(job_id__in=live, state__in=[state.value for state in LIVE_ATTEMPT_STATES])
    attempts: dict[int, Attempt] = {}
    ran_s: dict[int, float] = {}  # of ended jobs
    for one in Attempt.objects.filter(is_live | Q(job_id__in=ended)).select_related("activity"):
        if one.ended_at is None:
            attempts[one.job_id] = one
        elif (seconds := run_time_s(one)) is not None:
            ran_s[one.job_id] = ran_s.get(one.job_id, 0.0) + seconds
    tasks: dict[int, list[Task]] = {}
    for task in Task.objects.filter(attempt__in=attempts.values()).select_related("node").order_by("rank"):
        tasks.setdefault(task.attempt_id, []).append(task)
    models: dict[int, set[str]] = {}  # of the newest attempt that had GPUs
    used = (
        Gpu.objects.filter(allocations__task__attempt__job__in=[job.pk for job in listed])
        .values_list("allocations__task__attempt__job_id", "allocations__task__attempt_id", "model")
        .order_by("allocations__task__attempt_id")
        .distinct()
    )
    newest: dict[int, int] = {}
    for job_id, attempt_id, model in used:
        if newest.get(job_id) != attempt_id:
            newest[job_id], models[job_id] = attempt_id, set()
        models[job_id].add(model)
    controlled = permitted_job_ids(user, Permission.CONTROL, listed)
    rows = []
    for job in listed:
        attempt = attempts.get(job.pk)
        number = attempt.pk if attempt else 0
        rows.append(
            JobRow(
                job,
                attempt,
                tasks.get(number, []),
                sorted(models.get(job.pk, [])),
                may_control=job.pk in controlled,
                mine=job.owner_id == user.pk,
                ran_s=ran_s.get(job.pk),
            )
        )
    return rows


def verdict_label(code: str) -> str:
    """Return a verdict's code in words."""
    return _(VERDICT_LABELS.get(code) or code.replace("_", " ").capitalize())


def state_label(code: str) -> str:
    """Return the label of a state of a job, an attempt or a task."""
    return _(STATE_LABELS[code]) if code else ""


_NODES_BY_FREE = re.compile(r"nodes_with_(\d+)_free")


def nodes_by_free(verdict: JobVerdict) -> dict[int, int]:
    """Return how many nodes that suit the job had each number of free GPUs when the verdict was decided."""
    matches = ((_NODES_BY_FREE.fullmatch(name), nodes) for name, nodes in verdict.details.items())
    return {int(match[1]): nodes for match, nodes in matches if match}


def verdict_details(verdict: JobVerdict | JobEvent, without: Collection[str] = ()) -> list[tuple[str, Any]]:
    """Return the numbers of a verdict or its event with readable labels, except lists, tables and ``without``.

    Pool and project are public ids, and the message names both.
    """
    plain = []
    for name, value in verdict.details.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, str)) or name in ("pool", "project"):
            continue
        if name.endswith(("_from_s", "_until_s", "_before_s")):
            continue  # the message already names the time
        if name in without or _NODES_BY_FREE.fullmatch(name):
            continue  # nodes_by_free()
        if isinstance(value, float):
            value = f"{value:g}"
        title = name
        for unit, word in (("_milli", ""), ("_mib", ""), ("_s", ", s")):
            if name.endswith(unit):
                title = name.removesuffix(unit) + word
                if unit == "_milli":
                    value = gpu_amount(int(float(value)))
                elif unit == "_mib":
                    value = memory(float(value))
                break
        plain.append((title.replace("_", " ").capitalize().replace("gpu", "GPU"), value))
    return plain
