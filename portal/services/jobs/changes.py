"""Changes of a waiting job: priority, time limit, dependencies, GPU request, amounts and project."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from portal.access import Permission, can, require_own_account, require_permission
from portal.domain.formatting import format_duration, format_gpu_models, format_memory
from portal.domain.jobs.job_spec import PROPORTIONAL_AMOUNTS, job_fields
from portal.domain.projects.secrets import PROJECT_SCOPE
from portal.domain.states import DesiredState, JobKind, JobState
from portal.domain.storage.volumes import VolumeKind
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, InvalidRequest
from portal.live_events import publish_all_on_commit
from portal.models import Dependency, Job, JobEvent, JobVerdict, NodePool, User, Volume
from portal.outbox import trigger_cycle
from portal.services.audit import record_action
from portal.services.jobs.dependencies import lock_dependencies
from portal.services.jobs.feasibility import known_gpu_models
from portal.services.jobs.start_alternatives import StartAlternatives, find_start_alternatives
from portal.services.jobs.submission import (
    JobRequest,
    check_priority,
    job_columns,
    preview_start,
    validate_of_owner,
)
from portal.services.lifecycle.state_events import job_topic_events

WAITING_FIELDS = tuple(name for name, rule in job_fields().items() if rule.changeable)
UNSTARTED_FIELDS = {
    *(name for name, rule in job_fields().items() if rule.changeable == "unstarted"),
    "pool",
    "project",
}
CHANGEABLE_FIELDS = (*WAITING_FIELDS, "pool", "project", "dependencies")
_ROLE_AMOUNTS = {"tasks", "min_tasks", "gpus_per_task", "cpu_milli", "memory_mib"}
CHANGE_LABELS = {
    name: name.removesuffix("_s").removesuffix("_mib").replace("_", " ") for name in CHANGEABLE_FIELDS
} | {
    "cpu_milli": "CPU",
    "gpu_model": "GPU model",
    "gpus_per_task": "GPUs per task",
    "milli_per_gpu": "share of each GPU",
    "mig_profile": "MIG profile",
    "min_gpu_memory_mib": "minimum GPU memory",
    "min_compute_capability": "minimum compute capability",
    "min_tasks": "minimum tasks",
    "allow_mixed_gpus": "different GPUs",
    "shm_mib": "shared memory",
}
SUGGESTED_TYPES: dict[str, type] = {
    **dict.fromkeys(("tasks", "min_tasks", "gpus_per_task", "cpu_milli", "memory_mib", "time_limit_s"), int),
    **dict.fromkeys(("preemptible", "allow_mixed_gpus"), bool),
    "gpu_model": str,
}
"""The fields beside the pool that a suggested change may have."""
_NOT_CHANGEABLE = "not_changeable"


def change_refusal(job: Job, names: Iterable[str] = ()) -> str | None:
    """Return why these fields of the job cannot be changed now, or None."""
    names = set(names)
    if job.kind == JobKind.SERVICE.value:
        return _("It is a replica of a service; update the service.")
    if job.state == JobState.RUNNING:
        return _("It has started; only a waiting job can be changed.")
    if job.state != JobState.PENDING or job.desired_state != DesiredState.RUN:
        return _("It no longer waits; only a waiting job can be changed.")
    if job.attempt_count and (fixed := names & UNSTARTED_FIELDS):
        return _("It has already run, so its {field_names} cannot be changed; launch a similar job.").format(
            field_names=_field_names(fixed)
        )
    if job.roles and (fixed := names & _ROLE_AMOUNTS):
        return _("Its roles determine its {field_names}; launch a similar job.").format(
            field_names=_field_names(fixed)
        )
    rules = job_fields()
    if job.kind == JobKind.WORKSPACE.value and (
        fixed := {n for n in names & rules.keys() if rules[n].jobs_only}
    ):
        return _("It is a workspace, which has no {field_names}.").format(field_names=_field_names(fixed))
    if "project" in names and hasattr(job, "trial"):
        return _("It belongs to a sweep, whose jobs stay in one project.")
    return None


def parse_suggested_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of a suggestion with rows in place of their public ids.

    Raise InvalidRequest for fields that no suggestion has, and for values of another type.
    """
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "pool":
            pool = None if value is None else NodePool.objects.filter(public_id=str(value)).first()
            if value is not None and pool is None:
                raise InvalidRequest(fields={"pool": _("There is no such pool.")})
            changes[name] = pool
            continue
        if name not in SUGGESTED_TYPES or type(value) is not SUGGESTED_TYPES[name]:
            raise InvalidRequest(fields={name: _("No suggestion changes this field so.")})
        changes[name] = value
    return changes


