"""Initial values of the launch form, from a job, a template or API fields."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from django.db.models import Exists, OuterRef, Subquery

from portal.access import Permission, can, project_parents, require_permission
from portal.domain.jobs.job_spec import JobSpec, job_fields
from portal.domain.jobs.parameters import Parameter, describe_parameter, format_value, read_parameters
from portal.domain.jobs.pipeline_plans import (
    DEFAULT_MICRO_BATCHES,
    DEFAULT_SCHEDULE,
    MAX_MICRO_BATCHES,
    PIPELINE_PROGRAM,
    PROFILE_PROGRAM,
    PROFILE_VARIABLE,
    SCHEDULES,
    choice_of,
    launch_variables,
)
from portal.domain.jobs.template_parameters import (
    FILLED_AS_TEXT,
    field_parameters,
    fill_fields,
    read_template_parameters,
)
from portal.domain.projects.project_tree import path_to_root
from portal.domain.serving.model_servers import ServiceSpec, mlflow_command
from portal.domain.states import JobKind
from portal.domain.storage.data_sets import container_path, variable_name
from portal.domain.sweeps.sweep_progress import best_region
from portal.domain.sweeps.sweeps import SweepSpec, TrialState
from portal.hidden_fields import private_fields
from portal.models import DataSetVersion, Job, NodePool, PipelinePlan, Project, Service, Template, Trial, User
from portal.selectors.jobs.job_templates import list_templates
from portal.selectors.jobs.pipeline_plans import list_plans
from portal.selectors.nodes.free_nodes import plan_nodes
from portal.selectors.serving.model_servers import get_service
from portal.selectors.storage.data_sets import get_version
from portal.selectors.sweeps.sweeps import get_sweep
from portal.services.serving.model_servers import next_deployment
from portal.web.display.formatting import parse_whole_number
from portal.web.jobs.launch.data_fields import format_secrets, format_volumes
from portal.web.jobs.launch.form import launchable_projects, parameter_field_name
from portal.web.jobs.launch.launcher_fields import launcher_option_values
from portal.web.jobs.launch.roles import SHELL, format_command, role_initial
from portal.web.jobs.launch.spec_fields import form_values


def initial_from_job(user: User, job: Job, changes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a job as form values; variables and secrets only where the user may read them.

    ``changes`` are other values of fields (API names), for the parameters of its template that fill these fields.
    """
    private = private_fields(user, job)
    shown = {"env": private.env or {}, "secrets": private.secrets or []}
    shown["rank_overrides"] = private.rank_overrides or {}
    fields = {name: getattr(job, name) for name, rule in job_fields().items() if rule.copied} | shown
    return {
        "project": job.project.public_id,
        "environment": job.environment.public_id,
        "pool": job.pool.public_id if job.pool else "",
    } | _initial_from_template_of(user, job, fields, changes or {})


def _initial_from_template_of(
    user: User, job: Job, fields: dict[str, Any], changes: Mapping[str, str]
) -> dict[str, Any]:
    """Return the fields of a job (API names) as form values, with its template and its parameters.

    Without them if the user may not use the template any more, it has a new version, or the command was edited.
    """
    if job.template_id is None:
        return initial_from_api_fields(fields)
    template = list_templates(user).filter(pk=job.template_id).first()
    if template is None or template.version != job.template_version:
        return initial_from_api_fields(fields)
    filled = fill_fields(template.fields, job.parameters)
    if filled.get("command", []) != fields["command"]:
        return initial_from_api_fields(fields)
    kept = {name for name in FILLED_AS_TEXT & filled.keys() if filled[name] == fields[name]}
    start = initial_from_api_fields(fields | {name: template.fields[name] for name in kept})
    start |= {"template": template.public_id, "template_version": template.version}
    changed = {
        name: changes[field]
        for field, name in field_parameters(template.fields).items()
        if changes.get(field)
    }
    parameters = job.parameters | changed
    return start | {parameter_field_name(name): value for name, value in parameters.items()}


def initial_from_last_launch(user: User, kind: str) -> tuple[dict[str, Any], Job | Service | None]:
    """Return what the user last launched of this kind as form values, with a new name, and its row.

    Trials of sweeps do not count: their command contains values that the searcher chose. Launches in projects that
    the user has left do not either.
    """
    projects = launchable_projects(user)
    if kind == JobKind.SERVICE.value:
        service = Service.objects.filter(owner=user, project__in=projects).order_by("-id").first()
        found = initial_from_service(user, service.public_id) if service else {}
        return {name: value for name, value in found.items() if name not in ("service", "name")}, service
    own = Job.objects.filter(owner=user, kind=kind, project__in=projects)
    # conditions from which PostgreSQL sees that the newest jobs suffice, instead of reading and sorting all
    own = own.exclude(Exists(Trial.objects.filter(job=OuterRef("pk"))))
    newest = Subquery(own.order_by("-id").values("pk")[:1])
    job = Job.objects.filter(pk=newest).select_related("project", "environment", "pool").first()
    found = initial_from_job(user, job) if job else {}
    return {name: value for name, value in found.items() if name not in ("name", "resume_from")}, job


