"""Stores the checkpoints that nodes list, decides which are removed and from which an attempt starts; pins."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone
from django.utils.translation import gettext as _

from agents.engines.replies import ListedCheckpoint
from portal.access import Permission, can, require_permission
from portal.domain.jobs.checkpoints import (
    PARENT_PREFIX,
    CheckpointPlace,
    MountedVolume,
    Validity,
    checkpoint_place,
    newest_valid,
    surplus,
)
from portal.domain.states import LIVE_ATTEMPT_STATES, AttemptState, JobKind
from portal.domain.storage.volumes import VolumeKind, home_mount_path
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict
from portal.live_events import publish_on_commit
from portal.models import Attempt, AttemptObservation, Checkpoint, Job, User, Volume
from portal.outbox import notify_nodes
from portal.services.audit import record_action
from portal.services.lifecycle.state_events import record_event

UNSAVED_JOB = "JOB"
"""Stands for the id of a job that is not submitted yet."""
MAX_OTHER_JOBS = 500
"""Jobs whose folders are compared; with more, only the folder of the job itself counts."""


# -- places ----------------------------------------------------------------------------------------


def mounted_volumes(
    owner: User, references: Sequence[Mapping[str, Any]], rows: Mapping[str, Volume]
) -> list[MountedVolume]:
    """Return the home and the volumes of a job; ``rows``: those volumes by name, unknown ones are left out."""
    home = MountedVolume("", home_mount_path(owner.username), True)
    return [home] + [
        MountedVolume(
            row.name,
            each["target"],
            not (each["read_only"] or row.read_only or row.kind == VolumeKind.SCRATCH.value),
        )
        for each in references
        if (row := rows.get(each["volume"])) is not None
    ]


def job_checkpoint_place(job: Job, rows: Mapping[str, Volume]) -> CheckpointPlace | None:
    """Return where a job keeps its checkpoints; None if it keeps none, or if the volume is not available."""
    if job.kind != JobKind.TRAINING.value:
        return None
    place = checkpoint_place(job.checkpoint_dir, job.public_id, mounted_volumes(job.owner, job.volumes, rows))
    return place if isinstance(place, CheckpointPlace) else None


def parent_place(job: Job, place: CheckpointPlace) -> tuple[CheckpointPlace, dt.datetime] | None:
    """Return the folder that a job names in ``checkpoint_dir``, and since when what is saved directly in it counts.

    None if the job names none, or if another job may save there, whose checkpoints would be taken for those of this
    one.
    """
    parent = place.parent
    first = Attempt.objects.filter(job=job).order_by("number").values_list("created_at", flat=True).first()
    if not job.checkpoint_dir or parent is None or first is None:
        return None
    ran_meanwhile = Attempt.objects.filter(Q(ended_at__isnull=True) | Q(ended_at__gt=first))
    others = (
        Job.objects.filter(Exists(ran_meanwhile.filter(job=OuterRef("pk"))), kind=JobKind.TRAINING.value)
        .filter(Q(owner=job.owner_id) | Q(project=job.project_id))
        .exclude(Q(pk=job.pk) | Q(checkpoint_dir=""))
        .select_related("owner")[:MAX_OTHER_JOBS]
    )
    listed = list(others)
    rows = {row.name: row for row in _volumes([each for other in listed for each in other.volumes])}
    shared = (job_checkpoint_place(other, rows) for other in listed)
    same = any(each and each.parent and each.parent[::2] == parent[::2] for each in shared)
    return None if same or len(listed) == MAX_OTHER_JOBS else (parent, first)


def checkpoint_dir_error(
    owner: User, checkpoint_dir: str, references: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return what is wrong with the checkpoint directory of a request, or None."""
    rows = {row.name: row for row in _volumes(references)} if references else {}
    place = checkpoint_place(checkpoint_dir, UNSAVED_JOB, mounted_volumes(owner, references, rows))
    return place if isinstance(place, str) else None


def _volumes(references: Sequence[Mapping[str, Any]]) -> list[Volume]:
    return list(Volume.objects.filter(owner__isnull=True, name__in=[each["volume"] for each in references]))


def is_in_home(job: Job) -> bool:
    """Return True if a job keeps its checkpoints in the home of its owner."""
    place = job_checkpoint_place(job, {row.name: row for row in _volumes(job.volumes)})
    return place is not None and not place.volume


def source_place(job: Job, source: Checkpoint, rows: Mapping[str, Volume]) -> CheckpointPlace | None:
    """Return where ``job`` sees the folder of another job's checkpoint; None where it does not mount it."""
    volumes = {row.name: row for row in _volumes(source.job.volumes)} if source.job.volumes else {}
    place = job_checkpoint_place(source.job, volumes)
    if place is None or (not place.volume and job.owner_id != source.job.owner_id):
        return None
    mounts = mounted_volumes(job.owner, job.volumes, rows)
    target = next((each.target for each in mounts if each.name == place.volume), None)
    return None if target is None else place._replace(target=target)


