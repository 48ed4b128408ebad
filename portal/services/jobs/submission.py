"""Submits, cancels, holds, suspends, resumes and resubmits jobs."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from django.contrib.auth.hashers import UNUSABLE_PASSWORD_PREFIX
from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from agents.launchers.checkout import CODE_DIR, KEY_FILE, TOKEN_FILE
from portal.access import Permission, can, require_permission
from portal.domain.jobs.code import code_errors
from portal.domain.jobs.job_spec import (
    MAX_TASKS,
    JobSpec,
    field_errors,
    job_fields,
    json_value,
    placement_fields,
    roles_as_json,
    total_gpus,
)
from portal.domain.jobs.pipeline_plans import PROFILE_VARIABLE
from portal.domain.jobs.reasons import EndReason
from portal.domain.jobs.roles import role_errors
from portal.domain.projects.secrets import VARIABLE_NAME
from portal.domain.states import (
    TERMINAL_JOB_STATES,
    DesiredState,
    JobKind,
    JobState,
    NodeState,
    RuntimeKind,
)
from portal.domain.storage.volumes import home_mount_path
from portal.engine_client import query_would_start
from portal.errors import Conflict, Forbidden, InvalidRequest, Unsatisfiable
from portal.models import (
    Checkpoint,
    Dependency,
    Environment,
    Job,
    Node,
    NodePool,
    ProfileRun,
    Project,
    Template,
    User,
)
from portal.selectors.jobs.rights import Requirement, job_denial, read_rights, usage_from_columns
from portal.services.audit import record_action
from portal.services.jobs import checkpoints, feasibility
from portal.services.jobs.code_archives import record_use, stored_size
from portal.services.jobs.dependencies import dependency_errors, lock_dependencies
from portal.services.jobs.gang_rules import (
    launcher_error,
    launcher_options_error,
    no_gang_network_reason,
    topology_constraint_error,
)
from portal.services.lifecycle import job_control, suspension
from portal.services.projects import secrets
from portal.services.storage import volumes

RESERVED_VARIABLES = re.compile(
    r"^(NVIDIA_|CUDA_VISIBLE_DEVICES$|CUDA_MPS_|LD_PRELOAD$|LD_AUDIT$|FAIRWAY_(?!PARAM|TRIAL))"
)
"""The variables of a trial may be set, so that its job can be submitted again."""

MAX_START_DELAY = dt.timedelta(days=366)
MAX_COMMAND_BYTES = 64 * 1024
MAX_COMMAND_ARGUMENTS = 1000
MAX_VARIABLES = 500
MAX_VARIABLE_BYTES = 32 * 1024
MAX_ENV_BYTES = 128 * 1024
"""A node's own limits (``agents/node/spec/task_spec.py``) are not lower, so accepted jobs can start."""


@dataclass(frozen=True, kw_only=True)
class JobRequest(JobSpec):
    """A request for a job with the rows that it refers to."""

    project: Project
    environment: Environment
    pool: NodePool | None = None
    template: Template | None = None
    dependencies: Sequence[Job] = ()
    avoid_nodes: Sequence[Node] = ()
    typed_amounts: Sequence[str] | None = None
    """Which of ``PROPORTIONAL_AMOUNTS`` the user typed; None: unknown, such as of a REST request."""


def validate_request(user: User, request: JobRequest) -> None:
    """Raise NotFound or Forbidden, InvalidRequest by field, or Unsatisfiable with the nearest request."""
    check_priority(user, request)
    validate_of_owner(user, request)


def check_priority(user: User, request: JobRequest) -> None:
    """Raise Forbidden unless the user may give a job of this project its priority."""
    if request.priority > 0 and not can(user, Permission.MANAGE, request.project):
        message = _("Only managers of the project may raise a priority above 0.")
        raise Forbidden(message, code="priority_not_allowed")