def _topology_fields(near: Any) -> dict[str, str]:
    """Return a topology constraint as form fields; None is no constraint."""
    constraint = near if isinstance(near, dict) else {}
    levels = {f"topology_{which}": constraint.get(which) for which in ("required", "preferred")}
    return {name: f"{constraint.get('topology')}:{level}" if level else "" for name, level in levels.items()}


def initial_from_template(template: Template) -> dict[str, Any]:
    """Return a template's fields (API names) as form values; commands and variables keep their placeholders."""
    defaults = {each.name: each.default for each in read_template_parameters(template.parameters)}
    filled = fill_fields(template.fields, defaults)
    fields = filled | {name: template.fields[name] for name in FILLED_AS_TEXT & template.fields.keys()}
    start: dict[str, Any] = {"kind": template.kind, "template": template.public_id, "name": template.name}
    start["template_version"] = template.version
    if template.environment is not None:
        start["environment"] = template.environment.public_id
    return start | initial_from_api_fields(fields) | _initial_sweep(template.sweep)


def _initial_sweep(sweep: dict[str, Any]) -> dict[str, Any]:
    """Return the sweep of a template as form values."""
    found = {name: value for name, value in sweep.items() if name not in ("parameters", "points")}
    if space := sweep.get("parameters"):
        found["sweep_parameters"] = _parameter_lines(read_parameters(space))
    elif points := sweep.get("points"):
        lines = [
            " ".join(f"{name}={format_value(value)}" for name, value in point.items()) for point in points
        ]
        found["sweep_parameters"] = "\n".join(lines)
    return found


def _parameter_lines(parameters: Mapping[str, Parameter]) -> str:
    return "\n".join(f"{name} = {describe_parameter(each)}" for name, each in parameters.items())


def initial_from_sweep(user: User, public_id: str, *, narrow: bool) -> dict[str, Any]:
    """Return what a sweep runs and searches as form values. Raise NotFound or Forbidden.

    ``narrow`` restricts the search to the region of its best completed trials.
    """
    sweep = get_sweep(user, public_id)
    require_permission(user, Permission.CONTROL, sweep)  # because its variables are copied
    spec = {name: getattr(sweep, name) for name in job_fields(SweepSpec) if name != "seed"}
    searched = _initial_sweep(spec | {"parameters": sweep.parameters, "points": sweep.points})
    if narrow:
        space = read_parameters(sweep.parameters)
        ended = sweep.trials.filter(state=TrialState.COMPLETED.value).values_list("parameters", "value")
        known = [(values, value) for values, value in ended if value is not None]
        region = best_region(space, known, sweep.direction)
        searched["sweep_parameters"] = _parameter_lines(space | region)
    return {
        "kind": JobKind.TRAINING.value,
        "project": sweep.project.public_id,
        "environment": sweep.environment.public_id,
        "pool": sweep.pool.public_id if sweep.pool else "",
        **initial_from_api_fields(sweep.job),
        **searched,
    }


def initial_from_api_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return API fields in the units of the form; unknown names are dropped."""
    found = form_values(JobSpec, fields)
    if "topology_constraint" in fields:
        found |= _topology_fields(fields["topology_constraint"])
    if isinstance(fields.get("command"), list):
        found["command"] = format_command(fields["command"])
    if isinstance(fields.get("roles"), list):
        found["roles"] = [role_initial(role) for role in fields["roles"] if isinstance(role, dict)]
    if isinstance(fields.get("env"), dict):
        found["env"] = "\n".join(f"{name}={value}" for name, value in fields["env"].items())
    found |= launcher_option_values(fields.get("launcher"), fields.get("launcher_options"))
    if isinstance(fields.get("rank_overrides"), dict):
        found["rank_overrides"] = "\n".join(
            f"{rank} {name}={value}"
            for rank, variables in fields["rank_overrides"].items()
            for name, value in variables.items()
        )
    if isinstance(fields.get("volumes"), list):
        found["volumes"] = format_volumes(each for each in fields["volumes"] if isinstance(each, dict))
    if isinstance(fields.get("secrets"), list):
        named = [each for each in fields["secrets"] if isinstance(each, dict)]
        found["secret_variables"] = format_secrets(named, "variable")
        found["secret_files"] = format_secrets(named, "file")
    return found


def initial_from_service(user: User, public_id: str) -> dict[str, Any]:
    """Return what a service runs as form values: for an update by its owner, for a copy by others.

    Raise NotFound or Forbidden.
    """
    service = get_service(user, public_id)
    require_permission(user, Permission.CONTROL, service)
    deployment = next_deployment(service)
    request, model = deployment.request, deployment.model
    values = {name: getattr(request, name) for name in job_fields()} | {
        "command": list(request.command),
        "volumes": list(request.volumes),
    }
    found = {
        "project": service.project.public_id,
        "environment": request.environment.public_id,
        "pool": request.pool.public_id if request.pool else "",
        "model_name": model.name if model else "",
        "model_version": model.version if model else "",
        **{name: getattr(deployment.spec, name) for name in job_fields(ServiceSpec)},
    } | initial_from_api_fields(values)
    if service.owner_id == user.pk:
        return found | {"service": service.public_id}
    del found["name"]  # it is in use
    return found


def initial_from_model(name: str, version: str, project: str) -> dict[str, Any]:
    """Return a service for a version of a registered model as form values."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:60]
    return {
        "name": slug or "model",
        "project": project,
        "model_name": name,
        "model_version": version,
        "command": format_command(mlflow_command(name, version)),
        "readiness_path": "/ping",
    }


