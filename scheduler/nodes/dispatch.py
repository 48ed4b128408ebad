"""Applies one decision to one node: start, stop, task end, log. Every step is idempotent.

The order is always: record the intent, send the command, record the answer. A crash in between leaves a state
that the next pass completes.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Mapping, Sequence

from django.db import IntegrityError
from django.db.models import Exists, OuterRef, QuerySet

from agents import verbs
from agents.engines.replies import (
    LOG_CHUNK_BYTES,
    AgentError,
    Container,
    LogChunk,
    OutcomeUnknownError,
    StartResult,
    TaskKey,
)
from agents.node.spec.egress import OPEN
from agents.node.spec.task_spec import CAN_EXPAND_DEVICE_PATTERNS, CAN_MOUNT_VOLUMES
from portal.domain.formatting import format_distinct_memories, format_memory
from portal.domain.jobs.reasons import EndReason, end_message
from portal.domain.nodes.node_breaker import STUCK_AFTER_KILL_S, IncidentKind
from portal.domain.scheduling.policy_settings import TASK_DISK_LIMIT
from portal.domain.states import LIVE_ATTEMPT_STATES, JobKind, RuntimeKind
from portal.domain.stored_texts import stored_text
from portal.errors import FairwayError
from portal.failpoints import failpoint
from portal.models import Attempt, ClusterSettings, EnvironmentRecord, Job, Node, Task
from portal.selectors.jobs.rights import Denial, denials_by_key, usage_of_job
from portal.selectors.nodes.network_policy import container_policy, tracking_exceptions
from portal.selectors.scheduling.settings import pool_settings
from portal.services.environments.pins import pin_job
from portal.services.jobs.attempt_secrets import decrypt_attempt_secret
from portal.services.jobs.code import attempt_code, record_code_commit
from portal.services.jobs.code_archives import read_archive, stored_size
from portal.services.jobs.launching import attempt_gang, attempt_keys
from portal.services.jobs.logs import record_log_progress, write_log_bytes
from portal.services.jobs.retries import exclude_node
from portal.services.jobs.tracking import TRACKING_TOKEN
from portal.services.lifecycle import elastic, job_control
from portal.services.lifecycle.job_control import TaskEnd
from portal.services.nodes import nodes, quarantine
from portal.services.projects.secrets import SecretMissingError, read_job_secrets
from portal.services.sweeps.reports import record_reports
from scheduler.nodes.checkpoints import checkpoint_fields, decide_resume, list_checkpoints_at_end
from scheduler.nodes.image_pulls import CHUNK_BYTES
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.task_spec import (
    OPTIONAL_CAPABILITIES,
    RankAssignment,
    RendezvousUnknownError,
    VolumeNotAllowedError,
    build_task_spec,
    image_reference,
    is_basic_mount,
    read_job_volumes,
)

log = logging.getLogger(__name__)

MAX_LOG_CHUNKS = 16
"""Chunks (256 KiB each) of one log fetched before other logs are served."""


class NextStep(enum.Enum):
    DONE = "done"
    RETRY = "retry"  # the same call again after a delay
    PULL_IMAGE = "pull_image"


RETRYABLE_REFUSALS = frozenset({"gpu_overcommitted", "engine_error", "port_in_use", "code_missing"})
"""Refusals that may disappear within seconds."""

NODE_FAULT_REFUSALS = frozenset({"gpu_overcommitted", "engine_error", "port_in_use", "unknown_gpu"})
"""Refusals that the node may have caused; all others concern the job."""

_END_REASONS = {
    "image_missing": EndReason.IMAGE_MISSING,
    "disk_full": EndReason.DISK_FULL,
}


# -- start -----------------------------------------------------------------------------------------


def denials_by_task(tasks: Iterable[Task]) -> dict[int, Denial]:
    """Return the right that the owner lacks now, for those of the tasks (by id) that may not start."""
    return denials_by_key({task.pk: usage_of_job(task.attempt.job) for task in tasks})


def start_task(
    connection: NodeConnection, task: Task, *, attempts_left: int, denial: Denial | None = None
) -> NextStep:
    """Start one task on its node; a task of a gang is prepared first, until all others are prepared too.

    Nothing is opened or fetched for a task with a ``denial``; rights are read again when the start is recorded.
    Raise OutcomeUnknownError when no answer came, LeaseLostError when the lease is lost.
    """
    attempt, job = task.attempt, task.attempt.job
    prepares = job_control.should_prepare(task, attempt)
    if prepares and not connection.engine.supports(verbs.PREPARE):
        # an older agent has a single start step, which follows when the others are prepared
        job_control.record_task_prepared(task.pk)
        return NextStep.DONE
    step = "prepare" if prepares else "start"
    try:
        if denial is not None:
            raise job_control.OwnerNotPermittedError(str(denial))
        if not decide_resume(connection, task):
            return NextStep.RETRY  # the node of the lowest rank decides for all
        spec = _spec(connection, task)
        if "code_archive" in spec:
            _send_code(connection, job)
        failpoint(f"{step}.before_mark")
        if not job_control.mark_task_sent(task):
            return NextStep.DONE
        failpoint(f"{step}.marked")
        epoch = connection.epoch()
        failpoint(f"{step}.before_send")
        verb = verbs.PREPARE if prepares else verbs.START
        started = connection.engine.request(verb, StartResult.from_wire, epoch=epoch, spec=spec)
    except job_control.OwnerNotPermittedError as error:
        log.info("task %s was not started: %s", task.pk, error)
        reason = EndReason.OWNER_NOT_PERMITTED
        elastic.end_tasks([task.pk], reason, message=end_message(reason, detail=error))
        return NextStep.DONE
    except AgentError as error:
        failpoint(f"{step}.refused")
        if error.code == "stale_epoch":
            raise OutcomeUnknownError(error.message) from error  # a new hello brings a higher epoch
        return _handle_refusal(connection.node, task, error, attempts_left)
    failpoint(f"{step}.answered")
    if prepares:
        job_control.record_task_prepared(task.pk)
        failpoint("prepare.recorded")
    if started.state == "created":
        return NextStep.DONE
    if started.state == "exited":
        return NextStep.RETRY  # it has already ended; the next reconciliation records how
    job_control.record_task_running(task.pk, container=started.container, ports=started.ports)
    failpoint("start.recorded")
    log.info("started %s/%s/%s on %s", job.public_id, attempt.number, task.rank, connection.node.name)
    return NextStep.DONE


def _spec(connection: NodeConnection, task: Task) -> dict[str, object]:
    attempt, job = task.attempt, task.attempt.job
    if task.node.runtime != RuntimeKind.PROCESS.value and not pin_job(task):
        raise AgentError(
            "image_missing", stored_text(f"The digest of {job.environment.image} is not known yet.")
        )
    gpus = task.allocations.order_by("gpu__index").values_list("gpu__uuid", "milli")
    is_workspace = job.kind == JobKind.WORKSPACE.value
    secret = decrypt_attempt_secret(attempt) if attempt.secret and is_workspace else ""
    cluster = ClusterSettings.objects.get(id=1)
    settings = pool_settings(attempt.pool, cluster.policy)
    assignment = RankAssignment(
        attempt.number,
        task.rank,
        tuple(gpus),
        attempt_gang(attempt, attempt_keys(attempt)),
        getattr(attempt, "rendezvous", None),
        task.gang_address,
        attempt_code(attempt, task.node.runtime, settings),
    )
    capabilities = connection.engine.hello.get("capabilities", ())
    try:
        volumes = read_job_volumes(job)
        spec = build_task_spec(
            cluster.cluster_id, job, assignment, task.node, volumes, secret, read_job_secrets(job)
        )
    except RendezvousUnknownError as error:
        raise AgentError(
            "rendezvous_unknown", f"{error}; the node of rank 0 reports none. Upgrade its agent."
        ) from error
    except (VolumeNotAllowedError, SecretMissingError) as error:
        raise AgentError("volume_not_allowed", f"{error}.") from error
    if CAN_MOUNT_VOLUMES not in capabilities and not all(map(is_basic_mount, spec["mounts"])):
        raise AgentError("agent_too_old", "its agent does not support volumes. Upgrade it.")
    needed = (
        {CAN_EXPAND_DEVICE_PATTERNS}
        if any(set("*?[") & set(each) for each in spec.get("devices", ()))
        else set()
    )
    if unknown := sorted((OPTIONAL_CAPABILITIES & spec.keys() | needed) - set(capabilities)):
        raise AgentError(
            "agent_too_old", stored_text(f"its agent does not support {', '.join(unknown)}. Upgrade it.")
        )
    labels: dict[str, object] = {"owner": job.owner.public_id, "project": job.project.public_id}
    if task.world_size_at_start is not None:
        labels |= {"tasks": task.world_size_at_start, "tasks_min": job.required_tasks, "tasks_max": job.tasks}
    # not part of the digest, so that tasks started before an agent knew these fields still match
    if settings[TASK_DISK_LIMIT]:
        labels["disk_mib"] = int(settings[TASK_DISK_LIMIT])
    labels |= checkpoint_fields(task, volumes)
    allowed = container_policy(attempt.pool, job.project)
    policy = allowed.network
    if allowed.user_namespaces:
        labels["user_namespaces"] = True
    if policy["mode"] != OPEN:
        if spec.get("host_network") or spec.get("network"):
            raise AgentError(
                "volume_not_allowed",
                "its project's network policy cannot be enforced on the host network.",
            )
        if "egress" not in capabilities:
            raise AgentError("agent_too_old", "its agent does not support network policies. Upgrade it.")
        labels["egress"] = policy
    if TRACKING_TOKEN in spec["env"]:
        labels["egress_exceptions"] = tracking_exceptions(str(policy["mode"]), job.project)
    return spec | {key: value for key, value in labels.items() if key in capabilities}


def _send_code(connection: NodeConnection, job: Job) -> None:
    """Send the archive with the code of a job, from where an earlier transfer ended. Raise AgentError."""
    size = stored_size(job.project, job.code_archive)
    if size is None:
        raise AgentError("code_refused", "The archive of its code is no longer stored. Upload it again.")
    offset = connection.engine.load(job.code_archive, 0, b"")
    while offset < size:
        piece = read_archive(job.project, job.code_archive, offset, CHUNK_BYTES)
        offset = connection.engine.load(job.code_archive, offset, piece)


def _handle_refusal(node: Node, task: Task, refusal: AgentError, attempts_left: int) -> NextStep:
    log.warning("%s refused to start task %s: %s (%s)", node.name, task.pk, refusal.message, refusal.code)
    job_control.record_task_problem(task.pk, refusal.message)
    if refusal.code in RETRYABLE_REFUSALS and attempts_left > 0:
        return NextStep.RETRY
    if refusal.code == "image_missing" and attempts_left > 0:
        return NextStep.PULL_IMAGE
    if refusal.code == "disk_full":
        nodes.record_disk_full(node.pk, refusal.message)
    # before the attempt ends, while it is still the probation attempt of the node
    if refusal.code in NODE_FAULT_REFUSALS:
        quarantine.record_incident(
            node.pk, IncidentKind.START_REFUSED, job=task.attempt.job, message=refusal.message
        )
    retry_on_same_node = refusal.code == "rendezvous_port_in_use"  # the next attempt gets another port
    fail_task(
        node,
        task,
        _END_REASONS.get(refusal.code, EndReason.START_REFUSED),
        refusal.message,
        retry_on_same_node=retry_on_same_node,
    )
    return NextStep.DONE


def fail_task(
    node: Node, task: Task, reason: EndReason, detail: str, *, retry_on_same_node: bool = False
) -> None:
    """End the task that a node refuses to start, or its attempt if that cannot continue without it.

    The job avoids the node afterwards if others are left, unless ``retry_on_same_node``.
    """
    job = task.attempt.job
    replaced = reason is EndReason.IMAGE_MISSING and job.image_attempt is not None  # see pin_job
    if not retry_on_same_node and not replaced:
        exclude_node(job, node)
    image = job.image_digest or image_reference(job.environment) or "the environment"
    message = end_message(reason, node=node.name, detail=detail, image=image)
    elastic.end_tasks([task.pk], reason, message=message)


# -- stop ------------------------------------------------------------------------------------------


def stop_attempt(connection: NodeConnection, attempt: Attempt) -> bool:
    """Stop an attempt on the node and refuse later starts of it; return True when it is gone."""
    ended = _stop(connection, attempt, "stop")
    if ended is None:
        return False
    rows = attempt.task_rows.filter(node=connection.node, container_removed=False).order_by("rank")
    record_task_ends(connection, {pk: ended.get(rank) for pk, rank in rows.values_list("pk", "rank")})
    failpoint("stop.recorded")
    return True


def stop_task(connection: NodeConnection, task: Task) -> bool:
    """Stop one task of an attempt that continues; return True when it is gone.

    When the agent cannot stop single tasks, the whole attempt ends and the job is pending again.
    """
    if not connection.engine.supports(verbs.CAN_STOP_TASKS):
        reason = EndReason(task.eviction_reason or EndReason.GANG_INCOMPLETE)
        job_control.request_stop(task.attempt.pk, reason)
        return False
    ended = _stop(connection, task.attempt, "evict", task.rank)
    if ended is None:
        return False
    record_task_ends(connection, {task.pk: ended.get(task.rank)})
    failpoint("evict.recorded")
    return True


def _stop(
    connection: NodeConnection, attempt: Attempt, step: str, *ranks: int
) -> dict[int, Container] | None:
    """Stop these tasks of an attempt, or all; return those that ended by rank, None while some are left."""
    job, tasks = attempt.job, list(ranks) or None
    failpoint(f"{step}.before_send")
    answer = connection.engine.stop(
        connection.epoch(), job.public_id, attempt.number, grace_s=job.termination_grace_s, tasks=tasks
    )
    failpoint(f"{step}.answered")
    if answer.gone:
        return {container.key.task: container for container in answer.ended}
    _record_stuck(connection, attempt, answer.stuck_s, *ranks)
    return None


def _record_stuck(connection: NodeConnection, attempt: Attempt, stuck_s: float | None, *ranks: int) -> None:
    """Record that tasks cannot be killed and hold their GPUs, and quarantine the node."""
    if stuck_s is None or stuck_s < STUCK_AFTER_KILL_S:
        return
    message = stored_text(
        f"It was killed but still exists on {connection.node.name}. It holds its "
        "GPUs until it is gone or the node has restarted."
    )
    tasks = attempt.task_rows.filter(node=connection.node, container_removed=False)
    for task in tasks.filter(rank__in=ranks) if ranks else tasks:
        job_control.record_task_problem(task.pk, message)
    quarantine.record_stuck_job(connection.node.pk, attempt.job)


def stop_orphan(connection: NodeConnection, job: str, attempt: int, tasks: list[int] | None = None) -> None:
    """Stop containers whose attempt has ended or is unknown.

    With ``tasks`` only these; other tasks of the attempt may run.
    """
    connection.engine.stop(connection.epoch(), job, attempt, grace_s=5.0, tasks=tasks)


# -- the end ---------------------------------------------------------------------------------------


def record_task_ends(connection: NodeConnection | None, ended: Mapping[int, Container | None]) -> None:
    """Record that tasks (ids) are gone from their node, and how they ended as far as known.

    The node lists the checkpoints of their jobs first, so that an end books only work that is really lost.
    """
    if connection is not None:
        list_checkpoints_at_end(connection, ended)
    failpoint("end.before_record")
    for task_id, container in ended.items():
        if container is not None and container.code_commit:
            task = Task.objects.select_related("attempt__job").get(pk=task_id)
            record_code_commit(task.attempt, container.code_commit, container.code_written_s)
        if container is not None and container.metrics:
            record_reports(
                Job.objects.values_list("pk", flat=True).get(attempts__task_rows=task_id), container.metrics
            )
    failed = _record_ends([_task_end(task_id, container) for task_id, container in ended.items()])
    failpoint("end.recorded")
    for end in failed:
        quarantine.record_task_failure(end.task, end.reason)
        task = Task.objects.select_related("attempt__job", "node").get(pk=end.task)
        if task.attempt.job.exclude_failed_node:
            exclude_node(task.attempt.job, task.node)


def _record_ends(ends: Sequence[TaskEnd]) -> list[TaskEnd]:
    """Record ends together; one by one if that fails, so that an invalid row does not delay other tasks."""
    try:
        return job_control.record_tasks_ended(ends)
    except (FairwayError, IntegrityError):
        if len(ends) == 1:
            raise
        log.exception("the ends of %s tasks are recorded one by one", len(ends))
    failed = []
    for end in ends:
        try:
            failed += job_control.record_tasks_ended([end])
        except (FairwayError, IntegrityError):
            log.exception("the end of task %s was not recorded", end.task)
    return failed


def _task_end(task_id: int, container: Container | None) -> TaskEnd:
    if container is None:
        return TaskEnd(task_id, EndReason.CONTAINER_LOST)
    return TaskEnd(
        task_id,
        end_reason(container),
        container.exit_code,
        oom=container.oom,
        peak_memory_mib=container.peak_memory_mib,
        proof="rebooted" if container.rebooted else "gone",
        details=_disk_details(container),
    )


def end_reason(container: Container) -> EndReason:
    """Return why a container ended without a stop request."""
    if container.rebooted:
        return EndReason.NODE_REBOOTED
    if container.fault == "mps_daemon_lost":
        return EndReason.MPS_DAEMON_LOST
    if container.fault == "disk_limit_exceeded":
        return EndReason.DISK_LIMIT_EXCEEDED
    if container.oom:
        return EndReason.OUT_OF_MEMORY
    if container.exit_code is None:
        return EndReason.CONTAINER_LOST
    return EndReason.COMPLETED if container.exit_code == 0 else EndReason.EXIT_CODE


def _disk_details(container: Container) -> dict[str, object]:
    """Return the message details of a task that exceeded its disk limit."""
    if container.fault != "disk_limit_exceeded" or container.disk_mib is None:
        return {}
    if container.disk_used_mib is None:
        return {"used": "more files than can be counted", "limit": format_memory(container.disk_mib)}
    used, limit = format_distinct_memories(container.disk_used_mib, container.disk_mib)
    return {"used": used, "limit": limit}


# -- logs ------------------------------------------------------------------------------------------


def collect_log(connection: NodeConnection, task: Task, key: TaskKey) -> bool:
    """Copy the rest of an ended task's log; return True when it is complete."""
    if task.log_complete:
        return True
    offset = task.log_bytes
    for _ in range(MAX_LOG_CHUNKS):
        try:
            chunk = connection.engine.request(
                verbs.LOGS, LogChunk.from_wire, **vars(key), offset=offset, limit=LOG_CHUNK_BYTES
            )
        except AgentError as error:
            if error.code != "no_such_container":
                log.warning("%s does not return the log of %s: %s", connection.node.name, key, error.message)
                return False
            # the node no longer has the task: the copy is final
            record_log_progress(task.pk, offset, complete=True)
            return True
        end = chunk.offset + len(chunk.data)
        try:
            offset = write_log_bytes(key.job, key.attempt, key.task, chunk.format, chunk.offset, chunk.data)
        except OSError as error:  # the log stays on the node and is fetched when there is disk space
            log.error("the log of %s cannot be stored: %s", key, error)
            return False
        complete = chunk.eof and offset == end  # a lower offset requests bytes that the copy lacks
        record_log_progress(task.pk, offset, complete=complete)
        if complete:
            return True
        if not chunk.data and offset == end:
            return False
    return False