def resume_error(user: User, checkpoint: str, job: Job) -> str | None:
    """Return why ``job``, not saved yet, cannot start from a checkpoint (public id), or None."""
    row = Checkpoint.objects.select_related("job__owner", "job__project").filter(public_id=checkpoint).first()
    if row is None or not can(user, Permission.CONTROL, row.job):
        return _("There is no such checkpoint, or you may not control its job.")
    if row.validity != Validity.VALID:
        return (
            _("It is {validity}, not valid. {problem}")
            .format(validity=row.validity, problem=row.problem)
            .strip()
        )
    if row.removal_requested_at is not None:
        return _("It is being deleted.")
    if source_place(job, row, {each.name: each for each in _volumes(job.volumes)}) is None:
        return _(
            "The job does not mount the volume, or the home, with the checkpoints of {public_id}."
        ).format(public_id=row.job.public_id)
    return None


# -- users -----------------------------------------------------------------------------------------


def do_pin_checkpoint(actor: User, row: Checkpoint, pinned: bool) -> Checkpoint:
    """Keep a checkpoint whatever the retention of its job, or leave it to retention again."""
    require_permission(actor, Permission.CONTROL, row.job)
    with transaction.atomic():
        locked = Checkpoint.objects.select_for_update(of=("self",)).select_related("job").get(pk=row.pk)
        if pinned and locked.removal_requested_at is not None:
            raise Conflict(_("It is being deleted."), code="checkpoint_removed")
        if pinned != (locked.pinned_at is not None):
            _pin(locked, actor.username if pinned else "")
            action = "checkpoint.pin" if pinned else "checkpoint.unpin"
            record_action(actor, action, locked.job, after={"checkpoint": locked.name})
    return locked


def do_check_checkpoints(actor: User, job: Job) -> None:
    """Let the node of a running job list and check its checkpoints again, after it has reported one."""
    require_permission(actor, Permission.CONTROL, job)
    with transaction.atomic():
        running = Attempt.objects.filter(job=job, state=AttemptState.RUNNING.value)
        attempt = running.filter(checkpoint_at__isnull=False).first()
        if attempt is None:
            raise Conflict(
                _("Checkpoints are checked while the job runs, once it has reported one."),
                code="no_checkpoint_reported",
            )
        AttemptObservation.objects.filter(attempt=attempt).update(checkpoints_listed_at=None)
        nodes = attempt.task_rows.values_list("node__public_id", flat=True)
        notify_nodes(dict.fromkeys(nodes, ("start", job.public_id)))


def pin_for_resume(actor: User, checkpoint: str) -> None:
    """Pin the checkpoint from which a new job starts. Raise Conflict if it was removed in the meantime."""
    row = Checkpoint.objects.select_for_update().filter(public_id=checkpoint).first()
    if row is None or row.removal_requested_at is not None:
        raise Conflict(_("The checkpoint is being deleted."), code="checkpoint_removed")
    if row.pinned_at is None:
        _pin(row, actor.username)


def _pin(row: Checkpoint, by: str) -> None:
    row.pinned_at, row.pinned_by = timezone.now() if by else None, by
    row.save(update_fields=["pinned_at", "pinned_by"])


# -- for the scheduler -----------------------------------------------------------------------------


def listing_is_due(attempt: Attempt) -> bool:
    """Return True if the attempt reported a checkpoint since its checkpoints were last listed."""
    seen: AttemptObservation | None = getattr(attempt, "observation", None)
    listed_at = seen.checkpoints_listed_at if seen else None
    return attempt.checkpoint_at is not None and (listed_at is None or listed_at < attempt.checkpoint_at)


def record_listing(
    attempt: Attempt, listed: Sequence[ListedCheckpoint], problem: str, *, asked_at: dt.datetime
) -> list[tuple[str, float]]:
    """Store what a node listed at ``asked_at``; return the checkpoints to remove, as names with times.

    With a ``problem`` the node may not have seen all.
    """
    known = Checkpoint.objects.filter(job=attempt.job_id)
    if not listed and not problem and attempt.checkpoint_at is None and not known.exists():
        return []
    with transaction.atomic():
        job = Job.objects.select_for_update(no_key=True, of=("self",)).get(pk=attempt.job_id)
        rows = {row.name: row for row in job.checkpoints.select_for_update()}
        for each in listed:
            row = rows.pop(each.name, None) or Checkpoint(job=job, name=each.name)
            saved_at = dt.datetime.fromtimestamp(each.saved_s, dt.UTC)
            if row.pk and row.saved_at != saved_at:
                row.removal_requested_at = None  # written again
            before = [getattr(row, name) for name in _LISTED]
            now = [each.step, each.size_bytes, saved_at, each.validity, _problem(each)]
            if row.pk is None or before != now:
                for name, value in zip(_LISTED, now, strict=True):
                    setattr(row, name, value)
                row.save()
        if not problem:
            Checkpoint.objects.filter(pk__in=[row.pk for row in rows.values()]).delete()
        kept = list(job.checkpoints.all())
        pinned = {row.name for row in kept if row.pinned_at is not None or row.name.startswith(PARENT_PREFIX)}
        for row in surplus(kept, job.checkpoint_keep_last, job.checkpoint_keep_every, pinned):
            if row.removal_requested_at is None:
                row.removal_requested_at = timezone.now()
                row.save(update_fields=["removal_requested_at"])
        record_listing_problem(attempt, problem, asked_at=asked_at)
        publish_on_commit(f"job.{job.public_id}", {"kind": "checkpoints"})
        gone = [row for row in job.checkpoints.all() if row.removal_requested_at is not None]
        return [(row.name, row.saved_at.timestamp()) for row in gone]