def initial_from_data_set(user: User, public_id: str) -> dict[str, Any]:
    """Return the read-only volume of a version of a data set and the variable with its path as form values.

    The project is that of the data set, or one that may use the volume. Raise NotFound.
    """
    version = get_version(user, public_id)
    volume, name = version.volume.name, variable_name(version.data_set.name)
    fields = {
        "volumes": [{"volume": volume, "target": None, "read_only": True}],
        "env": {name: container_path(volume, version.path)},
    }
    project = _project_for(user, version)
    return initial_from_api_fields(fields) | ({"project": project.public_id} if project else {})


def _project_for(user: User, version: DataSetVersion) -> Project | None:
    if can(user, Permission.SUBMIT, version.data_set.project):
        return version.data_set.project
    allowed, parents = set(version.volume.projects.values_list("pk", flat=True)), project_parents()
    for project in launchable_projects(user):
        line: list[int] = path_to_root(project.pk, parents.get)
        if not allowed or allowed.intersection(line):
            return project
    return None


def initial_from_plan(user: User, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a job that runs one of a plan's divisions as form values; empty if none can be run.

    It prefers the nodes that are free for it now.
    """
    row = list_plans(user).filter(public_id=query["plan"]).first()
    fields = plan_fields(row, query) if row else None
    if row is None or fields is None:
        return {}
    free = plan_nodes(user, row)
    nodes = free if len(free) == row.nodes else []
    pool = NodePool.objects.get(pk=nodes[0].pool_id) if nodes else row.pool
    fields["preferred_nodes"] = [one.name for one in nodes]
    return {
        "kind": JobKind.TRAINING.value,
        "project": row.profile.project.public_id,
        "pool": pool.public_id if pool else "",
    } | initial_from_api_fields(fields)


def plan_fields(row: PipelinePlan, query: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the fields (API names) of a job that runs the plan's division ``choice``; None if it has none.

    ``m`` is the number of micro-batches a step.
    """
    found = choice_of(row.answer, query.get("choice", "best"))
    if found is None:
        return None
    number = min(parse_whole_number(query.get("m", "")) or DEFAULT_MICRO_BATCHES, MAX_MICRO_BATCHES)
    asked = query.get("schedule", "")
    schedule = asked if asked in SCHEDULES else DEFAULT_SCHEDULE
    return {
        "name": f"pipeline-{found['config'].replace('-', '')}"[:60],
        "tasks": row.nodes,
        "gpus_per_task": row.gpus_per_node,
        "launcher": "torchrun" if row.nodes * row.gpus_per_node > 1 else "none",
        "env": launch_variables(row.public_id, found, number, schedule),
        "command": [
            *SHELL,
            f'python "$FAIRWAY_SECRETS/{PIPELINE_PROGRAM}"{model_options(row, found, number)}',
        ],
    }


def model_options(row: PipelinePlan, division: dict[str, Any], micro_batches: int) -> str:
    """Return the options that name model and input of a measured profile; blank if the profile does not say."""
    model, shape = (row.profile.content.get(key) for key in ("model", "input"))
    known = isinstance(model, str) and ":" in model and isinstance(shape, list) and shape
    if not known or not all(isinstance(size, int) and size > 0 for size in shape):
        return ""
    samples = shape[0] * micro_batches * max(stage["replicas"] for stage in division["stages"])
    return " " + shlex.join(["--model", model, "--input", ",".join(map(str, [samples, *shape[1:]]))])


def initial_from_profile(name: str, model: str, shape: str) -> dict[str, Any]:
    """Return a job on one GPU that measures the layers of a model as form values."""
    words = shlex.join([model, "--input", shape, "--output", "-"])
    fields = {
        "name": f"profile-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}"[:60],
        "gpus_per_task": 1,
        "env": {PROFILE_VARIABLE: name[:100]},
        "command": [*SHELL, f'python "$FAIRWAY_SECRETS/{PROFILE_PROGRAM}" {words}'],
    }
    return {"kind": JobKind.TRAINING.value} | initial_from_api_fields(fields)
