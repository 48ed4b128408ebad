"""What runs under an account was written by that account, whoever uses an operation or a page."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import transaction
from django.urls import URLPattern, URLResolver

from agents.node.storage.files import CHANGES
from portal.api import urls
from portal.domain.jobs.job_spec import job_fields
from portal.domain.states import RuntimeKind
from portal.errors import Forbidden
from portal.models import (
    Environment,
    FileRequest,
    Job,
    Schedule,
    Secret,
    Service,
    ServiceReplica,
    ServiceVersion,
    Sweep,
    Template,
    User,
    Volume,
)
from portal.services.environments.environments import (
    COLUMNS,
    RUN_COLUMNS,
    EnvironmentInput,
    do_save_environment,
)
from portal.services.jobs.bulk import BULK_ACTIONS
from portal.services.jobs.changes import CHANGEABLE_FIELDS, do_change_job
from portal.services.jobs.job_templates import TemplateInput, do_save_template
from portal.services.jobs.schedules import submit_due_job
from portal.services.serving.advance import advance_service
from portal.services.serving.model_servers import do_update_service, next_deployment
from tests import factories
from tests.access.pages import PAGES, Page
from tests.access.test_pages import ask
from tests.api.fixture_data import FixtureData
from tests.api.table import ROWS, Row
from tests.api.test_contract import call

OTHERS = ("manager", "admin")
"""Who may do something to the work of ``member``; ``test_who_may`` tries the others."""
OPERATIONAL = {
    *(
        "tasks",
        "min_tasks",
        "gpus_per_task",
        "milli_per_gpu",
        "gpu_model",
        "min_gpu_memory_mib",
        "mig_profile",
    ),
    *("cpu_milli", "memory_mib", "shm_mib", "preemptible"),
    *("min_compute_capability", "allow_mixed_gpus", "priority", "time_limit_s", "ignore_dependency_failure"),
    *("pool", "project", "dependencies"),
}
"""What managers change of the jobs of others (docs/jobs.md): where, when and for how long a job runs, not what."""
CODE = {name for name, rule in job_fields().items() if rule.copied} - OPERATIONAL - {"name", "kind"}
EVIL: dict[str, Any] = {
    "command": ["cat", "/secrets"],
    "program": "print(1)",
    "env": {"WORD": "theirs"},
    "secrets": [{"secret": "own", "variable": "OWN"}],
    "volumes": [{"volume": "team"}],
    "code_repository": "https://git.example.org/lab/vit.git",
    "code_archive": "0" * 64,
    "code_path": "/volumes/team/x",
}
"""What somebody else would like the owner's account to run."""
ACCEPT_CODE = {"services_update", "templates_change"}
"""Operations on a row that accept what runs: only by the owner of the service, and of a private template."""
NAMES = ("job", "running", "ended", "workspace", "service", "sweep", "schedule", "trial", "template", "lab")
RUNNABLE = tuple(
    f"{{{name}}}"
    for name in (*NAMES, "own_template", "running_workspace", "ended_workspace", "checkpoint", "saved")
)


def what_runs_as(owner: User) -> dict[str, Any]:
    """Everything that runs, or will run, under an account, and what was written into its folders."""
    columns = sorted({*CODE, "image_digest", "environment_id"})
    services = Service.objects.filter(owner=owner)
    environments = Environment.objects.filter(owner=owner).values_list(
        "public_id", "image_digest", *RUN_COLUMNS
    )
    writes = FileRequest.objects.filter(task__attempt__job__owner=owner, action__in=CHANGES)
    found = {
        "jobs": [*Job.objects.filter(owner=owner).order_by("pk").values("public_id", *columns)],
        "sweeps": [*Sweep.objects.filter(owner=owner).values("public_id", "job", "points", "parameters")],
        "schedules": [*Schedule.objects.filter(owner=owner).values("public_id", "job", "environment")],
        "versions": [
            *ServiceVersion.objects.filter(service__in=services).values("pk", "job", "environment", "port")
        ],
        "environments": [*environments],
        "templates": [
            *Template.objects.filter(owner=owner, scope="self").values("pk", "fields", "environment")
        ],
        "writes": [*writes.values("target", "path")],
        "secrets": [*Secret.objects.filter(owner=owner).values("name", "encrypted_value")],
    }
    return json.loads(json.dumps(found, default=str))


