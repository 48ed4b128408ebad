"""Serializers of jobs: list rows, details, attempts, tasks and events.

Rows of jobs are read with ``ROW_RELATIONS``, those of workspaces by ``list_workspaces``.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.serializers.idle import IdleDetail
from portal.api.serializers.job_inputs import JobSecret, JobVolume, Role, TopologyConstraint
from portal.api.serializers.progress import JobPhase, LauncherRate, MeasuredLayout, ScalePoint, TaskProgress
from portal.api.serializers.references import Reference, UserReference
from portal.api.serializers.user_requests import RequestSummary
from portal.domain.jobs.checkpoints import Validity
from portal.domain.jobs.end_states import FailureClass
from portal.domain.jobs.exit_codes import exit_signal
from portal.domain.jobs.failure_rules import FailureAction
from portal.domain.jobs.job_spec import JobRole
from portal.domain.jobs.lost_work import LossCause
from portal.domain.jobs.phases import PhaseSpan
from portal.domain.jobs.roles import role_of_rank
from portal.domain.notices.notices import JOB_EVENTS, NO_NOTICES
from portal.domain.states import AttemptState, DesiredState, JobKind, JobState
from portal.hidden_fields import PrivateFields
from portal.models import Attempt as AttemptRow
from portal.models import AttemptProgress, JobEvent, JobVerdict, Project, UserRequest
from portal.models import AttemptWork as AttemptWorkRow
from portal.models import Job as JobRow
from portal.models import Rendezvous as RendezvousRow
from portal.models import Task as TaskRow
from portal.selectors.jobs.checkpoints import attempt_observation, attempt_work, stalled_since
from portal.selectors.jobs.failure_rules import IdentifiedFailure
from portal.selectors.jobs.idle import IdleStatus
from portal.selectors.jobs.jobs import DependencyChain, attempt_energy_joules
from portal.selectors.jobs.phases import attempt_phases
from portal.selectors.jobs.progress import MeasuredLayout as MeasuredLayoutRow
from portal.selectors.jobs.progress import MeasuredProgram, attempt_progress
from portal.selectors.jobs.reruns import RerunRelations
from portal.selectors.jobs.time_limits import ends_at
from portal.selectors.scheduling.fair_share_breakdown import FairShareBreakdown
from portal.selectors.scheduling.forecasts import ForecastRevision, no_forecast_reason
from portal.services.jobs.annotations import job_note, job_tags

STATES = [state.value for state in JobState]
KINDS = [kind.value for kind in JobKind]
ATTEMPT_STATES = [state.value for state in AttemptState]


@dataclass(frozen=True)
class JobContext:
    """What belongs to a job. Other jobs are named only when their public id is in ``seen``."""

    seen: Collection[str]
    roles: Sequence[JobRole]
    attempts: list[AttemptRow]
    failure: IdentifiedFailure | None
    layouts: list[MeasuredLayoutRow]
    measured: MeasuredProgram
    preempted_attempts: list[AttemptRow]
    chain: DependencyChain
    events: list[JobEvent]
    revisions: list[ForecastRevision]
    breakdowns: list[FairShareBreakdown]
    private: PrivateFields
    repetition: RerunRelations
    extensions: list[UserRequest]
    idle: IdleStatus | None

    def visible(self, public_ids: Collection[str]) -> list[str]:
        return [public_id for public_id in public_ids if public_id in self.seen]


def current_verdict(row: JobRow) -> JobVerdict | None:
    """Return the verdict of a pending job; the last verdict of a running job is outdated."""
    return getattr(row, "verdict", None) if row.state == JobState.PENDING.value else None


def with_forecast(verdict: JobVerdict | None) -> JobVerdict | None:
    """Return the verdict if it has an expected start."""
    return verdict if verdict is not None and verdict.p50_at is not None else None


class VerdictSummary(ResponseSerializer):
    """Why a job is pending, for lists."""

    code = serializers.CharField()
    message = serializers.CharField()
    since = serializers.DateTimeField(source="code_since")


class VerdictDetail(VerdictSummary):
    """Why a job is pending, in detail."""

    details = serializers.DictField()
    jobs_ahead = serializers.ListField(
        child=serializers.CharField(), help_text="Ids of the jobs ahead of it that are visible to you."
    )
    jobs_ahead_count = serializers.IntegerField(
        help_text="Number of jobs ahead of it that the verdict lists, including those not visible to you."
    )
    suggestion = serializers.DictField(
        allow_null=True,
        help_text="The smallest change of the request that would start the job; null if none is known.",
    )
    decided_at = serializers.DateTimeField()

    @staticmethod
    def get_jobs_ahead(row: JobVerdict, context: JobContext) -> list[str]:
        return context.visible(row.jobs_ahead)

    @staticmethod
    def get_jobs_ahead_count(row: JobVerdict, context: JobContext) -> int:
        return len(row.jobs_ahead)


class StartInterval(ResponseSerializer):
    """Expected start of a job. The interval from p10 to p90 should contain the actual start in 80% of cases."""

    made_at = serializers.DateTimeField(source="forecast_at")
    p10_at = serializers.DateTimeField()
    p50_at = serializers.DateTimeField()
    p90_at = serializers.DateTimeField()


class StartForecast(ResponseSerializer):
    """A past or current start forecast of a job."""

    made_at = serializers.DateTimeField(source="forecast.made_at")
    p10_at = serializers.DateTimeField(source="forecast.p10_at")
    p50_at = serializers.DateTimeField(source="forecast.p50_at")
    p90_at = serializers.DateTimeField(source="forecast.p90_at")
    is_first = serializers.BooleanField(
        source="forecast.is_first",
        help_text="true for the first forecast of the job, which is scored when the job starts.",
    )
    code = serializers.CharField(
        allow_blank=True, source="forecast.code", help_text="Code of the verdict at that time."
    )
    moved_s = serializers.FloatField(
        allow_null=True,
        source="shift_s",
        help_text="Change of the median since the previous forecast, in seconds; null for the first forecast.",
    )
    jobs_ahead_added = serializers.ListField(
        child=serializers.CharField(),
        help_text="Ids of visible jobs that are ahead now and were not at the previous forecast.",
    )
    jobs_ahead_removed = serializers.ListField(
        child=serializers.CharField(),
        help_text="Ids of visible jobs that were ahead at the previous forecast and are not now.",
    )
    started_at = serializers.DateTimeField(allow_null=True, source="forecast.started_at")
    covered = serializers.BooleanField(
        allow_null=True,
        source="forecast.covered",
        help_text="Whether the job started between p10_at and p90_at; null unless it is the first forecast and "
        "the job has started.",
    )
    score_s = serializers.FloatField(
        allow_null=True,
        source="forecast.score_s",
        help_text="Interval score (Winkler, alpha 0.2) in seconds; lower is better; null while covered is null.",
    )

    @staticmethod
    def get_jobs_ahead_added(row: ForecastRevision, context: JobContext) -> list[str]:
        return context.visible(row.jobs_ahead_added)

    @staticmethod
    def get_jobs_ahead_removed(row: ForecastRevision, context: JobContext) -> list[str]:
        return context.visible(row.jobs_ahead_removed)


class FairShareStep(ResponseSerializer):
    """One step of the calculation of a fair share."""

    kind = serializers.ChoiceField(["guaranteed", "round", "remainder"])
    amount_milli = serializers.FloatField(help_text="GPU milli that the step adds to the fair share.")
    details = serializers.DictField(help_text="Values that the amount is calculated from.")


class FairShareBreakdownDetail(ResponseSerializer):
    """Fair share of a project in a pool in the newest cycle: the sum of its steps."""

    project = Reference()
    pool = Reference()
    guaranteed_milli = serializers.IntegerField()
    limit_milli = serializers.IntegerField(allow_null=True)
    allocated_milli = serializers.IntegerField()
    requested_milli = serializers.IntegerField(
        help_text="GPU milli allocated and requested, capped by the limits of project and users."
    )
    fair_share_milli = serializers.FloatField()
    steps = FairShareStep(many=True)


EXIT_SIGNAL_HELP = "Signal that the exit code names, such as SIGSEGV for 139; blank: none."


class Job(Reference):
    """A job in lists."""

    kind = serializers.ChoiceField(KINDS)
    state = serializers.ChoiceField(STATES)
    held = serializers.BooleanField()
    reason = serializers.CharField(allow_blank=True, help_text="Reason code of the last state change.")
    message = serializers.CharField(allow_blank=True, help_text="The reason as a human-readable message.")
    project = Reference()
    owner = UserReference()
    pool = Reference(allow_null=True, help_text="Requested pool; null for any pool.")
    environment = Reference()
    tags = serializers.ListField(child=serializers.CharField())
    tasks = serializers.IntegerField()
    min_tasks = serializers.IntegerField(
        allow_null=True,
        help_text="Minimum number of tasks of an elastic job, which starts with them and scales up to `tasks`; "
        "null if all tasks must start together.",
    )
    gpus_per_task = serializers.IntegerField(help_text="The largest of its roles, if it has any.")
    milli_per_gpu = serializers.IntegerField(help_text="Thousandths of each GPU; 1000 is a whole GPU.")
    total_milli = serializers.IntegerField(help_text="GPU milli of all tasks.")
    priority = serializers.IntegerField()
    preemptible = serializers.BooleanField()
    time_limit_s = serializers.IntegerField(allow_null=True)
    submitted_at = serializers.DateTimeField()
    started_at = serializers.DateTimeField(allow_null=True)
    ended_at = serializers.DateTimeField(allow_null=True)
    attempt_count = serializers.IntegerField()
    exit_code = serializers.IntegerField(allow_null=True)
    exit_signal = serializers.CharField(allow_blank=True, help_text=EXIT_SIGNAL_HELP)
    verdict = VerdictSummary(allow_null=True)

    @staticmethod
    def get_exit_signal(row: JobRow, context: object) -> str:
        return exit_signal(row.exit_code)

    @staticmethod
    def get_tags(row: JobRow, context: object) -> list[str]:
        return job_tags(row)

    @staticmethod
    def get_verdict(row: JobRow, context: object) -> JobVerdict | None:
        return current_verdict(row)


class TaskGpu(ResponseSerializer):
    """A GPU held by a task."""

    uuid = serializers.CharField(source="gpu.uuid")
    index = serializers.IntegerField(source="gpu.index")
    model = serializers.CharField(source="gpu.model")
    milli = serializers.IntegerField()
    released_at = serializers.DateTimeField(allow_null=True, source="ended_at")


class Task(ResponseSerializer):
    """One rank of an attempt."""

    rank = serializers.IntegerField()
    role = serializers.CharField(help_text="Role of the task; worker in a job without roles.")
    role_index = serializers.IntegerField(help_text="Number of the task within its role, from 0.")
    node = Reference()
    state = serializers.ChoiceField(ATTEMPT_STATES)
    status_message = serializers.CharField(
        allow_blank=True, help_text="Why its start is delayed, as a message."
    )
    running_at = serializers.DateTimeField(allow_null=True)
    ended_at = serializers.DateTimeField(allow_null=True)
    exit_code = serializers.IntegerField(allow_null=True)
    exit_signal = serializers.CharField(allow_blank=True, help_text=EXIT_SIGNAL_HELP)
    out_of_memory = serializers.BooleanField(source="oom")
    peak_memory_mib = serializers.IntegerField(allow_null=True)
    eviction_requested_at = serializers.DateTimeField(
        allow_null=True,
        help_text="When only this task, not its whole attempt, was asked to stop; null if it was not.",
    )
    ports = serializers.DictField(
        child=serializers.IntegerField(),
        source="gang_ports",
        help_text="Ports reserved on its node, by the names of its role and its launcher.",
    )
    gpus = TaskGpu(many=True, source="allocations")

    @staticmethod
    def get_exit_signal(row: TaskRow, context: object) -> str:
        return exit_signal(row.exit_code)

    @staticmethod
    def get_role(row: TaskRow, context: JobContext) -> str:
        return role_of_rank(context.roles, row.rank).role

    @staticmethod
    def get_role_index(row: TaskRow, context: JobContext) -> int:
        return role_of_rank(context.roles, row.rank).role_index


class RelatedJob(ResponseSerializer):
    """A related job. Job and project are null if the job is not visible to you."""

    job = Reference(allow_null=True, help_text="null if the job is not visible to you.")
    project = Reference(allow_null=True)

    @staticmethod
    def get_job(row: Any, context: JobContext) -> JobRow | None:
        return row if row.public_id in context.seen else None

    @staticmethod
    def get_project(row: Any, context: JobContext) -> Project | None:
        return row.project if row.public_id in context.seen else None


class DependencyJob(RelatedJob):
    """A dependency or a dependent of a job."""

    state = serializers.ChoiceField(STATES)


class PreemptedJob(RelatedJob):
    """An attempt of another job that was preempted for this one."""

    reason = serializers.CharField(
        source="stop_reason",
        help_text="preempted: for a job of the same project; reclaimed: for a job of another project.",
    )
    requested_at = serializers.DateTimeField(source="stop_requested_at")
    ended_at = serializers.DateTimeField(
        allow_null=True, help_text="null while the attempt still holds its resources."
    )

    @staticmethod
    def get_job(row: AttemptRow, context: JobContext) -> JobRow | None:
        return RelatedJob.get_job(row.job, context)

    @staticmethod
    def get_project(row: AttemptRow, context: JobContext) -> Project | None:
        return RelatedJob.get_project(row.job, context)


class Rendezvous(ResponseSerializer):
    """Rendezvous address of the ranks of a gang."""

    address = serializers.CharField(
        allow_blank=True,
        help_text="Address of the node of rank 0; blank if all ranks run in containers on one node.",
    )
    port = serializers.IntegerField()
    node_network = serializers.BooleanField(
        help_text="true if the ranks use the host network instead of the network of their job."
    )


class AttemptWork(ResponseSerializer):
    """GPU-seconds of an ended attempt."""

    cause = serializers.ChoiceField(
        ["", *(each.value for each in LossCause)], help_text="Why work was lost; blank if it completed."
    )
    startup_gpu_s = serializers.FloatField(help_text="Until its containers ran.")
    useful_gpu_s = serializers.FloatField(help_text="Until its last checkpoint, or its end if it completed.")
    lost_gpu_s = serializers.FloatField()


class Attempt(ResponseSerializer):
    """One run of a job."""

    number = serializers.IntegerField()
    state = serializers.ChoiceField(ATTEMPT_STATES)
    reason = serializers.CharField(allow_blank=True)
    message = serializers.CharField(allow_blank=True)
    pool = Reference()
    created_at = serializers.DateTimeField()
    running_at = serializers.DateTimeField(allow_null=True)
    ready_at = serializers.DateTimeField(allow_null=True, help_text="When its server first responded.")
    phases = JobPhase(many=True, help_text="In their order, without those that never came.")
    checkpoint_at = serializers.DateTimeField(allow_null=True, help_text="Of the last reported checkpoint.")
    checkpoint_step = serializers.IntegerField(allow_null=True, help_text="Of that checkpoint.")
    code_commit = serializers.CharField(
        allow_blank=True, help_text="Commit of its code repository that was checked out; blank: none yet."
    )
    resume_path = serializers.CharField(
        allow_blank=True, help_text="Checkpoint from which it started; blank if it started without one."
    )
    resume_step = serializers.IntegerField(allow_null=True)
    checkpoints_problem = serializers.CharField(
        allow_null=True, help_text="Why its checkpoints could not be listed last; blank if they could."
    )
    stalled_at = serializers.DateTimeField(
        allow_null=True, help_text="Since when it is stalled; null if it is not."
    )
    work = AttemptWork(allow_null=True, help_text="GPU time; null until it has ended, or without GPUs.")
    progress = TaskProgress(allow_null=True, help_text="null if it has reported no progress.")
    energy_joules = serializers.FloatField(
        allow_null=True,
        help_text="Energy used so far by its GPUs (only its part of shared GPUs); null if not measured.",
    )
    rendezvous = Rendezvous(
        allow_null=True, help_text="null if it has a single task, or its tasks have no network in common."
    )
    stop_requested_at = serializers.DateTimeField(allow_null=True)
    preempted_for = RelatedJob(
        allow_null=True, help_text="The pending job that it was preempted for; null if it was not preempted."
    )
    ended_at = serializers.DateTimeField(allow_null=True)
    exit_code = serializers.IntegerField(allow_null=True)
    exit_signal = serializers.CharField(allow_blank=True, help_text=EXIT_SIGNAL_HELP)
    tasks = Task(many=True, source="task_rows")

    @staticmethod
    def get_exit_signal(row: AttemptRow, context: object) -> str:
        return exit_signal(row.exit_code)

    @staticmethod
    def get_phases(row: AttemptRow, context: JobContext) -> list[PhaseSpan]:
        return [span for span in attempt_phases(row) if span.started_at]

    @staticmethod
    def get_checkpoints_problem(row: AttemptRow, context: JobContext) -> str | None:
        seen = attempt_observation(row)
        return seen.listing_problem if seen else None

    @staticmethod
    def get_stalled_at(row: AttemptRow, context: JobContext) -> dt.datetime | None:
        return stalled_since(row)

    @staticmethod
    def get_work(row: AttemptRow, context: JobContext) -> AttemptWorkRow | None:
        return attempt_work(row)

    @staticmethod
    def get_progress(row: AttemptRow, context: JobContext) -> AttemptProgress | None:
        return attempt_progress(row)

    @staticmethod
    def get_energy_joules(row: AttemptRow, context: JobContext) -> float | None:
        return attempt_energy_joules(row)

    @staticmethod
    def get_rendezvous(row: AttemptRow, context: JobContext) -> RendezvousRow | None:
        return getattr(row, "rendezvous", None)


class Checkpoint(ResponseSerializer):
    """A checkpoint in the checkpoint directory of a job, as its node last listed it."""

    id = serializers.CharField(source="public_id")
    job = Reference()
    name = serializers.CharField(help_text="File or folder in the checkpoint directory.")
    step = serializers.IntegerField(allow_null=True, help_text="null if its name and content tell none.")
    size_bytes = serializers.IntegerField()
    saved_at = serializers.DateTimeField()
    validity = serializers.ChoiceField(
        [each.value for each in Validity], help_text="Restarts use valid ones only (docs/checkpoints.md)."
    )
    problem = serializers.CharField(allow_blank=True, help_text="Why it is broken, or could not be checked.")
    pinned_at = serializers.DateTimeField(
        allow_null=True, help_text="null unless retention never deletes it."
    )
    pinned_by = serializers.CharField(allow_blank=True)
    removal_requested_at = serializers.DateTimeField(
        allow_null=True, help_text="When retention decided to delete it; null if it is kept."
    )


class TimelineEvent(ResponseSerializer):
    """An event of a job."""

    number = serializers.IntegerField(source="pk")
    at = serializers.DateTimeField()
    kind = serializers.CharField()
    attempt = serializers.IntegerField(allow_null=True, source="attempt.number")
    before = serializers.CharField(allow_blank=True)
    after = serializers.CharField(allow_blank=True)
    reason = serializers.CharField(allow_blank=True)
    message = serializers.CharField(allow_blank=True)
    actor = serializers.CharField(allow_blank=True)
    details = serializers.DictField()


class Failure(ResponseSerializer):
    """Why a job failed, by a failure rule."""

    rule = serializers.CharField(source="rule.code")
    title = serializers.CharField(source="rule.title")
    cause = serializers.CharField(source="rule.cause")
    fix = serializers.CharField(source="rule.fix")
    action = serializers.ChoiceField(
        [action.value for action in FailureAction], source="rule.action", help_text="What `retry/` does."
    )
    line = serializers.CharField(
        allow_null=True,
        allow_blank=True,
        help_text="The line of the log that matched, or the exception with which a Python program ended; blank: the "
        "exit signature matched; null: not visible to you.",
    )
    rank = serializers.IntegerField(allow_null=True, help_text="Rank of that line.")


class JobDetail(Job):
    """A job with all details."""

    verdict = VerdictDetail(allow_null=True)
    interval = StartInterval(
        allow_null=True, help_text="Expected start; null if the job is not pending, or has no forecast."
    )
    interval_missing = serializers.CharField(
        allow_null=True,
        help_text="Why there is no forecast; null if there is one, or if none was calculated yet.",
    )
    fair_share_breakdowns = FairShareBreakdownDetail(
        many=True,
        source="context.breakdowns",
        help_text="For a pending job: of its project, then of the ancestors visible to you, nearest first.",
    )
    forecasts = StartForecast(many=True, source="context.revisions", help_text="Newest first, at most 20.")
    desired_state = serializers.ChoiceField([word.value for word in DesiredState])
    image_digest = serializers.CharField(
        allow_blank=True,
        help_text="Image of all attempts; blank if the first start sets it, or the job has no image.",
    )
    start_after = serializers.DateTimeField(allow_null=True, help_text="It does not start before.")
    template = Reference(allow_null=True)
    template_version = serializers.IntegerField(
        allow_null=True, help_text="The version of the template on which it is based."
    )
    parameters = serializers.DictField(help_text="Values of the parameters of its template.")
    program = serializers.CharField(
        allow_blank=True, help_text="Text of a program that its tasks have as a file."
    )
    gpu_model = serializers.CharField(allow_blank=True)
    min_gpu_memory_mib = serializers.IntegerField(allow_null=True)
    mig_profile = serializers.CharField(
        allow_blank=True, help_text="MIG profile of its GPU slices; blank for whole GPUs."
    )
    min_compute_capability = serializers.FloatField(allow_null=True)
    allow_mixed_gpus = serializers.BooleanField(help_text="Whether its tasks may use different GPUs.")
    topology_constraint = TopologyConstraint(allow_null=True, help_text="null if unconstrained.")
    cpu_milli = serializers.IntegerField(help_text="Per task; the largest of its roles.")
    memory_mib = serializers.IntegerField(help_text="Per task; the largest of its roles.")
    roles = Role(many=True, help_text="In the order of their ranks; empty if all tasks are equal.")
    completion_role = serializers.CharField(
        allow_blank=True, help_text="The role whose end ends the job; blank: all tasks must end."
    )
    min_succeeded = serializers.IntegerField(
        allow_null=True,
        help_text="Number of succeeded tasks with which it completes; null: all that may not fail.",
    )
    shm_mib = serializers.IntegerField()
    termination_grace_s = serializers.IntegerField()
    max_attempts = serializers.IntegerField()
    launcher = serializers.CharField(help_text="How its tasks find each other (docs/training.md).")
    launcher_options = serializers.DictField(help_text="Options of the launcher that are not defaults.")
    rank_overrides = serializers.DictField(
        child=serializers.DictField(child=serializers.CharField(allow_blank=True)),
        allow_null=True,
        source="context.private.rank_overrides",
        help_text="Variables of single ranks; null unless you may control the job.",
    )
    preferred_nodes = serializers.ListField(
        child=serializers.CharField(),
        help_text="The name of a node for each task, in the order of ranks; empty without a preference.",
    )
    retry_on = serializers.ListField(
        child=serializers.ChoiceField([each.value for each in FailureClass]),
        help_text="Failures after which it starts again.",
    )
    notify = serializers.ListField(
        child=serializers.ChoiceField([NO_NOTICES, *JOB_EVENTS]),
        help_text="Events of which its owner is notified; empty: as their preferences say.",
    )
    retry_exit_codes = serializers.ListField(
        child=serializers.IntegerField(), help_text="Exit codes that count as command_failure; empty for any."
    )
    retry_backoff_s = serializers.IntegerField(help_text="Doubled for each later retry.")
    retry_max_backoff_s = serializers.IntegerField()
    exclude_failed_node = serializers.BooleanField()
    apply_failure_actions = serializers.BooleanField(
        help_text="Failures are retried with the action of the failure rule that matches."
    )
    seed = serializers.IntegerField(allow_null=True, help_text="Value of FAIRWAY_SEED.")
    note = serializers.CharField(allow_blank=True)
    rerun_of = Reference(
        allow_null=True, source="context.repetition.source", help_text="The job that it repeats exactly."
    )
    reruns = Reference(
        many=True,
        source="context.repetition.reruns",
        help_text="Jobs that repeat it, newest first, at most 20.",
    )
    code_repository = serializers.CharField(
        allow_blank=True, help_text="URL of the git repository with its code; blank: none."
    )
    code_ref = serializers.CharField(
        allow_blank=True, help_text="Branch, tag or commit; blank: the default branch."
    )
    code_path = serializers.CharField(allow_blank=True, help_text="In the home or in a volume.")
    code_host_key = serializers.CharField(allow_blank=True, help_text="Of the git server, for an SSH URL.")
    code_archive = serializers.CharField(allow_blank=True, help_text="SHA-256 of an uploaded archive.")
    checkpoint_dir = serializers.CharField(
        allow_blank=True, help_text="Folder below which its checkpoint directory is; blank for the default."
    )
    checkpoint_keep_last = serializers.IntegerField(allow_null=True, help_text="null if all are kept.")
    checkpoint_keep_every = serializers.IntegerField(allow_null=True)
    resume_from = serializers.CharField(
        allow_blank=True, help_text="Id of the checkpoint from which its first attempt starts."
    )
    stall_timeout_s = serializers.IntegerField(allow_null=True, help_text="null for the policy of the pool.")
    on_stall = serializers.ChoiceField(["notify", "end"])
    command = serializers.ListField(child=serializers.CharField(allow_blank=True))
    env = serializers.DictField(
        child=serializers.CharField(allow_blank=True),
        allow_null=True,
        source="context.private.env",
        help_text="null unless you may control the job, since values may be secret.",
    )
    volumes = JobVolume(many=True)
    secrets = JobSecret(
        many=True,
        allow_null=True,
        source="context.private.secrets",
        help_text="null unless you may control the job.",
    )
    version = serializers.IntegerField()
    is_placeholder = serializers.BooleanField(
        help_text="true for a job created from a container that was adopted after a restore: its request is unknown."
    )
    attempts = Attempt(many=True, source="context.attempts")
    failure = Failure(
        allow_null=True,
        source="context.failure",
        help_text="null unless its newest attempt failed and a failure rule matches.",
    )
    layouts = MeasuredLayout(
        many=True,
        source="context.layouts",
        help_text="GPU layouts of comparable jobs, fastest first; empty unless the speed of two layouts is known.",
    )
    scaling = ScalePoint(
        many=True,
        source="context.measured.points",
        help_text="Measured numbers of GPUs of the same program, fewest first; empty unless two are known.",
    )
    launcher_rates = LauncherRate(many=True, source="context.measured.launchers")
    preempted_jobs = PreemptedJob(
        many=True,
        source="context.preempted_attempts",
        help_text="Attempts of other jobs that were preempted for it, newest first, at most 20.",
    )
    dependencies = DependencyJob(
        many=True, source="context.chain.dependencies", help_text="Jobs that must end before it starts."
    )
    ignore_dependency_failure = serializers.BooleanField(
        help_text="true if it also starts when its dependencies fail or are cancelled."
    )
    dependents = DependencyJob(
        many=True,
        source="context.chain.dependents",
        help_text="Jobs that depend on it, newest first, at most 20.",
    )
    ends_at = serializers.DateTimeField(
        allow_null=True, help_text="When its time limit expires; null if it has no limit or is not running."
    )
    idle = IdleDetail(
        allow_null=True,
        source="context.idle",
        help_text="null unless it runs with GPUs and the policy watches its kind.",
    )
    extensions = RequestSummary(
        many=True,
        source="context.extensions",
        help_text="Requests to extend its time limit, newest first, at most 20.",
    )
    timeline = TimelineEvent(
        many=True,
        source="context.events",
        help_text="The newest 100 events, oldest first; events/ lists all.",
    )

    @staticmethod
    def get_interval(row: JobRow, context: JobContext) -> JobVerdict | None:
        verdict = with_forecast(current_verdict(row))
        return None if no_forecast_reason(row, verdict) else verdict

    @staticmethod
    def get_interval_missing(row: JobRow, context: JobContext) -> str | None:
        return no_forecast_reason(row, current_verdict(row))

    @staticmethod
    def get_note(row: JobRow, context: JobContext) -> str:
        return job_note(row)

    @staticmethod
    def get_ends_at(row: JobRow, context: JobContext) -> dt.datetime | None:
        return ends_at(row, context.attempts[0] if context.attempts else None)
