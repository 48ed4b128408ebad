"""Bodies of job and workspace submissions, and their conversion to the service's request."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from django.db.models import Q, QuerySet
from django.http import HttpResponse
from rest_framework import serializers

from agents.launchers import LAUNCHERS
from portal.access import visible_environments, visible_jobs, visible_projects
from portal.api.framework.request_parsing import (
    StrictBooleanField,
    StrictCharField,
    StrictDateTimeField,
    StrictFloatField,
    StrictIntegerField,
    StrictSerializer,
    read_body,
)
from portal.api.framework.views import ApiView
from portal.domain.jobs.job_spec import JobField, JobRole, JobSpec, job_fields
from portal.domain.jobs.roles import MAX_PORTS, MAX_ROLES
from portal.domain.projects.secrets import PROJECT_SCOPE, USER_SCOPE
from portal.domain.states import JobKind
from portal.errors import InvalidRequest
from portal.models import Job, NodePool, Template, User
from portal.models.public_id import MAX_NAME_LENGTH
from portal.selectors.jobs.job_templates import list_templates
from portal.services.jobs.dependencies import MAX_DEPENDENCIES, unknown_job_message
from portal.services.jobs.feasibility import known_gpu_models
from portal.services.jobs.job_templates import fill_template
from portal.services.jobs.submission import JobRequest, do_submit_job, preview_start, validate_request

ID_OR_NAME = "Id or name."
MAX_LIST_ITEMS = 64
REFERENCE_FIELDS = ("project", "environment", "pool", "template", "dependencies")


class TopologyConstraintBody(StrictSerializer):
    """Topology levels within which the tasks of a job are placed (topologies/)."""

    topology = StrictCharField(max_length=63, help_text="Name of the topology.")
    required = StrictCharField(  # type: ignore[assignment]
        required=False,
        allow_null=True,
        default=None,
        max_length=317,
        help_text="Level within one domain of which all tasks must run; until then the job is pending.",
    )
    preferred = StrictCharField(
        required=False,
        allow_null=True,
        default=None,
        max_length=317,
        help_text="Level within one domain of which the tasks run if possible.",
    )


class JobVolumeBody(StrictSerializer):
    """A volume mount of a job (volumes/)."""

    volume = StrictCharField(max_length=63, help_text="Name of the volume.")
    target = StrictCharField(
        required=False,
        allow_null=True,
        default=None,
        max_length=1024,
        help_text="Mount path in the container; null for /volumes/NAME.",
    )
    read_only = StrictBooleanField(required=False, default=False)  # type: ignore[assignment]


class JobSecretBody(StrictSerializer):
    """A secret of a job: an environment variable, or a file in the directory $FAIRWAY_SECRETS."""

    secret = StrictCharField(max_length=63, help_text="Name of the secret.")
    owner_type = serializers.ChoiceField([USER_SCOPE, PROJECT_SCOPE], required=False, default=USER_SCOPE)
    variable = StrictCharField(required=False, allow_null=True, default=None, max_length=128)
    file = StrictCharField(required=False, allow_null=True, default=None, max_length=64)


def build_body_field(rule: JobField) -> serializers.Field[Any, Any, Any, Any]:
    """Return the field of a body that is declared by the rule."""
    options: dict[str, Any] = {"required": rule.default is None and not rule.nullable}
    options |= {"allow_null": True} if rule.nullable else {}
    texts = [rule.help, f"null: {rule.if_null}." if rule.if_null else ""]
    options |= {"help_text": " ".join(filter(None, texts)) or None}
    if rule.is_list:
        child: serializers.Field[Any, Any, Any, Any]
        if rule.choices:
            child = serializers.ChoiceField(rule.choices)
        elif rule.pattern:
            child = StrictCharField(max_length=MAX_NAME_LENGTH)
        else:
            child = StrictIntegerField(min_value=int(rule.minimum or 0), max_value=int(rule.maximum or 0))
        return serializers.ListField(child=child, max_length=MAX_LIST_ITEMS, **options)
    if rule.choices:
        return serializers.ChoiceField(rule.choices, **options)
    if rule.value_type is bool:
        return StrictBooleanField(**options)
    if rule.is_number:
        options |= {"min_value": rule.minimum, "max_value": rule.maximum}
        return StrictIntegerField(**options) if rule.value_type is int else StrictFloatField(**options)
    if rule.value_type is dt.datetime:
        return StrictDateTimeField(**options)
    return StrictCharField(max_length=rule.max_length, allow_blank=rule.default == "", **options)


def command_field(help_text: str) -> serializers.ListField:
    return serializers.ListField(
        child=StrictCharField(allow_blank=True, max_length=65_536),
        required=False,
        max_length=4096,
        help_text=help_text,
    )


class JobRoleBody(StrictSerializer):
    """A role of a job: equal tasks, with amounts and a command of their own."""

    name = StrictCharField(max_length=20, help_text="Such as chief, worker or evaluator.")
    command = command_field("Argument list; empty or omitted: the command of the job.")
    ports = serializers.ListField(
        child=StrictCharField(max_length=20),
        required=False,
        max_length=MAX_PORTS,
        help_text="Names of ports that its tasks listen on; each task gets a free port of its node for each name.",
    )

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """Return the fields above and those of ``JobRole``."""
        rules = [rule for rule in job_fields(JobRole).values() if rule.is_scalar]
        return {rule.name: build_body_field(rule) for rule in rules} | super().get_fields()


class SubmitBody(StrictSerializer):
    """Fields common to jobs and workspaces. CPU and memory are per task."""

    spec: type[JobSpec] = JobSpec
    kinds: tuple[JobKind, ...] = ()
    """Kinds that it accepts; empty: the route decides, and fields of jobs alone are refused."""

    project = StrictCharField(max_length=63, help_text=ID_OR_NAME)
    environment = StrictCharField(
        required=False, max_length=63, help_text=ID_OR_NAME + " Required unless the template has one."
    )
    pool = StrictCharField(
        required=False, allow_null=True, max_length=63, help_text=ID_OR_NAME + " null for any pool."
    )
    template = StrictCharField(
        required=False,
        allow_null=True,
        max_length=63,
        help_text=ID_OR_NAME + " Provides the fields that the body omits.",
    )
    parameters = serializers.DictField(
        required=False,
        child=serializers.JSONField(allow_null=True),
        help_text="Values of the parameters of the template by name; others have their defaults.",
    )
    topology_constraint = TopologyConstraintBody(
        required=False, allow_null=True, help_text="null if unconstrained."
    )
    env = serializers.DictField(
        required=False,
        child=StrictCharField(allow_blank=True, max_length=32_768),
        help_text="Environment variables, by name.",
    )
    volumes = JobVolumeBody(many=True, required=False)
    secrets = JobSecretBody(many=True, required=False)
    dependencies = serializers.ListField(
        child=StrictCharField(max_length=63),
        required=False,
        max_length=MAX_DEPENDENCIES,
        help_text="Ids of jobs that must complete before it starts. If one ends otherwise, the job is cancelled.",
    )

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """Return the fields above and those of the specification."""
        rules = [rule for rule in job_fields(self.spec).values() if self.kinds or not rule.jobs_only]
        return {
            rule.name: self._build_field(rule) for rule in rules if rule.is_scalar or rule.is_list
        } | super().get_fields()

    def _build_field(self, rule: JobField) -> serializers.Field[Any, Any, Any, Any]:
        choices = tuple(kind.value for kind in self.kinds) if rule.name == "kind" else rule.choices
        return build_body_field(replace(rule, choices=choices))


class WorkspaceBody(SubmitBody):
    """A new workspace."""


class JobBody(SubmitBody):
    """A new job."""

    kinds: tuple[JobKind, ...] = (JobKind.TRAINING, JobKind.WORKSPACE)
    command = command_field("Argument list; not interpreted by a shell.")
    roles = JobRoleBody(
        many=True,
        required=False,
        help_text=f"At most {MAX_ROLES} roles whose tasks differ; ranks are numbered role by role. `tasks` is then "
        "their sum, and the amounts of the job apply to roles without their own (docs/jobs.md).",
    )
    launcher = serializers.ChoiceField(
        sorted(LAUNCHERS),
        required=False,
        help_text="How its tasks find each other (docs/training.md). Elastic jobs can use some of them.",
    )
    launcher_options = serializers.DictField(
        required=False, help_text="Options of the launcher by name (launchers/); others have their defaults."
    )
    rank_overrides = serializers.DictField(
        required=False,
        child=serializers.DictField(child=StrictCharField(allow_blank=True, max_length=32_768)),
        help_text="Variables of single ranks: {rank: {name: value}}. They override those of the launcher.",
    )


class JobPreviewBody(JobBody):
    """A request that is previewed, not submitted."""

    kinds = tuple(JobKind)


def build_job_request(
    user: User, given: Mapping[str, Any], body: type[SubmitBody], *, swept: Set[str] = frozenset()
) -> JobRequest:
    """Return the service's request: template applied, names resolved among the rows visible to the user.

    ``swept``: parameters of the template that a sweep fills in for each trial.
    """
    template = _get_template(user, given.get("template"))
    based: dict[str, Any] = {"parameters": {}, "template_version": None}
    if template is not None:
        checked = read_body({name: given[name] for name in based if name in given}, body, partial=True)
        filled = fill_template(
            template,
            checked.get("parameters", {}),
            version=checked.get("template_version"),
            swept=swept,
        )
        based = {name: filled.pop(name) for name in based}
        known = body().fields
        filled = {name: value for name, value in filled.items() if name in known}
        if template.environment is not None:
            filled.setdefault("environment", template.environment.public_id)
        given = {**filled, **given}
    elif given.get("parameters") or given.get("template_version"):
        raise InvalidRequest(fields={"template": "Parameters and a version need a template."})
    values = read_body(given, body) | based
    if issubclass(body, WorkspaceBody):
        values["kind"] = JobKind.WORKSPACE.value
    if "environment" not in values:
        raise InvalidRequest(fields={"environment": "This field is required."})
    project = get_referenced_row(visible_projects(user), values["project"], "project")
    environment = get_referenced_row(visible_environments(user), values["environment"], "environment")
    pool = get_referenced_row(NodePool.objects.all(), values["pool"], "pool") if values.get("pool") else None
    rest = {name: value for name, value in values.items() if name not in REFERENCE_FIELDS}
    if rest.get("gpu_model"):
        rest["gpu_model"] = known_gpu_models(rest["gpu_model"])
    after = _get_jobs(user, values.get("dependencies", []))
    request = JobRequest(
        **rest, project=project, environment=environment, pool=pool, template=template, dependencies=after
    )
    if values.get("tasks", request.tasks) != request.tasks:
        raise InvalidRequest(
            fields={"tasks": f"Leave it out: with roles it is their sum, here {request.tasks}."}
        )
    return request


def check_job_request(user: User, given: Mapping[str, Any], body: type[SubmitBody]) -> None:
    """Raise what a submission would raise, including refusals of the scheduler; not within a transaction."""
    wanted = build_job_request(user, given, body)
    validate_request(user, wanted)
    preview_start(user, wanted)


def submit_response(
    view: ApiView, body: type[SubmitBody], represent: Callable[[User, Job], dict[str, Any]]
) -> HttpResponse:
    """Submit the request in the body of ``view`` at most once per Idempotency-Key, and return the job."""
    user, given = view.user, view.raw_body

    def work() -> dict[str, Any]:
        return represent(user, do_submit_job(user, build_job_request(user, given, body)))

    return view.idempotent_response(work, precheck=lambda: check_job_request(user, given, body))


def _get_template(user: User, key: str | None) -> Template | None:
    if not key:
        return None
    if not isinstance(key, str):
        raise InvalidRequest(fields={"template": "Must be a string."})
    found: Template = get_referenced_row(list_templates(user), key, "template")
    return found


def _get_jobs(user: User, keys: list[str], known: Iterable[Job] = ()) -> list[Job]:
    """Return the distinct jobs of these ids in the given order. Raise InvalidRequest for an invisible one.

    Those ``known`` to the user may be invisible.
    """
    seen = {job.public_id: job for job in (*known, *visible_jobs(user).filter(public_id__in=keys))}
    for key in keys:
        if key not in seen:
            raise InvalidRequest(fields={"dependencies": unknown_job_message(key)})
    return [seen[key] for key in dict.fromkeys(keys)]


class JobChangeBody(StrictSerializer):
    """New values of a waiting job; fields that are left out keep theirs."""

    version = StrictIntegerField(
        required=False,
        min_value=0,
        help_text="Version of the job that you saw; refused if it was changed since.",
    )
    project = StrictCharField(required=False, max_length=63, help_text=ID_OR_NAME)
    pool = StrictCharField(
        required=False, allow_null=True, max_length=63, help_text=ID_OR_NAME + " null for any pool."
    )
    dependencies = serializers.ListField(
        child=StrictCharField(max_length=63),
        required=False,
        max_length=MAX_DEPENDENCIES,
        help_text="Ids of all its dependencies, which are older than the job.",
    )

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """Return the fields above and the changeable fields of ``JobSpec``."""
        rules = (rule for rule in job_fields().values() if rule.changeable)
        return {rule.name: build_body_field(rule) for rule in rules} | super().get_fields()


def resolve_changes(user: User, job: Job, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a ``JobChangeBody`` with rows in place of their names, without the version."""
    found = {name: value for name, value in values.items() if name != "version"}
    if "project" in found:
        found["project"] = get_referenced_row(visible_projects(user), found["project"], "project")
    if found.get("pool"):
        found["pool"] = get_referenced_row(NodePool.objects.all(), found["pool"], "pool")
    if "dependencies" in found:
        present = Job.objects.filter(dependents__job=job)
        found["dependencies"] = tuple(_get_jobs(user, found["dependencies"], present))
    return found


def get_referenced_row(rows: QuerySet[Any], key: str, field: str) -> Any:
    found = rows.filter(Q(public_id=key) | Q(name=key)).first()
    if found is None:
        raise InvalidRequest(fields={field: f"There is no such {field}, or you may not use it."})
    return found