def remove_ended(connection: NodeConnection, attempts: Iterable[tuple[str, int]]) -> None:
    """Remove ended attempts from the node, once all their tasks there have ended."""
    epoch = connection.epoch()
    for job, attempt in attempts:
        failpoint("remove.before_send")
        try:
            connection.engine.command(verbs.REMOVE, epoch=epoch, job=job, attempt=attempt)
        except AgentError as error:
            log.info("%s could not remove %s/%s yet: %s", connection.node.name, job, attempt, error.message)
        failpoint("remove.answered")


# -- queries -----------------------------------------------------------------------------------------


def active_tasks(node: Node) -> list[Task]:
    """Return the tasks of live attempts that hold GPUs on a node, oldest first. Runs every 10 s per node."""
    return list(
        _active_tasks(node).select_related(
            "attempt__job", "attempt__progress", "attempt__observation", "attempt__rendezvous"
        )
    )


def active_tasks_with_details(node: Node) -> list[Task]:
    """Return the same with the relations that starts and readiness probes need."""
    return list(
        _active_tasks(node).select_related(
            "node",
            "attempt__pool",
            "attempt__progress",
            "attempt__observation",
            "attempt__rendezvous__node",
            "attempt__job__owner",
            "attempt__job__project",
            "attempt__job__environment",
            "attempt__job__replica__version",
        )
    )


def _active_tasks(node: Node) -> QuerySet[Task]:
    tasks = Task.objects.filter(
        node=node, container_removed=False, attempt__state__in=LIVE_ATTEMPT_STATES
    ).order_by("attempt_id", "rank")
    recorded = EnvironmentRecord.objects.filter(job=OuterRef("attempt__job"))
    return tasks.annotate(environment_recorded=Exists(recorded))