def is_part(found: dict[str, list[Any]], before: dict[str, list[Any]]) -> bool:
    """Return True if nothing was added or changed; managers may delete."""
    return all(each in before[kind] for kind, rows in found.items() for each in rows)


OPERATIONS = [row for row in ROWS if row.method != "get" and any(name in row.path for name in RUNNABLE)]
ACTIONS = [page for page in PAGES if page.method == "post" and any(name in page.path for name in RUNNABLE)]


@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: row.name)
def test_no_operation_lets_others_write_what_runs(row: Row, fixture_data: FixtureData) -> None:
    owner = fixture_data.people["member"]
    before = what_runs_as(owner)
    for actor in OTHERS:
        more = [] if row.name not in ACCEPT_CODE else [{"job": {name: EVIL[name]}} for name in EVIL]
        for body in (row.body, *([EVIL, *more] if actor == "manager" else [])):
            with transaction.atomic():
                call(fixture_data, Row(**(vars(row) | {"body": body})), actor)
                assert is_part(what_runs_as(owner), before), (actor, body)
                transaction.set_rollback(True)


@pytest.mark.parametrize("page", ACTIONS, ids=lambda page: page.name)
def test_no_page_lets_others_write_what_runs(page: Page, fixture_data: FixtureData) -> None:
    owner = fixture_data.people["member"]
    before = what_runs_as(owner)
    typed = {name: value if isinstance(value, str) else "id" for name, value in EVIL.items()}
    for actor, body in (("manager", page.body), ("admin", typed | (page.body or {}))):
        with transaction.atomic():
            ask(fixture_data, Page(**(vars(page) | {"body": body})), actor)
            assert is_part(what_runs_as(owner), before), (actor, body)
            transaction.set_rollback(True)


def test_only_these_operations_on_a_row_accept_what_runs() -> None:
    """A new one must be decided: who writes what it accepts, and whose account runs it."""

    def walk(patterns: list[URLPattern | URLResolver]) -> set[str]:
        found = set()
        for pattern in patterns:
            if isinstance(pattern, URLResolver):
                found |= walk(pattern.url_patterns)
                continue
            view: Any = pattern.callback
            for method in ("post", "put", "patch"):
                operation = getattr(getattr(getattr(view, "cls", None), method, None), "operation", None)
                names = set(operation.body().fields) if operation and operation.body else set()
                if names & (CODE | {"job", "fields", "image"}) and pattern.pattern.converters:
                    found.add(operation.name)
        return found

    assert walk(urls.urlpatterns) == ACCEPT_CODE


def test_what_others_change_of_a_job_is_not_what_it_runs() -> None:
    assert set(CHANGEABLE_FIELDS) == OPERATIONAL
    assert {action.parameter for action in BULK_ACTIONS.values()} - {""} <= OPERATIONAL


def test_the_launch_form_updates_only_a_service_of_the_user(fixture_data: FixtureData) -> None:
    service, owner = fixture_data.rows["service"], fixture_data.people["member"]
    before = what_runs_as(owner)
    typed = {
        "kind": "service", "name": "answers", "project": fixture_data.names["project"], "tasks": "1",
        "environment": fixture_data.rows["batch"].public_id, "command": "cat /secrets", "port": "80",
        "gpus_per_task": "0", "cores": "1", "memory_gib": "1", "shm_mib": "64", "replicas": "1", "drain_s": "10",
        "access": "project", "readiness_timeout_s": "60", "service": service.public_id, "time_zone": "UTC",
        "termination_grace_s": "5", "max_attempts": "1", "priority": "0", "launcher": "none", "overlap": "skip",
        "milli_per_gpu": "1000", "retry_backoff_s": "10", "retry_max_backoff_s": "10", "on_stall": "notify",
    }  # fmt: skip
    for actor in ("manager", "admin"):
        answer = fixture_data.client(actor).post("/launch/", typed)
        assert "Deploy a copy: it runs under your account." in answer.content.decode(), actor
        assert what_runs_as(owner) == before
        shown = fixture_data.client(actor).get(f"/launch/?kind=service&service={service.public_id}")
        form = shown.context["form"]
        assert form["command"].value() == "serve" and not form["service"].value()
        page = fixture_data.client(actor).get(f"/services/{service.public_id}/").content.decode()
        assert "Deploy a copy" in page
    assert fixture_data.client("member").post("/launch/", typed).status_code == 302