def validate_of_owner(user: User, request: JobRequest) -> None:
    """As ``validate_request`` for the owner of a job, whose priority somebody else may have set."""
    require_permission(user, Permission.SUBMIT, request.project)
    if request.environment.runtime == RuntimeKind.PROCESS.value:
        _check_process_runtime_enabled(user)
    wrong = value_errors(request)
    if request.topology_constraint and (fault := topology_constraint_error(request.topology_constraint)):
        wrong["topology_constraint"] = fault
    if "preferred_nodes" not in wrong and (fault := _preferred_nodes_error(request)):
        wrong["preferred_nodes"] = fault
    if fault := volumes.volume_references_error(user, request.environment.runtime, request.volumes):
        wrong["volumes"] = fault
    if not {"volumes", "secrets"} & wrong.keys():
        wrong |= _permission_errors(user, request)
    if "volumes" not in wrong and (fault := volumes.volume_location_error(request.volumes, request.pool)):
        wrong["volumes"] = fault
    if not {"volumes", "checkpoint_dir", "resume_from"} & wrong.keys():
        wrong |= _checkpoint_errors(user, request)
    if not {"code_repository", "code_host_key", "code_archive", "code_path", "volumes"} & wrong.keys():
        wrong |= _code_errors(user, request)
    wrong |= dependency_errors(user, request.dependencies, any_end=request.ignore_dependency_failure)
    if wrong:
        raise InvalidRequest(fields=wrong)
    found = no_gang_network_reason(
        request.launcher, request.tasks, request.total_gpus, request.pool
    ) or feasibility.unsatisfiable_reason(_resource_request(request))
    if found is not None:
        message, facts = found
        raise Unsatisfiable(message, code="unsatisfiable", details=facts)


def possible_pools(request: JobRequest) -> set[int]:
    """Return the ids of the pools whose empty nodes hold the request, without regard to quotas."""
    return feasibility.possible_pools(_resource_request(request))


def _resource_request(request: JobRequest) -> feasibility.ResourceRequest:
    return feasibility.ResourceRequest(
        **{name: getattr(request, name) for name in job_fields()}
        | {"tasks": request.min_tasks or request.tasks},
        project=request.project,
        pool=request.pool,
        runtime=request.environment.runtime,
    )


def value_errors(request: JobRequest) -> dict[str, str]:
    """Return what is wrong with the values of a request, by field, as far as no rows are needed."""
    workspace = request.kind == JobKind.WORKSPACE.value
    wrong = field_errors(request) | _text_errors(request) | _number_errors(request)
    wrong |= role_errors(request, workspace=workspace)
    if fault := launcher_error(request.launcher, workspace=workspace, elastic=request.is_elastic):
        wrong["launcher"] = fault
    elif fault := launcher_options_error(request):
        wrong["launcher_options"] = fault
    if fault := secrets.secret_references_error(request.env, request.secrets):
        wrong["secrets"] = fault
    return wrong


def _preferred_nodes_error(request: JobRequest) -> str | None:
    """Return why the preferred nodes cannot be those of the tasks, or None."""
    names = request.preferred_nodes
    if not names:
        return None
    if len(names) != request.tasks:
        return _("Name a node for each of the {tasks} tasks; there are {count} names.").format(
            tasks=request.tasks, count=len(names)
        )
    rows = Node.objects.exclude(state=NodeState.RETIRED.value).filter(name__in=names).select_related("pool")
    pools = {node.name: node.pool for node in rows}
    if unknown := next((name for name in names if name not in pools), None):
        return _("There is no node {unknown}.").format(unknown=unknown)
    found = sorted({pool.name for pool in pools.values()})
    if len(found) > 1:
        return _("They are in different pools: {found}.").format(found=", ".join(found))
    if request.pool is None or request.pool.name not in found:
        return _("They are in the pool {found}; request this pool, too.").format(found=found[0])
    return None


def _permission_errors(user: User, request: JobRequest) -> dict[str, str]:
    """Return what the user may not use, by field; closed accounts and projects are rejected earlier."""
    columns = {
        "owner_id": user.pk,
        "project_id": request.project.pk,
        "environment_id": request.environment.pk,
        "volumes": volumes.normalize_volume_references(request.volumes),
        "secrets": secrets.normalize_secret_references(request.secrets),
    }
    run = usage_from_columns(columns)
    fields = {
        Requirement.ENVIRONMENT: "environment",
        Requirement.VOLUME: "volumes",
        Requirement.SECRET: "secrets",
    }
    missing = [each for each in read_rights([run]).denials(run) if each.requirement in fields]
    return {fields[each.requirement]: each.message for each in reversed(missing)}


