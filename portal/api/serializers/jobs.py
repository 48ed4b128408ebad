"""Serializers of jobs: list rows, details, attempts, tasks and events.

Rows of jobs are read with ``ROW_RELATIONS``, those of workspaces by ``list_workspaces``.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.serializers.idle import IdleDetail
from portal.api.serializers.progress import MeasuredLayout, TaskProgress
from portal.api.serializers.references import Reference, UserReference
from portal.domain.states import AttemptState, DesiredState, JobKind, JobState
from portal.models import Attempt as AttemptRow
from portal.models import AttemptProgress, JobEvent, JobVerdict, Project, TimeLimitExtension
from portal.models import Job as JobRow
from portal.models import Rendezvous as RendezvousRow
from portal.selectors.jobs.idle import IdleStatus
from portal.selectors.jobs.jobs import DependencyChain, attempt_energy_joules
from portal.selectors.jobs.progress import MeasuredLayout as MeasuredLayoutRow
from portal.selectors.jobs.progress import attempt_progress
from portal.selectors.jobs.time_limits import ends_at
from portal.selectors.scheduling.fair_share_breakdown import FairShareBreakdown
from portal.selectors.scheduling.forecasts import ForecastRevision, no_forecast_reason
from portal.services.workspaces.access import workspace_origin
from portal.visibility import PrivateFields

STATES = [state.value for state in JobState]
KINDS = [kind.value for kind in JobKind]
ATTEMPT_STATES = [state.value for state in AttemptState]


@dataclass(frozen=True)
class JobContext:
    """What belongs to a job. Other jobs are named only when their public id is in ``seen``."""

    seen: Collection[str]
    attempts: list[AttemptRow]
    layouts: list[MeasuredLayoutRow]
    preempted_attempts: list[AttemptRow]
    chain: DependencyChain
    events: list[JobEvent]
    revisions: list[ForecastRevision]
    breakdowns: list[FairShareBreakdown]
    private: PrivateFields
    extensions: list[TimeLimitExtension]
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
    """Why a job is pending, with the numbers behind it."""

    details = serializers.DictField()
    jobs_ahead = serializers.ListField(
        child=serializers.CharField(), help_text="Jobs ahead of it, of those you may see."
    )
    jobs_ahead_count = serializers.IntegerField(help_text="All jobs ahead of it that the verdict names.")
    suggestion = serializers.DictField(allow_null=True, help_text="The smallest change that would start it.")
    decided_at = serializers.DateTimeField()

    @staticmethod
    def get_jobs_ahead(row: JobVerdict, context: JobContext) -> list[str]:
        return context.visible(row.jobs_ahead)

    @staticmethod
    def get_jobs_ahead_count(row: JobVerdict, context: JobContext) -> int:
        return len(row.jobs_ahead)


class StartInterval(ResponseSerializer):
    """Expected start: 8 of 10 intervals from p10 to p90 should contain the actual one."""

    made_at = serializers.DateTimeField(source="forecast_at")
    p10_at = serializers.DateTimeField()
    p50_at = serializers.DateTimeField()
    p90_at = serializers.DateTimeField()


class StartForecast(ResponseSerializer):
    """One forecast of the history."""

    made_at = serializers.DateTimeField(source="forecast.made_at")
    p10_at = serializers.DateTimeField(source="forecast.p10_at")
    p50_at = serializers.DateTimeField(source="forecast.p50_at")
    p90_at = serializers.DateTimeField(source="forecast.p90_at")
    is_first = serializers.BooleanField(
        source="forecast.is_first", help_text="The first one: it is scored when the job starts."
    )
    code = serializers.CharField(allow_blank=True, source="forecast.code", help_text="Its verdict then.")
    moved_s = serializers.FloatField(
        allow_null=True, source="shift_s", help_text="By how much the median moved; null on the first."
    )
    jobs_ahead_added = serializers.ListField(
        child=serializers.CharField(), help_text="Jobs ahead that were not, of those you may see."
    )
    jobs_ahead_removed = serializers.ListField(
        child=serializers.CharField(), help_text="Jobs that are not ahead any more."
    )
    started_at = serializers.DateTimeField(allow_null=True, source="forecast.started_at")
    covered = serializers.BooleanField(
        allow_null=True, source="forecast.covered", help_text="null: not scored."
    )
    score_s = serializers.FloatField(
        allow_null=True, source="forecast.score_s", help_text="Winkler's interval score, alpha 0.2."
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
    amount_milli = serializers.FloatField(help_text="What it adds.")
    details = serializers.DictField(help_text="What it was made of.")


class FairShareBreakdownDetail(ResponseSerializer):
    """How the fair share of a project in a pool was calculated in the newest cycle; the steps add up."""

    project = Reference()
    pool = Reference()
    guaranteed_milli = serializers.IntegerField()
    limit_milli = serializers.IntegerField(allow_null=True)
    allocated_milli = serializers.IntegerField()
    requested_milli = serializers.IntegerField(help_text="What it holds and asks for, cut at its limit.")
    fair_share_milli = serializers.FloatField()
    steps = FairShareStep(many=True)


class Job(Reference):
    """A job in lists."""

    kind = serializers.ChoiceField(KINDS)
    state = serializers.ChoiceField(STATES)
    held = serializers.BooleanField()
    reason = serializers.CharField(allow_blank=True, help_text="Code of the last move.")
    message = serializers.CharField(allow_blank=True, help_text="The reason, for people.")
    project = Reference()
    owner = UserReference()
    pool = Reference(allow_null=True, help_text="The pool that was asked for; null: any.")
    environment = Reference()
    tasks = serializers.IntegerField()
    min_tasks = serializers.IntegerField(
        allow_null=True,
        help_text="With so many tasks it runs, and grows to `tasks` while it does; null: with all.",
    )
    gpus_per_task = serializers.IntegerField()
    milli_per_gpu = serializers.IntegerField(help_text="1000 is a whole GPU.")
    total_milli = serializers.IntegerField(help_text="GPU milli of the whole gang.")
    priority = serializers.IntegerField()
    preemptible = serializers.BooleanField()
    time_limit_s = serializers.IntegerField(allow_null=True)
    submitted_at = serializers.DateTimeField()
    started_at = serializers.DateTimeField(allow_null=True)
    ended_at = serializers.DateTimeField(allow_null=True)
    attempt_count = serializers.IntegerField()
    exit_code = serializers.IntegerField(allow_null=True)
    verdict = VerdictSummary(allow_null=True)

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
    node = Reference()
    state = serializers.ChoiceField(ATTEMPT_STATES)
    status_message = serializers.CharField(allow_blank=True, help_text="What holds it up, as a message.")
    running_at = serializers.DateTimeField(allow_null=True)
    ended_at = serializers.DateTimeField(allow_null=True)
    exit_code = serializers.IntegerField(allow_null=True)
    out_of_memory = serializers.BooleanField(source="oom")
    peak_memory_mib = serializers.IntegerField(allow_null=True)
    eviction_requested_at = serializers.DateTimeField(
        allow_null=True, help_text="When it alone was asked to leave, while the others of its attempt go on."
    )
    gpus = TaskGpu(many=True, source="allocations")


class RelatedJob(ResponseSerializer):
    """A related job; its names are null where the reader may not see it."""

    job = Reference(allow_null=True, help_text="null: a job that you may not see.")
    project = Reference(allow_null=True)

    @staticmethod
    def get_job(row: Any, context: JobContext) -> JobRow | None:
        return row if row.public_id in context.seen else None

    @staticmethod
    def get_project(row: Any, context: JobContext) -> Project | None:
        return row.project if row.public_id in context.seen else None


class DependencyJob(RelatedJob):
    """A job before or after this one."""

    state = serializers.ChoiceField(STATES)


class PreemptedJob(RelatedJob):
    """An attempt of another job that was preempted for this one."""

    reason = serializers.CharField(
        source="stop_reason", help_text="preempted: inside the project; reclaimed: from another one."
    )
    requested_at = serializers.DateTimeField(source="stop_requested_at")
    ended_at = serializers.DateTimeField(allow_null=True, help_text="null: it has not let go yet.")

    @staticmethod
    def get_job(row: AttemptRow, context: JobContext) -> JobRow | None:
        return RelatedJob.get_job(row.job, context)

    @staticmethod
    def get_project(row: AttemptRow, context: JobContext) -> Project | None:
        return RelatedJob.get_project(row.job, context)


class Rendezvous(ResponseSerializer):
    """Where the ranks of a gang connect."""

    address = serializers.CharField(allow_blank=True, help_text="Blank: all stand on its node, which knows.")
    port = serializers.IntegerField()
    node_network = serializers.BooleanField(help_text="true: on the network of their nodes.")


class Attempt(ResponseSerializer):
    """One run of a job."""

    number = serializers.IntegerField()
    state = serializers.ChoiceField(ATTEMPT_STATES)
    reason = serializers.CharField(allow_blank=True)
    message = serializers.CharField(allow_blank=True)
    pool = Reference()
    created_at = serializers.DateTimeField()
    running_at = serializers.DateTimeField(allow_null=True)
    ready_at = serializers.DateTimeField(allow_null=True, help_text="A workspace's server answered.")
    checkpoint_at = serializers.DateTimeField(
        allow_null=True, help_text="When it last said that it saved its work; null: it has not."
    )
    progress = TaskProgress(allow_null=True, help_text="null: it told none.")
    energy_joules = serializers.FloatField(
        allow_null=True,
        help_text="What its GPUs used so far, of each the part that it held; null: not measured.",
    )
    rendezvous = Rendezvous(
        allow_null=True, help_text="null: its tasks cannot reach each other, or it has one."
    )
    stop_requested_at = serializers.DateTimeField(allow_null=True)
    preempted_for = RelatedJob(allow_null=True, help_text="The waiting job for which it was asked to leave.")
    ended_at = serializers.DateTimeField(allow_null=True)
    exit_code = serializers.IntegerField(allow_null=True)
    tasks = Task(many=True, source="task_rows")

    @staticmethod
    def get_progress(row: AttemptRow, context: JobContext) -> AttemptProgress | None:
        return attempt_progress(row)

    @staticmethod
    def get_energy_joules(row: AttemptRow, context: JobContext) -> float | None:
        return attempt_energy_joules(row)

    @staticmethod
    def get_rendezvous(row: AttemptRow, context: JobContext) -> RendezvousRow | None:
        return getattr(row, "rendezvous", None)


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


class ExtensionSummary(ResponseSerializer):
    """A request for more time of a running job."""

    id = serializers.CharField(source="public_id")
    job = Reference()
    attempt = serializers.IntegerField(source="attempt.number")
    state = serializers.ChoiceField(["waiting", "granted", "refused", "lapsed"])
    extra_s = serializers.IntegerField()
    reason = serializers.CharField(allow_blank=True)
    requested_by = UserReference()
    requested_at = serializers.DateTimeField()
    impact_known = serializers.BooleanField(
        help_text="false: the scheduler did not say in time whom it delays."
    )
    delayed_count = serializers.IntegerField(help_text="Waiting jobs that would start later.")
    reservations = serializers.ListField(
        child=serializers.CharField(), help_text="Reservations for others in the time that is added."
    )
    decided_by = UserReference(allow_null=True, help_text="null: nobody, or the scheduler at once.")
    decided_at = serializers.DateTimeField(allow_null=True)
    answer = serializers.CharField(allow_blank=True)


class StartDelay(ResponseSerializer):
    """A pending job that would start later."""

    job = serializers.CharField(allow_null=True, help_text="null: a job that you may not see.")
    by_s = serializers.FloatField(allow_null=True, help_text="null: nobody knows by how much.")


class ExtensionDetail(ExtensionSummary):
    """A request for more time with the jobs that it delays."""

    delays = StartDelay(many=True, help_text="The longest first, at most 20.")

    @staticmethod
    def get_delays(row: TimeLimitExtension, seen: Collection[str]) -> list[dict[str, Any]]:
        """Return the jobs that it delays, named only when in ``seen``."""
        return [{**each, "job": each["job"] if each["job"] in seen else None} for each in row.delays]


class TopologyConstraint(ResponseSerializer):
    """How close together the tasks of a job are placed, by levels of a topology."""

    topology = serializers.CharField()
    required = serializers.CharField(allow_null=True)  # type: ignore[assignment]
    preferred = serializers.CharField(allow_null=True)


class JobVolume(ResponseSerializer):
    """A volume that a job mounts."""

    volume = serializers.CharField(help_text="Its name.")
    target = serializers.CharField(help_text="Where it stands in the container.")
    read_only = serializers.BooleanField(  # type: ignore[assignment]
        help_text="Asked for; a volume that is read only is so anyway."
    )


class JobSecret(ResponseSerializer):
    """A secret of a job, by name."""

    optional_fields = frozenset({"variable", "file"})

    secret = serializers.CharField()
    owner_type = serializers.CharField(help_text="me or project.")
    variable = serializers.CharField()
    file = serializers.CharField()


class JobDetail(Job):
    """A job with all details."""

    verdict = VerdictDetail(allow_null=True)
    interval = StartInterval(allow_null=True, help_text="null: it does not wait, or no start is foreseen.")
    interval_missing = serializers.CharField(
        allow_null=True, help_text="Why no start is foreseen; null: one is, or it was not worked out yet."
    )
    fair_share_breakdowns = FairShareBreakdownDetail(
        many=True,
        source="context.breakdowns",
        help_text="While it waits: of its project, then of those above it that you may see.",
    )
    forecasts = StartForecast(many=True, source="context.revisions", help_text="Newest first, at most 20.")
    desired_state = serializers.ChoiceField([word.value for word in DesiredState])
    image_digest = serializers.CharField(
        allow_blank=True,
        help_text="The image of all its attempts; blank: its first start sets it, or it has none.",
    )
    template = Reference(allow_null=True)
    gpu_model = serializers.CharField(allow_blank=True)
    min_gpu_memory_mib = serializers.IntegerField(allow_null=True)
    mig_profile = serializers.CharField(allow_blank=True, help_text="Blank: whole GPUs.")
    min_compute_capability = serializers.FloatField(allow_null=True)
    topology_constraint = TopologyConstraint(allow_null=True, help_text="null: anywhere.")
    cpu_milli = serializers.IntegerField(help_text="For each task.")
    memory_mib = serializers.IntegerField(help_text="For each task.")
    shm_mib = serializers.IntegerField()
    termination_grace_s = serializers.IntegerField()
    max_attempts = serializers.IntegerField()
    retry_on_failure = serializers.BooleanField(help_text="true: a command that fails is tried again too.")
    launcher = serializers.CharField(help_text="How its tasks are told of each other.")
    command = serializers.ListField(child=serializers.CharField(allow_blank=True))
    env = serializers.DictField(
        child=serializers.CharField(allow_blank=True),
        allow_null=True,
        source="context.private.env",
        help_text="null for those who may not control the job: values may be secret.",
    )
    volumes = JobVolume(many=True)
    secrets = JobSecret(
        many=True,
        allow_null=True,
        source="context.private.secrets",
        help_text="null for those who may not control the job.",
    )
    version = serializers.IntegerField()
    is_placeholder = serializers.BooleanField(
        help_text="Known only by its container, which was kept after a restore: its request is not known."
    )
    attempts = Attempt(many=True, source="context.attempts")
    layouts = MeasuredLayout(
        many=True,
        source="context.layouts",
        help_text="Where jobs like it ran faster, fastest first; empty where no two layouts are known to differ.",
    )
    preempted_jobs = PreemptedJob(
        many=True,
        source="context.preempted_attempts",
        help_text="Who was asked to leave for it, newest first, at most 20.",
    )
    dependencies = DependencyJob(
        many=True, source="context.chain.dependencies", help_text="The jobs after which it starts."
    )
    ignore_dependency_failure = serializers.BooleanField(help_text="It starts after them however they end.")
    dependents = DependencyJob(
        many=True,
        source="context.chain.dependents",
        help_text="The jobs that start after it, newest first, at most 20.",
    )
    ends_at = serializers.DateTimeField(
        allow_null=True, help_text="When its time limit ends it; null: no limit, or it does not run."
    )
    idle = IdleDetail(
        allow_null=True, source="context.idle", help_text="null: no workspace that runs on GPUs."
    )
    extensions = ExtensionSummary(
        many=True,
        source="context.extensions",
        help_text="More time that was asked for, newest first, at most 20.",
    )
    timeline = TimelineEvent(
        many=True,
        source="context.events",
        help_text="The newest 100 events, oldest first; all of them under events/.",
    )

    @staticmethod
    def get_interval(row: JobRow, context: JobContext) -> JobVerdict | None:
        verdict = with_forecast(current_verdict(row))
        return None if no_forecast_reason(row, verdict) else verdict

    @staticmethod
    def get_interval_missing(row: JobRow, context: JobContext) -> str | None:
        return no_forecast_reason(row, current_verdict(row))

    @staticmethod
    def get_ends_at(row: JobRow, context: JobContext) -> dt.datetime | None:
        return ends_at(row, context.attempts[0] if context.attempts else None)


class Workspace(Job):
    """A workspace: a job with a tool that opens in a browser."""

    ready = serializers.BooleanField(help_text="Its server answers: it can be opened.")
    ready_at = serializers.DateTimeField(allow_null=True, source="ready_since")
    suspend_at = serializers.DateTimeField(
        allow_null=True,
        source="suspends_at",
        help_text="It is idle, and suspended then unless somebody uses or keeps it.",
    )
    tool = serializers.CharField(allow_blank=True, source="environment.tool")
    address = serializers.CharField(help_text="Its own origin, for browsers that were handed over.")

    @staticmethod
    def get_ready(row: Any, context: None) -> bool:
        return row.ready_since is not None

    @staticmethod
    def get_address(row: JobRow, context: None) -> str:
        return workspace_origin(row)


class WorkspaceAccess(ResponseSerializer):
    """How to open a workspace."""

    post_to = serializers.CharField(
        allow_null=True, help_text="A browser posts the form field `ticket` to this address."
    )
    ticket = serializers.CharField(allow_null=True, help_text="Single use, 30 s; null when a token asked.")
    page = serializers.CharField(help_text="The portal's page that hands a signed-in browser over.")