def _problem(row: ListedCheckpoint) -> str:
    """Return why a restart does not use it, and for one that cannot be checked what to do."""
    if row.validity != Validity.UNCHECKED:
        return row.problem
    advice = stored_text(
        "Its format does not show whether it was written completely. Write an empty file .complete in the folder, or "
        "NAME.complete beside the file, after each save: then restarts use it."
    )
    return row.problem or advice


def record_newest(attempt: Attempt, row: ListedCheckpoint | None) -> None:
    """Record a listed checkpoint that is newer than the last one whose report was read."""
    if row is None or attempt.checkpoint_at is None:
        return
    saved_at = dt.datetime.fromtimestamp(row.saved_s, dt.UTC)
    if attempt.checkpoint_at < saved_at <= timezone.now():
        older = Attempt.objects.filter(pk=attempt.pk, checkpoint_at__lt=saved_at)
        if older.update(checkpoint_at=saved_at, checkpoint_step=row.step):
            attempt.checkpoint_at, attempt.checkpoint_step = saved_at, row.step


def record_event_files(attempt: Attempt, event_files: bool | None) -> None:
    """Store whether the node found event files of TensorBoard; None: it did not look."""
    if event_files is not None:
        AttemptObservation.objects.bulk_create(
            [AttemptObservation(attempt=attempt, event_files=event_files)],
            update_conflicts=True,
            unique_fields=["attempt"],
            update_fields=["event_files"],
        )


def record_listing_problem(attempt: Attempt, problem: str, *, asked_at: dt.datetime) -> None:
    """Store why the checkpoints of an attempt could not be listed."""
    AttemptObservation.objects.update_or_create(
        attempt=attempt, defaults={"checkpoints_listed_at": asked_at, "listing_problem": problem[:300]}
    )


def newest_of_job(job: Job) -> Checkpoint | None:
    """Return the newest valid checkpoint of a job as its node last listed it."""
    return newest_valid(list(job.checkpoints.all()))


_LISTED = ("step", "size_bytes", "saved_at", "validity", "problem")


def needs_resume_decision(attempt: Attempt) -> bool:
    """Return True if nothing of the attempt may start before its node listed the checkpoints of its job."""
    job = attempt.job
    restarted = attempt.number > 1 or job.resume_from
    return bool(restarted) and not attempt.resume_decided and job.kind == JobKind.TRAINING.value


def decide_resume(attempt: Attempt, place: CheckpointPlace | None, row: ListedCheckpoint | None) -> None:
    """Store the checkpoint from which all tasks of an attempt start; the first decision is final."""
    with transaction.atomic():
        locked = Attempt.objects.select_for_update(no_key=True).select_related("job").get(pk=attempt.pk)
        if not locked.resume_decided and locked.state in LIVE_ATTEMPT_STATES:
            locked.resume_decided = True
            if row is not None and place is not None:
                locked.resume_target, locked.resume_path = place.target, place.entry(row.name).path
                locked.resume_step = row.step
            locked.save(update_fields=["resume_decided", "resume_target", "resume_path", "resume_step"])
            step = row.step if row else None
            start = stored_text(
                f"It starts from the checkpoint {row.name}{'' if step is None else f', step {step:,}'}."
                if row
                else "It starts without a checkpoint."
            )
            record_event(locked, "resume", "", start)
            nodes = locked.task_rows.values_list("node__public_id", flat=True)
            notify_nodes(dict.fromkeys(nodes, ("start", locked.job.public_id)))
    for name in ("resume_decided", "resume_target", "resume_path", "resume_step"):
        setattr(attempt, name, getattr(locked, name))


def newest_listed(listed: Sequence[ListedCheckpoint]) -> ListedCheckpoint | None:
    """Return the newest valid one of a node's list."""
    by_name = {each.name: each for each in listed}
    rows = [
        Checkpoint(
            name=each.name, step=each.step, validity=each.validity,
            saved_at=dt.datetime.fromtimestamp(each.saved_s, dt.UTC),
        )
        for each in listed
    ]  # fmt: skip
    newest = newest_valid(rows)
    return by_name[newest.name] if newest else None