def _checkpoint_errors(user: User, request: JobRequest) -> dict[str, str]:
    """Return what is wrong with the checkpoint directory, or with the checkpoint to start from."""
    references = volumes.normalize_volume_references(request.volumes)
    wrong: dict[str, str] = {}
    if fault := checkpoints.checkpoint_dir_error(user, request.checkpoint_dir, references):
        wrong["checkpoint_dir"] = fault
    if request.resume_from:
        job = Job(owner=user, volumes=references)
        if fault := checkpoints.resume_error(user, request.resume_from, job):
            wrong["resume_from"] = fault
    if request.checkpoint_keep_every is not None and request.checkpoint_keep_last is None:
        wrong["checkpoint_keep_every"] = _("Set the number of newest checkpoints to keep, too.")
    return wrong


def _code_errors(user: User, request: JobRequest) -> dict[str, str]:
    """Return what is wrong with the code: its login and host key, archive, path, and the mount of its folder."""
    files = {str(each["file"]) for each in request.secrets if each.get("file")}
    wrong = code_errors(
        request.code_repository, request.code_ref, request.code_host_key, files, KEY_FILE, TOKEN_FILE
    )
    sources = [name for name in ("code_repository", "code_archive", "code_path") if getattr(request, name)]
    if len(sources) > 1:
        wrong[sources[1]] = _("A job has one source of code: a git repository, an archive or a path.")
    if request.code_archive and stored_size(request.project, request.code_archive) is None:
        wrong["code_archive"] = _("{name} has no such archive. Upload it first.").format(
            name=request.project.name
        )
    references = volumes.normalize_volume_references(request.volumes)
    if request.code_path and (fault := _code_path_error(user, request.code_path, references)):
        wrong["code_path"] = fault
    targets = [each["target"] for each in references]
    if (request.code_repository or request.code_archive) and any(
        f"{each}/".startswith(f"{CODE_DIR}/") for each in targets
    ):
        wrong["volumes"] = _("{code_dir} is the folder of the code; mount the volume elsewhere.").format(
            code_dir=CODE_DIR
        )
    return wrong


def _code_path_error(user: User, path: str, references: Sequence[Mapping[str, Any]]) -> str | None:
    folder = PurePosixPath(home_mount_path(user.username), path)
    if ".." in folder.parts:
        return _("Must not contain .. as a part.")
    inside = any(folder.is_relative_to(each["target"]) for each in references)
    if inside or not path.startswith("/") or folder.is_relative_to(home_mount_path(user.username)):
        return None
    return _("{path} is neither in the home nor in a volume of the job.").format(path=path)


def preview_start(user: User, request: JobRequest, *, replaces: str = "") -> dict[str, Any] | None:
    """Return the scheduler's answer whether the request would start now, or None if there is none in time.

    ``replaces`` is the waiting job (public id) that the request would change. Raise Unsatisfiable if the
    scheduler finds that the cluster can never run it; it checks more than ``validate_request``.
    """
    answer = query_would_start(preview_query_body(user, request) | {"replaces": replaces})
    if answer is None or "error" in answer:
        return None
    if answer["unsatisfiable"]:
        nearest = answer["alternatives"][0]["fields"] if answer["alternatives"] else None
        facts = {**answer["verdict"]["details"], "nearest": nearest}
        raise Unsatisfiable(answer["verdict"]["message"], code="unsatisfiable", details=facts)
    return answer


def preview_query_body(user: User, request: JobRequest) -> dict[str, Any]:
    """Return the request as a query to the scheduler: columns of a Job by name, rows by public id."""
    columns = job_columns(request)
    body = {name: json_value(columns[name]) for name in placement_fields(type(request))}
    body |= {name: columns[name].public_id for name in ("project", "environment")}
    body["pool"] = request.pool.public_id if request.pool else None
    body["template"] = request.template.public_id if request.template else None
    body["user"] = user.public_id
    body["dependencies"] = [job.public_id for job in request.dependencies]
    return body


def do_submit_job(user: User, request: JobRequest) -> Job:
    """Create a PENDING job. Once this transaction commits, the job is never lost (I2)."""
    validate_request(user, request)
    preview_start(user, request)
    return create_job(user, request)


def create_job(user: User, request: JobRequest, *, image_digest: str = "") -> Job:
    """Create the PENDING job of a validated request, with another image than that of its environment if given."""
    return create_jobs(user, [request], image_digest=image_digest)[0]


