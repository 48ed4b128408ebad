"""Serializers of jobs: list rows, details, attempts, tasks and events."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rest_framework import serializers

from portal.api.serializers.idle import IdleDetail, idle_status
from portal.api.serializers.progress import MeasuredLayout, TaskProgress, measured_layout, progress
from portal.api.serializers.references import Reference, UserReference, reference, timestamp, user_reference
from portal.domain.states import AttemptState, DesiredState, JobKind, JobState
from portal.models import Attempt as AttemptRow
from portal.models import Job as JobRow
from portal.models import JobEvent, JobVerdict
from portal.models import Rendezvous as RendezvousRow
from portal.models import Task as TaskRow
from portal.models import TimeLimitExtension as TimeLimitExtensionRow
from portal.selectors.jobs.idle import IdleStatus
from portal.selectors.jobs.jobs import DependencyChain, attempt_energy_joules
from portal.selectors.jobs.progress import MeasuredLayout as KnownLayoutRow
from portal.selectors.jobs.progress import attempt_progress
from portal.selectors.jobs.time_limits import ends_at
from portal.selectors.scheduling.fair_share_breakdown import FairShareBreakdown
from portal.selectors.scheduling.forecasts import ForecastRevision, no_forecast_reason
from portal.visibility import PrivateFields

STATES = [state.value for state in JobState]
KINDS = [kind.value for kind in JobKind]
ATTEMPT_STATES = [state.value for state in AttemptState]


class VerdictSummary(serializers.Serializer[Any]):
    """Why a job is pending, for lists."""

    code = serializers.CharField()
    message = serializers.CharField()
    since = serializers.DateTimeField()


class VerdictDetail(VerdictSummary):
    """Why a job is pending, with the numbers behind it."""

    details = serializers.DictField()
    jobs_ahead = serializers.ListField(
        child=serializers.CharField(), help_text="Jobs ahead of it, of those you may see."
    )
    jobs_ahead_count = serializers.IntegerField(help_text="All jobs ahead of it that the verdict names.")
    suggestion = serializers.DictField(allow_null=True, help_text="The smallest change that would start it.")
    decided_at = serializers.DateTimeField()


class StartInterval(serializers.Serializer[Any]):
    """Expected start: 8 of 10 intervals from p10 to p90 should contain the actual one."""

    made_at = serializers.DateTimeField()
    p10_at = serializers.DateTimeField()
    p50_at = serializers.DateTimeField()
    p90_at = serializers.DateTimeField()


class StartForecast(StartInterval):
    """One forecast of the history."""

    is_first = serializers.BooleanField(help_text="The first one: it is scored when the job starts.")
    code = serializers.CharField(allow_blank=True, help_text="Its verdict then.")
    moved_s = serializers.FloatField(
        allow_null=True, help_text="By how much the median moved; null on the first."
    )
    jobs_ahead_added = serializers.ListField(
        child=serializers.CharField(), help_text="Jobs ahead that were not, of those you may see."
    )
    jobs_ahead_removed = serializers.ListField(
        child=serializers.CharField(), help_text="Jobs that are not ahead any more."
    )
    started_at = serializers.DateTimeField(allow_null=True)
    covered = serializers.BooleanField(allow_null=True, help_text="null: not scored.")
    score_s = serializers.FloatField(allow_null=True, help_text="Winkler's interval score, alpha 0.2.")


class FairShareStep(serializers.Serializer[Any]):
    """One step of the calculation of a fair share."""

    kind = serializers.ChoiceField(["guaranteed", "round", "remainder"])
    amount_milli = serializers.FloatField(help_text="What it adds.")
    details = serializers.DictField(help_text="What it was made of.")


class FairShareBreakdownDetail(serializers.Serializer[Any]):
    """How the fair share of a project in a pool was calculated in the newest cycle; the steps add up."""

    project = Reference()
    pool = Reference()
    guaranteed_milli = serializers.IntegerField()
    limit_milli = serializers.IntegerField(allow_null=True)
    allocated_milli = serializers.IntegerField()
    requested_milli = serializers.IntegerField(help_text="What it holds and asks for, cut at its limit.")
    fair_share_milli = serializers.FloatField()
    steps = FairShareStep(many=True)


class Job(serializers.Serializer[Any]):
    """A job in lists."""

    id = serializers.CharField()
    name = serializers.CharField()
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


class TaskGpu(serializers.Serializer[Any]):
    """A GPU held by a task."""

    uuid = serializers.CharField()
    index = serializers.IntegerField()
    model = serializers.CharField()
    milli = serializers.IntegerField()
    released_at = serializers.DateTimeField(allow_null=True)


class Task(serializers.Serializer[Any]):
    """One rank of an attempt."""

    rank = serializers.IntegerField()
    node = Reference()
    state = serializers.ChoiceField(ATTEMPT_STATES)
    status_message = serializers.CharField(allow_blank=True, help_text="What holds it up, as a message.")
    running_at = serializers.DateTimeField(allow_null=True)
    ended_at = serializers.DateTimeField(allow_null=True)
    exit_code = serializers.IntegerField(allow_null=True)
    out_of_memory = serializers.BooleanField()
    peak_memory_mib = serializers.IntegerField(allow_null=True)
    eviction_requested_at = serializers.DateTimeField(
        allow_null=True, help_text="When it alone was asked to leave, while the others of its attempt go on."
    )
    gpus = TaskGpu(many=True)


class RelatedJob(serializers.Serializer[Any]):
    """A related job; its names are null where the reader may not see it."""

    job = Reference(allow_null=True, help_text="null: a job that you may not see.")
    project = Reference(allow_null=True)


class DependencyJob(RelatedJob):
    """A job before or after this one."""

    state = serializers.ChoiceField(STATES)


class PreemptedJob(RelatedJob):
    """An attempt of another job that was preempted for this one."""

    reason = serializers.CharField(help_text="preempted: inside the project; reclaimed: from another one.")
    requested_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True, help_text="null: it has not let go yet.")


class Rendezvous(serializers.Serializer[Any]):
    """Where the ranks of a gang connect."""

    address = serializers.CharField(allow_blank=True, help_text="Blank: all stand on its node, which knows.")
    port = serializers.IntegerField()
    node_network = serializers.BooleanField(help_text="true: on the network of their nodes.")


class Attempt(serializers.Serializer[Any]):
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
    tasks = Task(many=True)


class TimelineEvent(serializers.Serializer[Any]):
    """An event of a job."""

    number = serializers.IntegerField()
    at = serializers.DateTimeField()
    kind = serializers.CharField()
    attempt = serializers.IntegerField(allow_null=True)
    before = serializers.CharField(allow_blank=True)
    after = serializers.CharField(allow_blank=True)
    reason = serializers.CharField(allow_blank=True)
    message = serializers.CharField(allow_blank=True)
    actor = serializers.CharField(allow_blank=True)
    details = serializers.DictField()


class ExtensionSummary(serializers.Serializer[Any]):
    """A request for more time of a running job."""

    id = serializers.CharField()
    job = Reference()
    attempt = serializers.IntegerField()
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


class StartDelay(serializers.Serializer[Any]):
    """A pending job that would start later."""

    job = serializers.CharField(allow_null=True, help_text="null: a job that you may not see.")
    by_s = serializers.FloatField(allow_null=True, help_text="null: nobody knows by how much.")


class ExtensionDetail(ExtensionSummary):
    """A request for more time with the jobs that it delays."""

    delays = StartDelay(many=True, help_text="The longest first, at most 20.")


class TopologyConstraint(serializers.Serializer[Any]):
    """How close together the tasks of a job are placed, by levels of a topology."""

    topology = serializers.CharField()
    required = serializers.CharField(allow_null=True)  # type: ignore[assignment]
    preferred = serializers.CharField(allow_null=True)


class JobVolume(serializers.Serializer[Any]):
    """A volume that a job mounts."""

    volume = serializers.CharField(help_text="Its name.")
    target = serializers.CharField(help_text="Where it stands in the container.")
    read_only = serializers.BooleanField(  # type: ignore[assignment]
        help_text="Asked for; a volume that is read only is so anyway."
    )


class JobSecret(serializers.Serializer[Any]):
    """A secret of a job, by name."""

    secret = serializers.CharField()
    owner_type = serializers.CharField(help_text="me or project.")
    variable = serializers.CharField(required=False)
    file = serializers.CharField(required=False)


class JobDetail(Job):
    """A job with all details."""

    verdict = VerdictDetail(allow_null=True)
    interval = StartInterval(allow_null=True, help_text="null: it does not wait, or no start is foreseen.")
    interval_missing = serializers.CharField(
        allow_null=True, help_text="Why no start is foreseen; null: one is, or it was not worked out yet."
    )
    fair_share_breakdowns = FairShareBreakdownDetail(
        many=True, help_text="While it waits: of its project, then of those above it that you may see."
    )
    forecasts = StartForecast(many=True, help_text="Newest first, at most 20.")
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
        help_text="null for those who may not control the job: values may be secret.",
    )
    volumes = JobVolume(many=True)
    secrets = JobSecret(many=True, allow_null=True, help_text="null for those who may not control the job.")
    version = serializers.IntegerField()
    is_placeholder = serializers.BooleanField(
        help_text="Known only by its container, which was kept after a restore: its request is not known."
    )
    attempts = Attempt(many=True)
    layouts = MeasuredLayout(
        many=True,
        help_text="Where jobs like it ran faster, fastest first; empty where no two layouts are known to differ.",
    )
    preempted_jobs = PreemptedJob(
        many=True, help_text="Who was asked to leave for it, newest first, at most 20."
    )
    dependencies = DependencyJob(many=True, help_text="The jobs after which it starts.")
    ignore_dependency_failure = serializers.BooleanField(help_text="It starts after them however they end.")
    dependents = DependencyJob(many=True, help_text="The jobs that start after it, newest first, at most 20.")
    ends_at = serializers.DateTimeField(
        allow_null=True, help_text="When its time limit ends it; null: no limit, or it does not run."
    )
    idle = IdleDetail(allow_null=True, help_text="null: no workspace that runs on GPUs.")
    extensions = ExtensionSummary(
        many=True, help_text="More time that was asked for, newest first, at most 20."
    )
    timeline = TimelineEvent(
        many=True, help_text="The newest 100 events, oldest first; all of them under events/."
    )


class Workspace(Job):
    """A workspace: a job with a tool that opens in a browser."""

    ready = serializers.BooleanField(help_text="Its server answers: it can be opened.")
    ready_at = serializers.DateTimeField(allow_null=True)
    suspend_at = serializers.DateTimeField(
        allow_null=True, help_text="It is idle, and suspended then unless somebody uses or keeps it."
    )
    tool = serializers.CharField(allow_blank=True)
    address = serializers.CharField(help_text="Its own origin, for browsers that were handed over.")


class WorkspaceAccess(serializers.Serializer[Any]):
    """How to open a workspace."""

    post_to = serializers.CharField(
        allow_null=True, help_text="A browser posts the form field `ticket` to this address."
    )
    ticket = serializers.CharField(allow_null=True, help_text="Single use, 30 s; null when a token asked.")
    page = serializers.CharField(help_text="The portal's page that hands a signed-in browser over.")


def job(row: JobRow) -> dict[str, Any]:
    """Return a job for lists; ``row`` was read with ``ROW_RELATIONS``."""
    return {
        "id": row.public_id,
        "name": row.name,
        "kind": row.kind,
        "state": row.state,
        "held": row.held,
        "reason": row.reason,
        "message": row.message,
        "project": reference(row.project),
        "owner": user_reference(row.owner),
        "pool": reference(row.pool),
        "environment": reference(row.environment),
        "tasks": row.tasks,
        "min_tasks": row.min_tasks,
        "gpus_per_task": row.gpus_per_task,
        "milli_per_gpu": row.milli_per_gpu,
        "total_milli": row.total_milli,
        "priority": row.priority,
        "preemptible": row.preemptible,
        "time_limit_s": row.time_limit_s,
        "submitted_at": timestamp(row.submitted_at),
        "started_at": timestamp(row.started_at),
        "ended_at": timestamp(row.ended_at),
        "attempt_count": row.attempt_count,
        "exit_code": row.exit_code,
        "verdict": verdict_summary(current_verdict(row)),
    }


def current_verdict(row: JobRow) -> JobVerdict | None:
    """Return the verdict of a pending job; the last verdict of a running job is outdated."""
    return getattr(row, "verdict", None) if row.state == JobState.PENDING.value else None


def verdict_summary(standing: JobVerdict | None) -> dict[str, Any] | None:
    if standing is None:
        return None
    return {
        "code": standing.code,
        "message": standing.message,
        "since": timestamp(standing.code_since),
    }


def verdict_detail(standing: JobVerdict | None, seen: Collection[str]) -> dict[str, Any] | None:
    """Return why a job is pending; jobs ahead are named only when in ``seen``."""
    if standing is None:
        return None
    return {
        **(verdict_summary(standing) or {}),
        "details": standing.details,
        "jobs_ahead": [one for one in standing.jobs_ahead if one in seen],
        "jobs_ahead_count": len(standing.jobs_ahead),
        "suggestion": standing.suggestion,
        "decided_at": timestamp(standing.decided_at),
    }


def job_detail(
    row: JobRow,
    *,
    attempts: list[AttemptRow],
    layouts: list[KnownLayoutRow],
    preempted_jobs: list[AttemptRow],
    chain: DependencyChain,
    events: list[JobEvent],
    seen: Collection[str],
    moves: list[ForecastRevision],
    fair_share_breakdowns: list[FairShareBreakdown],
    private: PrivateFields,
    extensions: list[TimeLimitExtensionRow],
    idle: IdleStatus | None,
) -> dict[str, Any]:
    """Return a job with all details; other jobs are named only when in ``seen``."""
    missing = no_forecast_reason(row, current_verdict(row))
    return {
        **job(row),
        "verdict": verdict_detail(current_verdict(row), seen),
        "interval": None if missing else start_interval(current_verdict(row)),
        "interval_missing": missing,
        "fair_share_breakdowns": [fair_share_breakdown(one) for one in fair_share_breakdowns],
        "forecasts": [start_forecast(move, seen) for move in moves],
        "desired_state": row.desired_state,
        "image_digest": row.image_digest,
        "template": reference(row.template),
        "gpu_model": row.gpu_model,
        "min_gpu_memory_mib": row.min_gpu_memory_mib,
        "mig_profile": row.mig_profile,
        "min_compute_capability": row.min_compute_capability,
        "topology_constraint": row.topology_constraint,
        "cpu_milli": row.cpu_milli,
        "memory_mib": row.memory_mib,
        "shm_mib": row.shm_mib,
        "termination_grace_s": row.termination_grace_s,
        "max_attempts": row.max_attempts,
        "retry_on_failure": row.retry_on_failure,
        "launcher": row.launcher,
        "command": row.command,
        "env": private.env,
        "volumes": row.volumes,
        "secrets": private.secrets,
        "version": row.version,
        "is_placeholder": row.is_placeholder,
        "attempts": [attempt(one, seen) for one in attempts],
        "layouts": [measured_layout(one) for one in layouts],
        "preempted_jobs": [
            {
                **related_job(one.job, seen),
                "reason": one.stop_reason,
                "requested_at": timestamp(one.stop_requested_at),
                "ended_at": timestamp(one.ended_at),
            }
            for one in preempted_jobs
        ],
        "dependencies": [dependency_job(one, seen) for one in chain.dependencies],
        "ignore_dependency_failure": row.ignore_dependency_failure,
        "dependents": [dependency_job(one, seen) for one in chain.dependents],
        "ends_at": timestamp(ends_at(row, attempts[0] if attempts else None)),
        "idle": idle_status(idle),
        "extensions": [extension_summary(one) for one in extensions],
        "timeline": [timeline_event(one) for one in events],
    }


def extension_summary(one: TimeLimitExtensionRow) -> dict[str, Any]:
    return {
        "id": one.public_id,
        "job": reference(one.job),
        "attempt": one.attempt.number,
        "state": one.state,
        "extra_s": one.extra_s,
        "reason": one.reason,
        "requested_by": user_reference(one.requested_by),
        "requested_at": timestamp(one.requested_at),
        "impact_known": one.impact_known,
        "delayed_count": one.delayed_count,
        "reservations": one.reservations,
        "decided_by": user_reference(one.decided_by) if one.decided_by else None,
        "decided_at": timestamp(one.decided_at),
        "answer": one.answer,
    }


def extension_detail(one: TimeLimitExtensionRow, seen: Collection[str]) -> dict[str, Any]:
    """Return a request with the jobs that it delays, named only when in ``seen``."""
    delays = [{**each, "job": each["job"] if each["job"] in seen else None} for each in one.delays]
    return {**extension_summary(one), "delays": delays}


def start_interval(standing: JobVerdict | None) -> dict[str, Any] | None:
    """Return the expected start of a pending job, or null."""
    if standing is None or standing.p50_at is None:
        return None
    return {
        "made_at": timestamp(standing.forecast_at),
        "p10_at": timestamp(standing.p10_at),
        "p50_at": timestamp(standing.p50_at),
        "p90_at": timestamp(standing.p90_at),
    }


def start_forecast(move: ForecastRevision, seen: Collection[str]) -> dict[str, Any]:
    """Return a forecast and its change from the previous one; other jobs are named only when in ``seen``."""
    row = move.forecast
    return {
        "made_at": timestamp(row.made_at),
        "p10_at": timestamp(row.p10_at),
        "p50_at": timestamp(row.p50_at),
        "p90_at": timestamp(row.p90_at),
        "is_first": row.is_first,
        "code": row.code,
        "moved_s": move.shift_s,
        "jobs_ahead_added": [one for one in move.jobs_ahead_added if one in seen],
        "jobs_ahead_removed": [one for one in move.jobs_ahead_removed if one in seen],
        "started_at": timestamp(row.started_at),
        "covered": row.covered,
        "score_s": row.score_s,
    }


def fair_share_breakdown(one: FairShareBreakdown) -> dict[str, Any]:
    return {
        "project": reference(one.project),
        "pool": reference(one.pool),
        "guaranteed_milli": one.guaranteed_milli,
        "limit_milli": one.limit_milli,
        "allocated_milli": one.allocated_milli,
        "requested_milli": one.requested_milli,
        "fair_share_milli": one.fair_share_milli,
        "steps": one.steps,
    }


def related_job(row: JobRow, seen: Collection[str]) -> dict[str, Any]:
    """Return another job, named only when in ``seen``."""
    if row.public_id not in seen:
        return {"job": None, "project": None}
    return {"job": reference(row), "project": reference(row.project)}


def dependency_job(row: JobRow, seen: Collection[str]) -> dict[str, Any]:
    """Return a job before or after another, named only when in ``seen``."""
    return {**related_job(row, seen), "state": row.state}


def attempt(row: AttemptRow, seen: Collection[str]) -> dict[str, Any]:
    return {
        "number": row.number,
        "state": row.state,
        "reason": row.reason,
        "message": row.message,
        "pool": reference(row.pool),
        "created_at": timestamp(row.created_at),
        "running_at": timestamp(row.running_at),
        "ready_at": timestamp(row.ready_at),
        "checkpoint_at": timestamp(row.checkpoint_at),
        "progress": progress(attempt_progress(row)),
        "energy_joules": attempt_energy_joules(row),
        "rendezvous": rendezvous(getattr(row, "rendezvous", None)),
        "stop_requested_at": timestamp(row.stop_requested_at),
        "preempted_for": related_job(row.preempted_for, seen) if row.preempted_for else None,
        "ended_at": timestamp(row.ended_at),
        "exit_code": row.exit_code,
        "tasks": [task(one) for one in row.task_rows.all()],
    }


def rendezvous(row: RendezvousRow | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {"address": row.address, "port": row.port, "node_network": row.node_network}


def task(row: TaskRow) -> dict[str, Any]:
    """Return a rank with the GPUs that it holds or held."""
    return {
        "rank": row.rank,
        "node": reference(row.node),
        "state": row.state,
        "status_message": row.status_message,
        "running_at": timestamp(row.running_at),
        "ended_at": timestamp(row.ended_at),
        "exit_code": row.exit_code,
        "out_of_memory": row.oom,
        "peak_memory_mib": row.peak_memory_mib,
        "eviction_requested_at": timestamp(row.eviction_requested_at),
        "gpus": [
            {
                "uuid": held.gpu.uuid,
                "index": held.gpu.index,
                "model": held.gpu.model,
                "milli": held.milli,
                "released_at": timestamp(held.ended_at),
            }
            for held in row.allocations.all()
        ],
    }


def timeline_event(row: JobEvent) -> dict[str, Any]:
    return {
        "number": row.pk,
        "at": timestamp(row.at),
        "kind": row.kind,
        "attempt": row.attempt.number if row.attempt else None,
        "before": row.before,
        "after": row.after,
        "reason": row.reason,
        "message": row.message,
        "actor": row.actor,
        "details": row.details,
    }


def workspace(row: JobRow, address: str) -> dict[str, Any]:
    """Return a workspace; ``row`` comes from ``list_workspaces``, which adds ``ready_since``."""
    ready_at = getattr(row, "ready_since", None)
    return {
        **job(row),
        "ready": ready_at is not None,
        "ready_at": timestamp(ready_at),
        "suspend_at": timestamp(getattr(row, "suspends_at", None)),
        "tool": row.environment.tool,
        "address": address,
    }
