"""Lists the checkpoints of jobs on their nodes, removes surplus ones, and decides from which a restart begins."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from django.db.models import Q
from django.utils import timezone

from agents import verbs
from agents.engines.replies import AgentError, CheckpointList, Container, OutcomeUnknownError
from portal.domain.jobs.checkpoints import PARENT_PREFIX, CheckpointPlace, Validity
from portal.domain.states import JobKind
from portal.domain.stored_texts import stored_text
from portal.models import Checkpoint, Job, Task
from portal.services.jobs import checkpoints
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.task_spec import JobVolumes, VolumeNotAllowedError, build_mounts, read_job_volumes

log = logging.getLogger(__name__)

MAX_NAME_LENGTH = 200
"""Of a checkpoint in the database."""


def checkpoint_fields(task: Task, volumes: JobVolumes) -> dict[str, object]:
    """Return the fields of a spec with the checkpoint directory, and the checkpoint to start from.

    A task that joins a running elastic attempt starts from the newest checkpoint of that time.
    """
    attempt, job = task.attempt, task.attempt.job
    place = checkpoints.job_checkpoint_place(job, volumes.volumes)
    if place is None:
        return {}
    fields: dict[str, object] = {"checkpoint_dir": _wire(place)}
    if job.is_elastic and attempt.running_at is not None and (newest := checkpoints.newest_of_job(job)):
        fields["resume_from"] = _wire(place.entry(newest.name))
    elif attempt.resume_path:
        fields["resume_from"] = {"target": attempt.resume_target, "path": attempt.resume_path}
    return fields


def _wire(place: CheckpointPlace) -> dict[str, str]:
    return {"target": place.target, "path": place.path}


def decide_resume(connection: NodeConnection, task: Task) -> bool:
    """Decide once, before its first start, from which checkpoint an attempt starts; False: not decided yet.

    Raise AgentError when the chosen checkpoint is not valid, or the node cannot list them.
    """
    attempt, job = task.attempt, task.attempt.job
    if not checkpoints.needs_resume_decision(attempt):
        return True
    if not is_lowest_rank(task):
        return False
    if not connection.engine.supports(verbs.CHECKPOINTS):
        if job.resume_from and attempt.number == 1:
            raise AgentError("agent_too_old", "its agent cannot check checkpoints. Upgrade it.")
        checkpoints.decide_resume(attempt, None, None)
        return True
    volumes = _read_volumes(job)
    place = checkpoints.job_checkpoint_place(job, volumes.volumes)
    if place is not None and attempt.number > 1:
        listed = update_listing(connection, task, place, volumes)
        if newest := checkpoints.newest_listed(listed.checkpoints):
            checkpoints.decide_resume(attempt, place, newest)
            return True
    if not job.resume_from:
        checkpoints.decide_resume(attempt, None, None)
        return True
    source = Checkpoint.objects.select_related("job__owner").filter(public_id=job.resume_from).first()
    place = checkpoints.source_place(job, source, volumes.volumes) if source else None
    folder = place.parent if place and source and source.name.startswith(PARENT_PREFIX) else place
    rows = _request(connection, task, folder, volumes).checkpoints if folder else ()
    name = source.name.removeprefix(PARENT_PREFIX) if source else ""
    chosen = next((replace(row, name=source.name) for row in rows if source and row.name == name), None)
    if chosen is None or chosen.validity != Validity.VALID:
        raise AgentError(
            "checkpoint_missing",
            stored_text(f"The checkpoint {job.resume_from} is no longer there, or is not complete."),
        )
    checkpoints.decide_resume(attempt, place, chosen)
    return True


def list_checkpoints(connection: NodeConnection, task: Task) -> None:
    """List the checkpoints of a job that reported a new one, and remove surplus ones."""
    try:
        volumes = _read_volumes(task.attempt.job)
        place = checkpoints.job_checkpoint_place(task.attempt.job, volumes.volumes)
        if place is not None:
            update_listing(connection, task, place, volumes)
    except AgentError as error:
        log.warning("%s cannot list the checkpoints of task %s: %s", connection.node.name, task.pk, error)
        checkpoints.record_listing_problem(task.attempt, error.message, asked_at=timezone.now())


def list_checkpoints_at_end(connection: NodeConnection, ended: Mapping[int, Container | None]) -> None:
    """List the checkpoints of tasks that are about to be recorded as ended, each by id with its container if known.

    A failure never delays the end.
    """
    # the end of a short task can be reported before its start is recorded
    ran = Q(running_at__isnull=False) | Q(pk__in=[pk for pk, container in ended.items() if container])
    rows = Task.objects.filter(ran, pk__in=ended, container_removed=False)
    for task in rows.select_related("attempt__job__owner", "attempt__job__project").order_by("pk"):
        if listing_applies(connection, task):
            try:
                list_checkpoints(connection, task)
            except OutcomeUnknownError as error:
                log.warning("the checkpoints of task %s are not listed: %s", task.pk, error)


def listing_applies(connection: NodeConnection, task: Task) -> bool:
    """Return True for the task whose node lists the checkpoints of its attempt."""
    supported = (
        connection.engine.supports(verbs.CHECKPOINTS) and task.attempt.job.kind == JobKind.TRAINING.value
    )
    return supported and is_lowest_rank(task)


def update_listing(
    connection: NodeConnection, task: Task, place: CheckpointPlace, volumes: JobVolumes
) -> CheckpointList:
    """List, store, remove what retention does not keep, and store again; return the last list."""
    attempt, asked_at = task.attempt, timezone.now()
    in_parent = _list_parent_folder(connection, task, place, volumes)
    listed = _with(in_parent, _request(connection, task, place, volumes))
    checkpoints.record_event_files(attempt, listed.event_files)
    surplus = checkpoints.record_listing(attempt, listed.checkpoints, listed.problem, asked_at=asked_at)
    checkpoints.record_newest(attempt, checkpoints.newest_listed(listed.checkpoints))
    if surplus:
        listed = _with(in_parent, _request(connection, task, place, volumes, surplus))
        checkpoints.record_listing(attempt, listed.checkpoints, listed.problem, asked_at=asked_at)
    return listed


def _list_parent_folder(
    connection: NodeConnection, task: Task, place: CheckpointPlace, volumes: JobVolumes
) -> CheckpointList:
    """List what a program saved directly in the folder that its job names, since the job began."""
    found = checkpoints.parent_place(task.attempt.job, place)
    if found is None or not connection.engine.supports(verbs.CAN_LIST_OWN_CHECKPOINTS):
        return CheckpointList(())
    folder, since = found
    listed = _request(connection, task, folder, volumes, own_only=True)
    own = (row for row in listed.checkpoints if row.saved_s >= since.timestamp())
    named = (
        replace(row, name=f"{PARENT_PREFIX}{row.name}")
        for row in own
        if row.name != task.attempt.job.public_id
    )
    return CheckpointList(tuple(row for row in named if len(row.name) <= MAX_NAME_LENGTH), listed.problem)


def _with(in_parent: CheckpointList, listed: CheckpointList) -> CheckpointList:
    return replace(
        listed,
        checkpoints=(*listed.checkpoints, *in_parent.checkpoints),
        problem=listed.problem or in_parent.problem,
    )


def _request(
    connection: NodeConnection,
    task: Task,
    place: CheckpointPlace,
    volumes: JobVolumes,
    remove: list[tuple[str, float]] | None = None,
    *,
    own_only: bool = False,
) -> CheckpointList:
    job = task.attempt.job
    mounts, _ = build_mounts(job, volumes, connection.node)
    mount: Mapping[str, object] = next(each for each in mounts if each["target"] == place.target)
    where = {
        "epoch": connection.epoch(),
        "mount": mount,
        "path": place.path,
        "uid": job.owner.uid,
        "gid": job.owner.gid,
        "own_only": own_only,
        "remove": [[name, saved_s] for name, saved_s in remove or ()],
    }
    return connection.engine.request(verbs.CHECKPOINTS, CheckpointList.from_wire, **where)


def _read_volumes(job: Job) -> JobVolumes:
    try:
        return read_job_volumes(job)
    except VolumeNotAllowedError as error:
        raise AgentError("volume_not_allowed", f"{error}.") from error


def is_lowest_rank(task: Task) -> bool:
    """Return True for the task that stands for its attempt: rank 0, or the lowest that is left of an elastic job.

    The node of another rank may have another home, and would list no checkpoints.
    """
    if not task.attempt.job.is_elastic:
        return task.rank == 0
    lower = Task.objects.filter(attempt=task.attempt_id, rank__lt=task.rank, container_removed=False)
    return not lower.exists()
