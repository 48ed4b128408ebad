"""What a submit carries, for jobs and workspaces: read once, turned into the service's request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.models import Q, QuerySet
from rest_framework import serializers

from agents.launchers import LAUNCHERS
from portal.access import visible_environments, visible_jobs, visible_projects
from portal.api.bodies import Closed, Number, Text, Whole, YesNo, read_body
from portal.errors import Invalid
from portal.models import Job, NodePool, Template, User
from portal.selectors.machines import templates_for
from portal.services.dependencies import MOST_DEPENDENCIES, unknown
from portal.services.jobs import (
    MAX_GPUS_PER_TASK,
    MAX_TASKS,
    MAX_TIME_LIMIT_S,
    PRIORITIES,
    JobRequest,
    check_job,
    would_start,
)
from portal.words.secrets import MINE, PROJECTS
from portal.words.states import JobKind

NAME = "Id or name."
PLACES = ("project", "environment", "pool", "template", "after")


class NearBody(Closed):
    """How close together the tasks of a job stand, by levels of a topology (topologies/)."""

    topology = Text(max_length=63, help_text="Its name.")
    required = Text(  # type: ignore[assignment]
        required=False,
        allow_null=True,
        default=None,
        max_length=317,
        help_text="A level: all tasks stand within one domain of it, or the job waits.",
    )
    preferred = Text(
        required=False,
        allow_null=True,
        default=None,
        max_length=317,
        help_text="A level that is tried first.",
    )


class JobVolumeBody(Closed):
    """A volume that a job reaches (volumes/)."""

    volume = Text(max_length=63, help_text="Its name.")
    target = Text(
        required=False,
        allow_null=True,
        default=None,
        max_length=1024,
        help_text="Where it stands in the container. null: /volumes/NAME.",
    )
    read_only = YesNo(required=False, default=False)  # type: ignore[assignment]


class JobSecretBody(Closed):
    """A secret that a job gets: as a variable, or as a file in the folder that FAIRWAY_SECRETS names."""

    secret = Text(max_length=63, help_text="Its name.")
    of = serializers.ChoiceField([MINE, PROJECTS], required=False, default=MINE)
    variable = Text(required=False, allow_null=True, default=None, max_length=128)
    file = Text(required=False, allow_null=True, default=None, max_length=64)


class Request(Closed):
    """What jobs and workspaces have in common. CPU and memory are for each task."""

    name = Text(max_length=100)
    project = Text(max_length=63, help_text=NAME)
    environment = Text(required=False, max_length=63, help_text=NAME + " Needed unless the template has one.")
    pool = Text(required=False, allow_null=True, max_length=63, help_text=NAME + " null: any pool.")
    template = Text(
        required=False,
        allow_null=True,
        max_length=63,
        help_text=NAME + " Its fields stand where this body is silent.",
    )
    gpus_per_task = Whole(required=False, min_value=0, max_value=MAX_GPUS_PER_TASK)
    milli_per_gpu = Whole(required=False, min_value=1, max_value=1000, help_text="1000 is a whole GPU.")
    gpu_model = Text(required=False, allow_blank=True, max_length=100)
    min_gpu_memory_mib = Whole(required=False, allow_null=True, min_value=1, max_value=10_000_000)
    mig_profile = Text(
        required=False,
        allow_blank=True,
        max_length=32,
        help_text="MIG slices of this profile; blank: whole GPUs.",
    )
    min_compute_capability = Number(
        required=False, allow_null=True, min_value=1.0, max_value=99.9, help_text="Such as 8.0."
    )
    near = NearBody(required=False, allow_null=True, help_text="null: anywhere.")
    cpu_milli = Whole(required=False, min_value=100, max_value=1_000_000)
    memory_mib = Whole(required=False, min_value=32, max_value=64 * 1024 * 1024)
    shm_mib = Whole(required=False, min_value=1, max_value=1024 * 1024)
    environ = serializers.DictField(
        required=False,
        child=Text(allow_blank=True, max_length=32_768),
        help_text="Environment variables: names with text values.",
    )
    volumes = JobVolumeBody(many=True, required=False)
    secrets = JobSecretBody(many=True, required=False)
    priority = Whole(required=False, min_value=PRIORITIES.start, max_value=PRIORITIES.stop - 1)
    preemptible = YesNo(required=False)
    time_limit_s = Whole(required=False, allow_null=True, min_value=1, max_value=MAX_TIME_LIMIT_S)
    stop_grace_s = Whole(required=False, min_value=1, max_value=600)
    held = YesNo(required=False)
    after = serializers.ListField(
        child=Text(max_length=63),
        required=False,
        max_length=MOST_DEPENDENCIES,
        help_text="Ids of jobs that must have completed before it starts. When one ends otherwise, it is cancelled.",
    )
    after_any = YesNo(required=False, help_text="true: it starts after them however they end.")


class WorkspaceBody(Request):
    """A new workspace."""


class JobBody(Request):
    """A new job."""

    kind = serializers.ChoiceField([JobKind.TRAINING.value, JobKind.SERVICE.value], required=False)
    tasks = Whole(required=False, min_value=1, max_value=MAX_TASKS)
    min_tasks = Whole(
        required=False,
        allow_null=True,
        min_value=1,
        max_value=MAX_TASKS,
        help_text="So many tasks are enough to run: it starts with these and grows while it runs. null: all.",
    )
    command = serializers.ListField(
        child=Text(allow_blank=True, max_length=65_536),
        required=False,
        max_length=4096,
        help_text="Argument list; no shell reads it.",
    )
    max_attempts = Whole(required=False, min_value=1, max_value=20)
    retry_failures = YesNo(
        required=False, help_text="true: a command that fails is tried again too, all its tasks as one."
    )
    launcher = serializers.ChoiceField(
        sorted(LAUNCHERS),
        required=False,
        help_text="How its tasks are told of each other (docs/jobs.md). Not for elastic jobs.",
    )


class AskBody(JobBody):
    """A request that is only asked about."""

    kind = serializers.ChoiceField([kind.value for kind in JobKind], required=False)


def job_request(person: User, given: Mapping[str, Any], body: type[Request]) -> JobRequest:
    """The service's request from a body: template filled in, names looked up among what the person sees."""
    template = _template(person, given.get("template"))
    if template is not None:
        known = body().fields
        filled = {name: value for name, value in template.fields.items() if name in known}
        if template.environment is not None:
            filled.setdefault("environment", template.environment.public_id)
        given = {**filled, **given}
    values = read_body(given, body)
    if issubclass(body, WorkspaceBody):
        values["kind"] = JobKind.WORKSPACE.value
    if "environment" not in values:
        raise Invalid(fields={"environment": "This field is required."})
    project = _one(visible_projects(person), values["project"], "project")
    environment = _one(visible_environments(person), values["environment"], "environment")
    pool = _one(NodePool.objects.all(), values["pool"], "pool") if values.get("pool") else None
    rest = {name: value for name, value in values.items() if name not in PLACES}
    after = _jobs(person, values.get("after", []))
    return JobRequest(
        **rest, project=project, environment=environment, pool=pool, template=template, after=after
    )


def check_request(person: User, given: Mapping[str, Any], body: type[Request]) -> None:
    """Raises what a submit would raise, the engine's answer included; must not run in a transaction."""
    wanted = job_request(person, given, body)
    check_job(person, wanted)
    would_start(person, wanted)


def _template(person: User, key: str | None) -> Template | None:
    if not key:
        return None
    if not isinstance(key, str):
        raise Invalid(fields={"template": "Not a text."})
    found: Template = _one(templates_for(person), key, "template")
    return found


def _jobs(person: User, keys: list[str]) -> list[Job]:
    """The jobs of these ids, each once, in the order given. Raises Invalid for one that the person cannot see."""
    seen = {job.public_id: job for job in visible_jobs(person).filter(public_id__in=keys)}
    for key in keys:
        if key not in seen:
            raise Invalid(fields={"after": unknown(key)})
    return [seen[key] for key in dict.fromkeys(keys)]


def _one(rows: QuerySet[Any], key: str, field: str) -> Any:
    found = rows.filter(Q(public_id=key) | Q(name=key)).first()
    if found is None:
        raise Invalid(fields={field: f"There is no such {field}, or you may not use it."})
    return found
