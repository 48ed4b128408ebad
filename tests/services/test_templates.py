"""Templates: who sees and changes them, their versions, and jobs and sweeps that are made from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from portal.api.jobs.job_requests import JobBody, build_job_request
from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound
from portal.models import AuditEntry, Job, Template
from portal.selectors.jobs.job_templates import gallery_templates, get_template, list_templates
from portal.services.jobs.job_templates import TemplateInput, do_save_template
from portal.services.jobs.starter_templates import ensure_starter_templates, shipped_templates
from portal.services.jobs.submission import do_cancel_job, do_resubmit_job, do_submit_job
from portal.services.sweeps.advance import advance_sweep
from portal.services.sweeps.sweeps import SweepSpec, do_create_sweep
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

GIVEN = TemplateInput(
    name="train",
    title="Train",
    fields={
        "command": ["python", "{fairway:secrets}/program", "--lr", "{lr}", "--data", "{data}"],
        "program": "print(f'{lr}')",
        "gpus_per_task": "{gpus}",
    },
    parameters=[
        {"name": "lr", "type": "number", "default": 0.1, "minimum": 0, "maximum": 1},
        {"name": "data", "type": "text", "default": "/data"},
        {"name": "gpus", "type": "integer", "default": 1, "minimum": 0, "maximum": 4},
    ],
)


@pytest.fixture
def dataset() -> dict[str, Any]:
    return factories.basic_cluster()


@pytest.fixture
def template(dataset: dict[str, Any]) -> Template:
    return do_save_template(dataset["owner"], GIVEN)


def body(dataset: dict[str, Any], **fields: Any) -> dict[str, Any]:
    environment = dataset["environment"].name
    return {
        "name": "run",
        "project": dataset["project"].name,
        "environment": environment,
        "template": "train",
        **fields,
    }


def submit(dataset: dict[str, Any], **fields: Any) -> Job:
    owner = dataset["owner"]
    return do_submit_job(owner, build_job_request(owner, body(dataset, **fields), JobBody))


def refused(dataset: dict[str, Any], **fields: Any) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as error:
        submit(dataset, **fields)
    return error.value.fields


def test_a_job_records_its_template_with_version_and_values(dataset, template) -> None:
    job = submit(dataset, parameters={"lr": 0.5, "data": "a b; rm $HOME"}, template_version=1)
    assert job.command == ["python", "{fairway:secrets}/program", "--lr", "0.5", "--data", "a b; rm $HOME"]
    assert (job.gpus_per_task, job.program) == (1, "print(f'{lr}')")
    assert (job.template, job.template_version) == (template, 1)
    assert job.parameters == {"lr": 0.5, "data": "a b; rm $HOME", "gpus": 1}


def test_values_that_do_not_fit_are_refused_by_name(dataset, template) -> None:
    assert refused(dataset, parameters={"lr": 7, "gpus": 1.5, "x": 1})["parameters"] == (
        "lr: Must be between 0 and 1. gpus: Must be a whole number. "
        "x: The template has no such parameter; it has lr, data, gpus."
    )
    assert (
        "need a template"
        in refused(dataset, template=None, command=["true"], parameters={"lr": 1})["template"]
    )


def test_a_request_for_an_older_version_is_refused_with_the_changes(dataset, template) -> None:
    parameters = [{**GIVEN.parameters[0], "maximum": 2}, *GIVEN.parameters[1:]]
    do_save_template(dataset["owner"], replace(GIVEN, parameters=parameters), template)
    assert refused(dataset, template_version=1) == {
        "template_version": "The template Train has changed: it now has version 2, and this request is based on "
        "version 1. Parameters that changed: lr. Open the template again."
    }
    assert submit(dataset, template_version=2, parameters={"lr": 1.5}).template_version == 2


def test_a_job_of_an_older_version_can_be_submitted_again(dataset, template) -> None:
    job = submit(dataset, parameters={"lr": 0.5})
    do_cancel_job(dataset["owner"], job)
    do_save_template(
        dataset["owner"],
        replace(GIVEN, parameters=GIVEN.parameters[:2], fields={"command": ["{lr}", "{data}"]}),
        template,
    )
    again = do_resubmit_job(dataset["owner"], Job.objects.get(pk=job.pk))
    assert (again.command, again.template_version, again.program) == (job.command, 1, job.program)


def test_only_a_change_of_the_content_is_a_new_version(dataset, template) -> None:
    owner = dataset["owner"]
    assert do_save_template(owner, replace(GIVEN, title="Other"), template).version == 1
    fields = {**GIVEN.fields, "cpu_milli": 2000}
    assert do_save_template(owner, replace(GIVEN, fields=fields), template, version=1).version == 2
    with pytest.raises(Conflict, match="Version 2 was saved meanwhile"):
        do_save_template(owner, GIVEN, template, version=1)
    assert [(row.version, row.created_by) for row in template.versions.all()] == [
        (2, owner.username),
        (1, owner.username),
    ]
    assert AuditEntry.objects.filter(action="template.change", after__version=2).exists()


def test_who_may_see_and_change_a_template(dataset, template) -> None:
    owner, project = dataset["owner"], dataset["project"]
    colleague, stranger = factories.user("colleague"), factories.user("stranger")
    project.memberships.create(user=colleague, role="member")
    for other in (colleague, stranger):
        with pytest.raises(NotFound):
            get_template(other, "train")
        with pytest.raises(NotFound):
            do_save_template(other, GIVEN, template)
    template = do_save_template(owner, replace(GIVEN, scope="project", project=project), template)
    assert get_template(colleague, "train") == template
    with pytest.raises(Forbidden):
        do_save_template(colleague, GIVEN, template)
    project.memberships.filter(user=colleague).update(role="manager")
    do_save_template(colleague, replace(GIVEN, title="Ours", scope="project", project=project), template)
    with pytest.raises(NotFound):
        get_template(stranger, "train")


def test_only_administrators_share_with_everyone(dataset, template) -> None:
    everyone = replace(GIVEN, scope="everyone")
    with pytest.raises(Forbidden, match="share a template with everyone"):
        do_save_template(dataset["owner"], everyone, template)
    do_save_template(factories.user("boss", admin=True), everyone, template)
    assert get_template(factories.user("anyone"), "train") == template


def test_sharing_with_a_project_needs_membership(dataset) -> None:
    with pytest.raises(NotFound):
        do_save_template(
            factories.user("anyone"), replace(GIVEN, scope="project", project=dataset["project"])
        )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "Train It"}, "name"),
        ({"title": " "}, "title"),
        ({"category": "x"}, "category"),
        ({"scope": "project"}, "project"),
        ({"kind": "x"}, "kind"),
        ({"fields": {"gpu": 1}}, "fields"),
        ({"fields": {"env": {"A": "\0"}}}, "fields"),
        ({"parameters": [{"name": "lr"}]}, "parameters"),
        ({"sweep": {"searcher": "grid", "parameters": {"momentum": [1]}}}, "sweep"),
        ({"sweep": {"searcher": "asha"}}, "sweep"),
        ({"sweep": {"x": 1}}, "sweep"),
    ],
)
def test_a_template_that_is_wrong_is_refused(dataset, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        do_save_template(dataset["owner"], replace(GIVEN, **changes))
    assert set(error.value.fields) == {field}


def test_names_are_unique(dataset, template) -> None:
    with pytest.raises(InvalidRequest) as error:
        do_save_template(factories.user("other"), GIVEN)
    assert error.value.fields == {"name": "There is a template of this name, maybe one that you cannot see."}


def test_a_disabled_template_is_kept_but_not_offered(dataset, template) -> None:
    do_save_template(dataset["owner"], replace(GIVEN, enabled=False), template)
    assert not list_templates(dataset["owner"]).exists()
    assert "no such template" in refused(dataset)["template"]
    assert get_template(dataset["owner"], "train") == template


def test_the_gallery_has_the_last_used_first(dataset, template) -> None:
    do_save_template(dataset["owner"], replace(GIVEN, name="another", title="Another"))
    assert [row.name for row in gallery_templates(dataset["owner"])] == ["another", "train"]
    submit(dataset)
    assert [row.name for row in gallery_templates(dataset["owner"])] == ["train", "another"]


def test_a_sweep_varies_parameters_and_keeps_the_others(dataset, template) -> None:
    sweep = sweep_over(dataset, {"lr": [0.1, 0.2]}, parameters={"data": "/other"})
    advance_sweep(sweep.public_id)
    jobs = Job.objects.order_by("id")
    assert [job.command[3:] for job in jobs] == [["0.1", "--data", "/other"], ["0.2", "--data", "/other"]]
    assert [job.parameters["lr"] for job in jobs] == [0.1, 0.2]
    assert {job.template_version for job in jobs} == {1}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"momentum": [0.9]}, "The template has no parameter momentum; it has lr, data, gpus."),
        ({"gpus": [1, 2]}, "gpus fills a field of the job; a sweep can only vary parameters of commands."),
        ({"lr": [0.1, 2.0]}, "lr = 2: Must be between 0 and 1."),
    ],
)
def test_a_sweep_over_a_parameter_that_the_template_lacks_is_refused(
    dataset, template, space, message: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        sweep_over(dataset, space)
    assert error.value.fields == {"parameters": message}


def sweep_over(dataset: dict[str, Any], space: dict[str, Any], **fields: Any):
    owner = dataset["owner"]
    request = build_job_request(owner, body(dataset, **fields), JobBody, swept=frozenset(space))
    return do_create_sweep(owner, SweepSpec(searcher="grid"), request, space)


def test_shipped_templates_are_created_once_and_keep_changes(dataset) -> None:
    ensure_starter_templates()
    row = Template.objects.get(name="sweep")
    assert row.owner is None and row.versions.get().version == 1
    Template.objects.filter(pk=row.pk).update(title="Ours")
    ensure_starter_templates()
    assert Template.objects.count() == len(shipped_templates())
    assert Template.objects.get(name="sweep").title == "Ours"


def test_the_shipped_sweep_starts_trials(dataset) -> None:
    ensure_starter_templates()
    row = Template.objects.get(name="sweep")
    space = row.sweep["parameters"]
    spec = SweepSpec(**{name: value for name, value in row.sweep.items() if name != "parameters"})
    owner = dataset["owner"]
    request = build_job_request(owner, body(dataset, template="sweep"), JobBody, swept=frozenset(space))
    sweep = do_create_sweep(owner, spec, request, space)
    advance_sweep(sweep.public_id)
    job = Job.objects.first()
    assert job is not None and job.command[2] == "--learning_rate"
    assert 0.001 <= float(job.command[3]) <= 0.5 and job.command[-2:] == ["--epochs", "27"]
