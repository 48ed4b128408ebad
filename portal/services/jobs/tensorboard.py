"""Opens TensorBoard on the event files of jobs: a workspace without GPUs that mounts their volumes read-only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from django.utils.translation import gettext as _

from portal.access import Permission, require_permission, visible_environments
from portal.domain.jobs.checkpoints import CheckpointPlace
from portal.domain.jobs.tensorboard import EVENTS_FOLDER, MAX_JOBS, RUNS_VARIABLE, TENSORBOARD_TOOL, run_name
from portal.domain.states import TERMINAL_JOB_STATES, DesiredState, JobKind
from portal.domain.storage.volumes import default_mount_path
from portal.errors import Conflict, Forbidden, InvalidRequest
from portal.models import AttemptObservation, Environment, Job, User, Volume
from portal.services.jobs.checkpoints import job_checkpoint_place
from portal.services.jobs.submission import JobRequest, do_submit_job

TIME_LIMIT_S = 8 * 3600
CPU_MILLI, MEMORY_MIB = 1000, 2048


def do_open_tensorboard(user: User, jobs: Sequence[Job]) -> Job:
    """Return the user's live TensorBoard of exactly these jobs, or submit a new one.

    Raise Forbidden for event files that the user may not read, Conflict where there are none.
    """
    jobs = sorted({job.pk: job for job in jobs}.values(), key=lambda job: job.pk)
    if not 1 <= len(jobs) <= MAX_JOBS:
        raise InvalidRequest(
            fields={"others": _("Choose at most {max_jobs} jobs.").format(max_jobs=MAX_JOBS)}
        )
    if len({job.project_id for job in jobs}) > 1:
        raise InvalidRequest(fields={"others": _("All jobs must be of one project.")})
    places = [_event_place(user, job) for job in jobs]
    environment = _environment(user, jobs[0])
    folders = {
        run_name(job.name, job.public_id): _folder(place) for job, place in zip(jobs, places, strict=True)
    }
    variables = {RUNS_VARIABLE: json.dumps(folders)}
    mine = Job.objects.filter(
        owner=user, kind=JobKind.WORKSPACE.value, project=jobs[0].project, env=variables
    )
    live = mine.exclude(state__in=TERMINAL_JOB_STATES).filter(desired_state=DesiredState.RUN.value)
    if (found := live.filter(environment=environment).order_by("-id").first()) is not None:
        return found
    names = sorted({place.volume for place in places if place.volume})
    mounts: list[dict[str, Any]] = [
        {"volume": name, "target": default_mount_path(name), "read_only": True} for name in names
    ]
    more = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
    request = JobRequest(
        name=f"TensorBoard of {jobs[0].name[:60].rstrip()}{more}",
        kind=JobKind.WORKSPACE.value,
        project=jobs[0].project,
        environment=environment,
        gpus_per_task=0,
        cpu_milli=CPU_MILLI,
        memory_mib=MEMORY_MIB,
        time_limit_s=TIME_LIMIT_S,
        env=variables,
        volumes=mounts,
    )
    return do_submit_job(user, request)


def _event_place(user: User, job: Job) -> CheckpointPlace:
    """Return the folder of the event files of a job."""
    require_permission(user, Permission.READ_LOGS, job)
    names = [each["volume"] for each in job.volumes]
    rows = {row.name: row for row in Volume.objects.filter(owner__isnull=True, name__in=names)}
    place = job_checkpoint_place(job, rows)
    if place is None:
        raise Conflict(_("{name} keeps no event files.").format(name=job.name), code="no_event_files")
    if not place.volume and job.owner_id != user.pk:
        raise Forbidden(
            _("{name} keeps its event files in the home of {display_name}.").format(
                name=job.name, display_name=job.owner.display_name
            )
        )
    if job.started_at is None or (job.state in TERMINAL_JOB_STATES and not _has_event_files(job)):
        message = _(
            "{name} wrote no event files to FAIRWAY_TENSORBOARD_DIR. Metrics that were logged "
            "with MLflow are on its tab Metrics and on the page Experiments."
        ).format(name=job.name)
        raise Conflict(message, code="no_event_files")
    return place.entry(EVENTS_FOLDER)


def _has_event_files(job: Job) -> bool:
    """Return False if the node listed the folder of an ended job and found none."""
    seen = AttemptObservation.objects.filter(attempt__job=job, event_files__isnull=False)
    return set(seen.values_list("event_files", flat=True)) != {False}


def _folder(place: CheckpointPlace) -> str:
    """Return the folder as TensorBoard sees it: the runtime decides where the home is."""
    return f"{default_mount_path(place.volume) if place.volume else '~'}/{place.path}"


def _environment(user: User, job: Job) -> Environment:
    """Return an environment with TensorBoard, of the runtime of the job if there is one."""
    rows = visible_environments(user).filter(tool=TENSORBOARD_TOOL, enabled=True).order_by("id")
    usable = [row for row in rows if row.runtime == job.environment.runtime]
    if not usable:
        message = _(
            "No environment has the tool tensorboard. Administrators add one on the page Environments."
        )
        raise Conflict(message, code="no_tensorboard")
    return usable[0]