@pytest.mark.parametrize("change", [{"port": 8081}, {}, {"job": {"command": ["serve2"]}}])
def test_the_owner_updates_a_service_with_the_fields_that_change(
    fixture_data: FixtureData, change: dict[str, Any]
) -> None:
    """The other fields are those of the current version, lists and the values of a template included."""
    client, path = fixture_data.client("member"), "/api/v1/services/"
    rows = {"project": "vision", "environment": "batch", "template": fixture_data.names["own_template"]}
    values = {"env": {"A": "b"}, "secrets": EVIL["secrets"], "seed": 4, "gpu_model": "", "retry_on": []}
    job = {"name": "svc", "command": ["serve"], **rows, **values}
    made = client.post(path, json.dumps({"job": job}), content_type="application/json")
    assert made.status_code == 201, made.content
    answer = client.post(
        f"{path}{made.json()['id']}/versions/", json.dumps(change), content_type="application/json"
    )
    assert answer.status_code == 200, answer.content
    first, second = ServiceVersion.objects.filter(service__public_id=made.json()["id"]).order_by("number")
    expected = first.job | change.get("job", {}) | {"parameters": {}, "template_version": None}
    assert second.job == expected and second.port == change.get("port", first.port)
    assert second.environment == first.environment


def test_a_version_by_somebody_else_is_not_started(fixture_data: FixtureData) -> None:
    """Such a version was written when managers could update the services of others."""
    service, manager = fixture_data.rows["service"], fixture_data.people["manager"]
    ServiceReplica.objects.all().delete()
    ServiceVersion.objects.create(
        service=service, number=2, environment=fixture_data.rows["batch"], created_by=manager,
        job={"name": "answers", "command": ["cat", "/secrets"], "gpus_per_task": 0},
    )  # fmt: skip
    advance_service(service.public_id)
    service.refresh_from_db()
    assert not ServiceReplica.objects.exists()
    assert "Version 2 is by manager-x: the owner must update the service." in service.message
    request = next_deployment(service).request
    assert list(request.command) == ["serve"], "the owner's own version"
    Service.objects.update(retry_at=None)
    do_update_service(service.owner, service, next_deployment(service))
    advance_service(service.public_id)
    assert ServiceReplica.objects.get().job.command == ["serve"]


def test_a_job_with_content_of_its_project_is_moved_by_its_owner_alone(fixture_data: FixtureData) -> None:
    owner, manager, admin = (fixture_data.people[name] for name in ("member", "manager", "admin"))
    other = factories.project("other", member=owner, manager=manager)
    batch, project = fixture_data.rows["batch"], fixture_data.rows["project"]
    Volume.objects.create(name="shelf", kind="project", scope="shared", path="/shelf")
    Secret.objects.create(project=project, name="key", encrypted_value="x", changed_by="x")
    Secret.objects.create(project=other, name="key", encrypted_value="y", changed_by="x")
    mounts = [{"volume": "shelf", "target": "/shelf", "read_only": True}]
    secrets = [{"secret": "key", "owner_type": "project", "variable": "KEY"}]
    for fields in ({"secrets": secrets}, {"volumes": mounts}):
        job = factories.job(owner, project, batch, name="moves", **fields)
        for actor in (manager, admin):
            with pytest.raises(Forbidden, match="Only its owner can change what it runs"):
                do_change_job(actor, job, {"project": other})
        assert do_change_job(owner, job, {"project": other}).project == other
    plain = factories.job(owner, project, batch, name="plain")
    assert do_change_job(manager, plain, {"project": other}).project == other