def applicable_suggestion(job: Job, verdict: JobVerdict | None) -> dict[str, Any]:
    """Return the fields with which a waiting job would start now; empty if they cannot be changed in place."""
    fields: dict[str, Any] = (verdict.suggestion or {}).get("fields", {}) if verdict else {}
    possible = set(fields) <= set(CHANGEABLE_FIELDS) and not change_refusal(job, fields)
    return fields if possible else {}


def build_changed_request(user: User, job: Job, changes: Mapping[str, Any]) -> JobRequest:
    """Return the request of the job with the changes, which are values by name of ``CHANGEABLE_FIELDS``.

    Raise Conflict if it cannot be changed now, and what ``validate_request`` raises for the result.
    """
    require_permission(user, Permission.CONTROL, job)
    present = request_of_waiting_job(job)
    if changes.get("gpu_model"):
        changes = {**changes, "gpu_model": known_gpu_models(changes["gpu_model"])}
    changed = {name: value for name, value in changes.items() if getattr(present, name) != value}
    if refusal := change_refusal(job, changed):
        raise Conflict(refusal, code=_NOT_CHANGEABLE)
    request = replace(present, **changed)
    if "project" in changed:
        require_permission(user, Permission.SUBMIT, request.project)
        if _uses_project_content(job):
            instead = _("It uses secrets, folders or code of its project, which differ in {name}. Copy it.")
            require_own_account(user, job.owner, instead.format(name=request.project.name))
    if not can(job.owner, Permission.SUBMIT, request.project):
        message = _("{username} may not run jobs in {name}.").format(
            username=job.owner.username, name=request.project.name
        )
        raise Conflict(message, code="owner_not_permitted")
    if {"priority", "project"} & changed.keys():
        check_priority(user, request)
    if newer := next((one for one in request.dependencies if one.pk >= job.pk), None):
        message = _("{name} is not older than this job; a job can only start after older ones.").format(
            name=newer.name
        )
        raise InvalidRequest(fields={"dependencies": message})
    checks_dependencies = {"dependencies", "ignore_dependency_failure"} & changed.keys()
    validate_of_owner(job.owner, request if checks_dependencies else replace(request, dependencies=()))
    return request


def _uses_project_content(job: Job) -> bool:
    """Return True if the job would run something else in another project: its secrets, folders or code."""
    folders = [each["volume"] for each in job.volumes]
    return (
        bool(job.code_archive)
        or any(each["owner_type"] == PROJECT_SCOPE for each in job.secrets)
        or Volume.objects.filter(name__in=folders, kind=VolumeKind.PROJECT.value).exists()
    )


def request_of_waiting_job(job: Job) -> JobRequest:
    """Return the whole request of a job, with its dependencies."""
    values = {name: getattr(job, name) for name in job_fields()}
    rows = {name: getattr(job, name) for name in ("project", "environment", "pool", "template")}
    depends_on = tuple(Job.objects.filter(dependents__job=job).order_by("pk"))
    return JobRequest(**values, **rows, dependencies=depends_on)


def job_start_alternatives(user: User, job: Job) -> StartAlternatives:
    """Return the changes of a waiting job with which it would start sooner and which can be made in place."""
    require_permission(user, Permission.CONTROL, job)
    if refusal := change_refusal(job):
        return StartAlternatives([], refusal)
    found = find_start_alternatives(job.owner, request_of_waiting_job(job), job.public_id)
    possible = [
        each
        for each in found.alternatives
        if set(each.fields) <= {*SUGGESTED_TYPES, "pool"} and not change_refusal(job, each.fields)
    ]
    if found.alternatives and not possible:
        reason = change_refusal(job, {name for each in found.alternatives for name in each.fields})
        return StartAlternatives([], reason or _("The changes that would help cannot be made in place."))
    return StartAlternatives(possible, found.reason)