def create_jobs(user: User, requests: Sequence[JobRequest], *, image_digest: str = "") -> list[Job]:
    """Create the PENDING jobs of validated requests, as ``create_job``: all or none."""
    with transaction.atomic():
        dependencies = [
            lock_dependencies(user, each.dependencies, any_end=each.ignore_dependency_failure)
            for each in requests
        ]
        jobs = Job.objects.bulk_create(
            Job(
                owner=user,
                image_digest=image_digest or each.environment.image_digest,
                **job_columns(each),
            )
            for each in requests
        )
        record_use(jobs)
        for job, request, depends_on in zip(jobs, requests, dependencies, strict=True):
            if job.resume_from:
                checkpoints.pin_for_resume(user, job.resume_from)
            Dependency.objects.bulk_create(Dependency(job=job, depends_on=one) for one in depends_on)
            if request.avoid_nodes:
                job.avoid_nodes.add(*request.avoid_nodes)
            if PROFILE_VARIABLE in job.env:
                ProfileRun.objects.create(job=job, name=job.env[PROFILE_VARIABLE].strip()[:100] or job.name)
        job_control.record_submitted(jobs, actor=user.username)
        return jobs


def do_cancel_job(user: User, job: Job) -> Job:
    """Stop a job; it ends CANCELLED, or keeps the final state that it already has (I11)."""
    require_permission(user, Permission.CONTROL, job)
    mine = job.owner_id == user.pk
    reason = EndReason.CANCELLED_BY_USER if mine or not user.is_admin else EndReason.CANCELLED_BY_ADMIN
    with transaction.atomic():
        before = job.state
        job = job_control.cancel_job(job.pk, reason, actor=user.username)
        if not mine and before not in TERMINAL_JOB_STATES:
            record_action(user, "job.cancel", job, before={"state": before}, after={"state": job.state})
    return job


def do_hold_job(user: User, job: Job, held: bool) -> Job:
    require_permission(user, Permission.CONTROL, job)
    with transaction.atomic():
        if job.owner_id == user.pk:
            return job_control.set_job_held(job.pk, held, actor=user.username)
        before = Job.objects.select_for_update(no_key=True).get(pk=job.pk).held
        job = job_control.set_job_held(job.pk, held, actor=user.username)
        if before != job.held:
            record_action(user, "job.hold" if held else "job.release", job)
    return job


def do_suspend_job(user: User, job: Job) -> Job:
    """Suspend a job: it releases its GPUs and keeps its files until it is resumed. Repeatable."""
    require_permission(user, Permission.CONTROL, job)
    if job.kind == JobKind.SERVICE.value:
        raise Conflict(
            _("A replica cannot be suspended; change or stop its service."), code="service_replica"
        )
    with transaction.atomic():
        before = job.desired_state
        job = suspension.suspend_job(job.pk, actor=user.username)
        if job.owner_id != user.pk and before != job.desired_state:
            changes = ({"desired": before}, {"desired": job.desired_state})
            record_action(user, "job.suspend", job, before=changes[0], after=changes[1])
    return job


def do_resume_job(user: User, job: Job) -> Job:
    """Return a suspended job to the queue. Raise Conflict if its owner may not submit it any more."""
    require_permission(user, Permission.CONTROL, job)
    if denial := job_denial(job):
        of_environment = denial.requirement is Requirement.ENVIRONMENT
        code = "environment_not_offered" if of_environment else "owner_not_permitted"
        raise Conflict(str(denial), code=code)
    with transaction.atomic():
        job = suspension.resume_job(job.pk, actor=user.username)
        if job.owner_id != user.pk:
            record_action(user, "job.resume", job, after={"desired": job.desired_state})
    return job


def do_resubmit_job(user: User, job: Job) -> Job:
    """Submit the request of an ended job again; a workspace gets the same home.

    Dependencies are not copied, and dependents of the old job have already started or were cancelled.
    """
    require_permission(user, Permission.CONTROL, job)  # because its variables are copied
    check_resubmission(user, job)
    return do_submit_job(user, request_from_job(job))