def test_private_environments_and_templates_are_changed_by_their_owner_alone(
    fixture_data: FixtureData,
) -> None:
    owner, admin = fixture_data.people["member"], fixture_data.people["admin"]
    environment = factories.environment("saved-by-member", owner=owner)
    values = {key: getattr(environment, key) for key in COLUMNS}
    values |= {"runtime": RuntimeKind.PODMAN, "image": "docker.io/base:1"}
    Environment.objects.filter(pk=environment.pk).update(image=values["image"])
    environment.refresh_from_db()
    for change in ({"image": "docker.io/evil:1"}, {"tool_command": ("sh",)}):
        with pytest.raises(Forbidden, match="Only its owner"), transaction.atomic():
            do_save_environment(admin, EnvironmentInput(**values | change), environment)
        environment.refresh_from_db()
    saved = do_save_environment(admin, EnvironmentInput(**values | {"enabled": False}), environment)
    assert not saved.enabled
    given = TemplateInput(name="mine", title="Mine", fields={"command": ["train"]})
    template = do_save_template(owner, given)
    changed = TemplateInput(name="mine", title="Mine", fields={"command": ["cat", "/secrets"]})
    with pytest.raises(Forbidden, match="Only its owner"):
        do_save_template(admin, changed, template)
    wider = {"scope": "everyone"}
    with pytest.raises(Forbidden, match="Only its owner"):
        do_save_template(admin, TemplateInput(**vars(changed) | wider), template)
    assert do_save_template(admin, TemplateInput(**vars(given) | wider), template).scope == "everyone"
    template = do_save_template(admin, TemplateInput(**vars(changed) | wider), template)
    with pytest.raises(Forbidden, match="Only its owner"):  # it would be private, with what others wrote
        do_save_template(admin, changed, template)
    assert do_save_template(owner, given, template).scope == "self"


def test_a_changed_template_does_not_change_what_a_schedule_runs(fixture_data: FixtureData) -> None:
    owner, manager = fixture_data.people["member"], fixture_data.people["manager"]
    schedule, template = fixture_data.rows["schedule"], fixture_data.rows["own_template"]
    Schedule.objects.filter(pk=schedule.pk).update(
        template=template, next_at="2026-01-01T00:00Z", overlap="allow"
    )
    given = {name: getattr(template, name) for name in TemplateInput.__dataclass_fields__}
    do_save_template(manager, TemplateInput(**given | {"fields": {"command": ["cat", "/secrets"]}}), template)
    submit_due_job(schedule.pk)
    run = schedule.runs.exclude(job=fixture_data.rows["job"]).get()
    job = run.job
    assert job is not None and (job.command, job.owner) == (["true"], owner)


def test_a_copy_runs_as_the_one_who_makes_it(fixture_data: FixtureData) -> None:
    """With the copier's home and secrets: the owner's private secrets are not carried over."""
    owner, manager = fixture_data.people["member"], fixture_data.people["manager"]
    Secret.objects.create(owner=owner, name="mine", encrypted_value="x", changed_by="x")
    ended = fixture_data.rows["ended"]
    copied = fixture_data.client("manager").post(
        f"/api/v1/jobs/{ended.public_id}/resubmit/", "{}", "application/json"
    )
    assert copied.status_code == 201, copied.content
    assert Job.objects.get(public_id=copied.json()["id"]).owner == manager
    Job.objects.filter(pk=ended.pk).update(
        secrets=[{"secret": "mine", "owner_type": "me", "variable": "MINE"}]
    )
    jobs = Job.objects.count()
    for action in ("resubmit", "rerun"):
        refused = fixture_data.client("manager").post(
            f"/api/v1/jobs/{ended.public_id}/{action}/", "{}", "application/json"
        )
        assert 400 <= refused.status_code < 500 and "mine" in refused.content.decode(), refused.content
    assert Job.objects.count() == jobs