def preview_change(job: Job, request: JobRequest) -> dict[str, Any] | None:
    """Return the scheduler's answer when the job would start after the change; None if there is none in time."""
    return preview_start(job.owner, request, replaces=job.public_id)


def do_change_job(
    user: User,
    job: Job,
    changes: Mapping[str, Any],
    *,
    version: int | None = None,
    typed_amounts: Collection[str] | None = None,
) -> Job:
    """Change a waiting job. ``version`` is that of the job which the user saw; by default that of ``job``.

    ``typed_amounts`` are those that the user typed; None adds the changed amounts to those recorded.
    Raise Conflict if the job started or was changed meanwhile.
    """
    request, present = build_changed_request(user, job, changes), request_of_waiting_job(job)
    changed = [name for name in changes if getattr(present, name) != getattr(request, name)]
    if not changed:
        return job
    if UNSTARTED_FIELDS.difference({"project"}).intersection(changed):
        preview_change(job, request)  # raises if the cluster can never run it
    added = [one for one in request.dependencies if one not in present.dependencies]
    with transaction.atomic():
        # older jobs are locked first
        lock_dependencies(user, added, any_end=request.ignore_dependency_failure)
        rows = Job.objects.select_for_update(of=("self",), no_key=True)
        locked = rows.select_related("project", "owner").get(pk=job.pk)
        if refusal := change_refusal(locked, changed):
            raise Conflict(_("Not changed. {refusal}").format(refusal=refusal), code=_NOT_CHANGEABLE)
        if locked.version != (job.version if version is None else version):
            raise Conflict(
                _("Not changed. The job was changed meanwhile; look at it again."), code="job_changed"
            )
        before, after = (
            {name: _plain(getattr(side, name)) for name in changed} for side in (present, request)
        )
        if typed_amounts is None and locked.typed_amounts is not None:
            typed_amounts = {*locked.typed_amounts, *changed}
        if typed_amounts is not None:
            locked.typed_amounts = [name for name in PROPORTIONAL_AMOUNTS if name in typed_amounts]
        _save(locked, request, changed, added)
        labels = (
            (CHANGE_LABELS[name], _text(name, before[name]), _text(name, after[name])) for name in changed
        )
        texts = ", ".join(
            stored_text(f"{label} from {old_text} to {new_text}") for label, old_text, new_text in labels
        )
        message = stored_text(f"Changed by {user.username}: {texts}.")[:1000]
        details = {"before": before, "after": after}
        JobEvent.objects.create(
            job=locked, kind="changed", actor=user.username, message=message, details=details
        )
        record_action(user, "job.change", locked, before=before, after=after)
        publish_all_on_commit(job_topic_events(locked))
        trigger_cycle("change")
    return locked


def _save(job: Job, request: JobRequest, changed: Collection[str], added: Collection[Job]) -> None:
    columns = job_columns(request)
    saved = [name for name in changed if name != "dependencies"]
    for name in saved:
        setattr(job, name, columns[name])
    job.version += 1
    if {"priority", "project"} & set(changed):
        job.queue_rank = 0  # it orders jobs of one project and priority
    if UNSTARTED_FIELDS & set(changed):
        job.nominated_placement = None
    job.save(update_fields=[*saved, "version", "queue_rank", "nominated_placement", "typed_amounts"])
    if "dependencies" in changed:
        Dependency.objects.filter(job=job).exclude(depends_on__in=request.dependencies).delete()
        Dependency.objects.bulk_create(Dependency(job=job, depends_on=one) for one in added)


def _plain(value: Any) -> Any:
    """Return the value of a field as JSON; rows by name, jobs by public id."""
    if isinstance(value, tuple):
        return [one.public_id for one in value]
    return getattr(value, "name", value)


def _text(name: str, value: Any) -> str:
    if value is None or value == "" or value == []:
        return "none"
    if isinstance(value, list):
        return " ".join(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_s"):
        return format_duration(value)
    if name.endswith("_mib"):
        return format_memory(value)
    if name == "cpu_milli":
        return f"{value / 1000:g} {'core' if value <= 1000 else 'cores'}"
    if name == "milli_per_gpu":
        return f"{value / 10:g} %"
    return format_gpu_models(value).strip() if name == "gpu_model" else str(value)


def _field_names(names: Iterable[str]) -> str:
    return " and ".join(CHANGE_LABELS[name] for name in sorted(names))