def check_resubmission(user: User, job: Job) -> None:
    """Raise Conflict or Forbidden unless the user may submit the request of the ended job again."""
    if job.state not in TERMINAL_JOB_STATES:
        raise Conflict(_("The job has not ended."), code="job_not_ended")
    if job.is_placeholder:
        message = _("It was adopted from a container and its command is unknown; submit a new job.")
        raise Conflict(message, code="job_unknown")
    if job.kind == JobKind.SERVICE.value:
        raise Conflict(_("It is a replica of a service, which replaces it."), code="service_replica")
    if job.kind == JobKind.WORKSPACE.value and job.owner_id != user.pk:
        raise Forbidden(_("Only its owner can restart a workspace."))


def do_resume_from_checkpoint(user: User, row: Checkpoint, *, in_place: bool = False) -> Job:
    """Submit the request of a checkpoint's job as a new job that starts from the checkpoint, which is pinned.

    ``in_place`` stops the job of the checkpoint in the same transaction. Raise Conflict if it has ended or is being
    stopped.
    """
    require_permission(user, Permission.CONTROL, row.job)
    if row.job.owner_id != user.pk and checkpoints.is_in_home(row.job):
        raise Forbidden(_("Only its owner can resume from it: it is kept in their home."))
    if row.job.is_placeholder:
        raise Conflict(_("It was adopted from a container and its command is unknown."), code="job_unknown")
    request = replace(request_from_job(row.job), resume_from=row.public_id)
    if not in_place:
        return do_submit_job(user, request)
    validate_request(user, request)
    preview_start(user, request)  # before the lock, since it asks the scheduler
    with transaction.atomic():
        replaced = Job.objects.select_for_update(no_key=True).get(pk=row.job_id)
        if replaced.state in TERMINAL_JOB_STATES or replaced.desired_state == DesiredState.CANCELLED:
            raise Conflict(_("It has ended or is being stopped; resume as a new job."), code="job_ended")
        job = create_job(user, request)
        do_cancel_job(user, replaced)
    return job


def request_from_job(job: Job) -> JobRequest:
    copied = {name: getattr(job, name) for name, rule in job_fields().items() if rule.copied}
    rows = {name: getattr(job, name) for name in ("project", "environment", "pool", "template")}
    return JobRequest(**copied, **rows, typed_amounts=job.typed_amounts)


def job_columns(request: JobRequest) -> dict[str, Any]:
    """Return the request as columns of Job, with lists and dictionaries copied."""
    rows = ("dependencies", "avoid_nodes")
    columns = {key: getattr(request, key) for key in JobRequest.__dataclass_fields__ if key not in rows}
    return columns | {
        "command": list(request.command),
        "env": dict(request.env),
        "parameters": dict(request.parameters),
        "launcher_options": dict(request.launcher_options),
        "rank_overrides": {rank: dict(variables) for rank, variables in request.rank_overrides.items()},
        "topology_constraint": dict(request.topology_constraint) if request.topology_constraint else None,
        "preferred_nodes": list(request.preferred_nodes),
        "volumes": volumes.normalize_volume_references(request.volumes),
        "secrets": secrets.normalize_secret_references(request.secrets),
        "retry_on": list(request.retry_on),
        "notify": list(request.notify),
        "retry_exit_codes": list(request.retry_exit_codes),
        "typed_amounts": None if request.typed_amounts is None else list(request.typed_amounts),
        "roles": roles_as_json(request.roles),
        "role_gpus": total_gpus(request.roles) if request.roles else None,
    }


def _check_process_runtime_enabled(user: User) -> None:
    """Raise unless the user is the only one, if process tasks of all users run under one account."""
    nodes = Node.objects.filter(runtime=RuntimeKind.PROCESS.value).exclude(state=NodeState.RETIRED.value)
    if any(node.agent_info.get("per_user_isolation", True) for node in nodes) or not nodes:
        return
    others = User.objects.filter(is_active=True).exclude(pk=user.pk)
    others = others.exclude(password__startswith=UNUSABLE_PASSWORD_PREFIX)
    if not user.is_admin or others.exists():
        raise Forbidden(
            _(
                "Without containers all jobs would run under one account, so this is disabled when there is more "
                "than one user. Use an environment with a container, or start Fairway as root."
            ),
            code="process_runtime_disabled",
        )


