"""Initial values of the launch form, from a job, a template or API fields."""

from __future__ import annotations

import shlex
from typing import Any

from portal.models import Job, Template, User
from portal.visibility import private_fields
from portal.web.display.formatting import duration, parse_whole_number
from portal.web.launch.data_fields import format_secrets, format_volumes
from portal.web.launch.form import SHELL


def initial_from_job(user: User, job: Job) -> dict[str, Any]:
    """Return a job as form values; variables and secrets only where the user may read them."""
    private = private_fields(user, job)
    env, secrets = private.env or {}, private.secrets or []
    command = list(job.command)
    text = command[2] if len(command) == 3 and command[:2] == SHELL else shlex.join(command)
    return {
        "kind": job.kind,
        "name": job.name,
        "project": job.project.public_id,
        "environment": job.environment.public_id,
        "pool": job.pool.public_id if job.pool else "",
        "gpu_model": job.gpu_model,
        "gpus_per_task": job.gpus_per_task,
        "tasks": job.tasks,
        "min_tasks": job.min_tasks,
        "milli_per_gpu": job.milli_per_gpu,
        "cores": f"{job.cpu_milli / 1000:g}",
        "memory_gib": format_gib(job.memory_mib),
        "command": text,
        "env": "\n".join(f"{name}={value}" for name, value in env.items()),
        "volumes": format_volumes(job.volumes),
        "secret_variables": format_secrets(secrets, "variable"),
        "secret_files": format_secrets(secrets, "file"),
        "time_limit_s": duration(job.time_limit_s).replace("\u00a0", " ") if job.time_limit_s else "",
        "preemptible": job.preemptible,
        "priority": job.priority,
        "max_attempts": job.max_attempts,
        "retry_on_failure": job.retry_on_failure,
        "launcher": job.launcher,
        "mig_profile": job.mig_profile,
        "min_compute_capability": job.min_compute_capability,
        "min_gpu_memory_gib": format_gib(job.min_gpu_memory_mib) if job.min_gpu_memory_mib else None,
        "shm_mib": job.shm_mib,
        "termination_grace_s": job.termination_grace_s,
    } | _topology_fields(job.topology_constraint)


def format_gib(mib: int) -> str:
    """Format MiB in GiB so that parsing returns the same value."""
    return f"{mib / 1024:.10g}"


def _topology_fields(near: Any) -> dict[str, str]:
    """Return a topology constraint as form fields; None is no constraint."""
    constraint = near if isinstance(near, dict) else {}
    levels = {f"topology_{which}": constraint.get(which) for which in ("required", "preferred")}
    return {name: f"{constraint.get('topology')}:{level}" if level else "" for name, level in levels.items()}


def initial_from_template(template: Template) -> dict[str, Any]:
    """Return a template's fields (API names) as form values."""
    fields = dict(template.fields)
    start: dict[str, Any] = {"kind": template.kind, "template": template.public_id, "name": template.name}
    if template.environment is not None:
        start["environment"] = template.environment.public_id
    return start | initial_from_api_fields(fields)


def initial_from_api_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return API fields in the units of the form; unknown names are dropped."""
    found: dict[str, Any] = {}
    for name in (
        "gpu_model",
        "gpus_per_task",
        "tasks",
        "min_tasks",
        "milli_per_gpu",
        "mig_profile",
        "min_compute_capability",
        "preemptible",
        "priority",
        "max_attempts",
        "retry_on_failure",
        "launcher",
        "shm_mib",
        "termination_grace_s",
    ):
        if name in fields and fields[name] not in (None, ""):
            found[name] = fields[name]
    if cpu_milli := parse_whole_number(fields.get("cpu_milli")):
        found["cores"] = f"{cpu_milli / 1000:g}"
    if memory_mib := parse_whole_number(fields.get("memory_mib")):
        found["memory_gib"] = format_gib(memory_mib)
    if min_gpu_memory_mib := parse_whole_number(fields.get("min_gpu_memory_mib")):
        found["min_gpu_memory_gib"] = format_gib(min_gpu_memory_mib)
    if time_limit_s := parse_whole_number(fields.get("time_limit_s")):
        found["time_limit_s"] = duration(time_limit_s).replace("\u00a0", " ")
    if "topology_constraint" in fields:
        found |= _topology_fields(fields["topology_constraint"])
    if isinstance(fields.get("command"), list):
        found["command"] = shlex.join(fields["command"])
    if isinstance(fields.get("env"), dict):
        found["env"] = "\n".join(f"{name}={value}" for name, value in fields["env"].items())
    if isinstance(fields.get("volumes"), list):
        found["volumes"] = format_volumes(each for each in fields["volumes"] if isinstance(each, dict))
    if isinstance(fields.get("secrets"), list):
        named = [each for each in fields["secrets"] if isinstance(each, dict)]
        found["secret_variables"] = format_secrets(named, "variable")
        found["secret_files"] = format_secrets(named, "file")
    for name in ("preemptible", "retry_on_failure"):
        if isinstance(found.get(name), str):
            found[name] = found[name].lower() in ("true", "1", "on")
    return found