def _text_errors(request: JobRequest) -> dict[str, str]:
    wrong: dict[str, str] = {}
    if request.kind == JobKind.WORKSPACE.value:
        if not request.environment.tool_port:
            wrong["environment"] = _("This environment has no workspace tool.")
        if request.tasks != 1:
            wrong["tasks"] = _("A workspace has one task.")
        if request.min_tasks is not None:
            wrong["min_tasks"] = _("A workspace has exactly one task.")
        if request.command:
            wrong["command"] = _("A workspace runs the tool of its environment; leave the command empty.")
    elif fault := _command_error(request.command):
        wrong["command"] = fault
    if len(request.program.encode(errors="replace")) > MAX_COMMAND_BYTES or "\0" in request.program:
        wrong["program"] = _("A program is text of at most {max_command_bytes} KiB.").format(
            max_command_bytes=MAX_COMMAND_BYTES // 1024
        )
    for role in request.roles:
        if fault := _command_error(role.command):
            wrong["roles"] = _("{name}, command: {fault}").format(name=role.name, fault=fault)
            wrong.pop("command", None)
    if fault := _variables_error(request.env):
        wrong["env"] = fault
    for rank, variables in request.rank_overrides.items():
        if not str(rank).isdecimal() or not 0 <= int(rank) < (
            MAX_TASKS if request.is_elastic else request.tasks
        ):
            wrong["rank_overrides"] = _(
                "There is no rank {rank}; ranks are numbered from 0 to {tasks}."
            ).format(rank=rank, tasks=request.tasks - 1)
        elif fault := _variables_error(variables):
            wrong["rank_overrides"] = _("Rank {rank}: {fault}").format(rank=rank, fault=fault)
    return wrong


def _command_error(command: Sequence[str]) -> str | None:
    if not command:
        return _("Enter a command.")
    if any(not isinstance(word, str) or "\0" in word for word in command):
        return _("The command must be a list of strings.")
    if sum(len(word.encode()) for word in command) > MAX_COMMAND_BYTES:
        return _("The command is longer than 64 KiB; put it into a script.")
    if len(command) > MAX_COMMAND_ARGUMENTS:
        return _("The command has more than {max_command_arguments} arguments.").format(
            max_command_arguments=MAX_COMMAND_ARGUMENTS
        )
    if not command[0] or command[0].startswith(("-", "[")):
        return _("The first argument is the program to run; it must not begin with - or [.")
    return None


def _variables_error(variables: Mapping[str, object]) -> str | None:
    """Return what is wrong with the variables of a job, or None."""
    texts = [(name, value) for name, value in variables.items() if isinstance(value, str)]
    if len(variables) > MAX_VARIABLES:
        return _("There are more than {max_variables} variables.").format(max_variables=MAX_VARIABLES)
    if sum(len(name.encode()) + len(value.encode()) for name, value in texts) > MAX_ENV_BYTES:
        return _("The variables are longer than 128 KiB in total; put long values into a file.")
    for name, value in variables.items():
        if not VARIABLE_NAME.fullmatch(str(name)) or not isinstance(value, str) or "\0" in value:
            return _("{name!r} is not a valid variable name with a string value.").format(name=name)
        if len(value.encode()) > MAX_VARIABLE_BYTES:
            return _("{name} is longer than 32 KiB; put long values into a file.").format(name=name)
        if RESERVED_VARIABLES.match(name):
            return _("{name} is set by Fairway and cannot be changed.").format(name=name)
    return None


def _number_errors(request: JobRequest) -> dict[str, str]:
    wrong: dict[str, str] = {}
    if request.start_after and request.start_after > timezone.now() + MAX_START_DELAY:
        wrong["start_after"] = _("Must be within {days} days.").format(days=MAX_START_DELAY.days)
    if request.min_tasks is not None and not 1 <= request.min_tasks <= request.tasks:
        wrong["min_tasks"] = _("Must be between 1 and the number of tasks.")
    if request.mig_profile and request.milli_per_gpu != 1000:
        wrong["milli_per_gpu"] = _("A MIG slice cannot be shared.")
    if request.milli_per_gpu != 1000 and request.gpus_per_task > 1:
        wrong["milli_per_gpu"] = _(
            "A task can have a share of one GPU only; request whole GPUs if you need several."
        )
    return wrong


def is_live(job: Job) -> bool:
    return JobState(job.state) not in TERMINAL_JOB_STATES
