"""Templates in the browser: the gallery, parameters as form controls, and the page on which people make one."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.urls import reverse

from portal.models import Job, Sweep, Template
from portal.services.jobs.starter_templates import ensure_starter_templates

DEFINITION = {
    "title": "Train it",
    "name": "train-it",
    "category": "vision",
    "kind": "training",
    "scope": "self",
    "enabled": "on",
    "fields_yaml": "command: [train, --lr, '{lr}', --model, '{model}', '{note}']\ngpus_per_task: '{gpus}'\n",
    "parameters_yaml": """
- {name: lr, type: number, default: 0.1, minimum: 0.001, maximum: 1, label: Learning rate}
- {name: model, type: choice, default: small, choices: [small, large]}
- {name: note, type: text, default: x}
- {name: gpus, type: integer, default: 2, minimum: 1, maximum: 4}
""",
}


@pytest.fixture
def train_it(dataset: Any, client_of: Any) -> Template:
    answer = client_of("member").post(reverse("new-template"), DEFINITION)
    found = Template.objects.get(name="train-it")
    assert answer.status_code == 302 and answer["Location"].endswith(f"?template={found.public_id}")
    return found


@pytest.fixture
def opened(typed: dict[str, str], train_it: Template) -> dict[str, str]:
    """The form of the launch page as it is posted after the template was opened."""
    return typed | {
        "template": train_it.public_id,
        "template_version": "1",
        "command": "train --lr {lr} --model {model} {note}",
        "param-lr": "0.5",
        "param-model": "large",
        "param-note": "two words; $HOME",
        "param-gpus": "3",
        "gpus_per_task": "2",
    }


def page_of(client: Any, address: str) -> str:
    answer = client.get(address)
    assert answer.status_code == 200
    return answer.content.decode()


def test_the_gallery_shows_shipped_and_own_templates(train_it, client_of) -> None:
    ensure_starter_templates()
    text = page_of(client_of("member"), reverse("templates"))
    assert "DDP image classification" in text and "Train it" in text
    text = page_of(client_of("member"), f"{reverse('templates')}?owner=mine")
    assert "Train it" in text and "DDP image" not in text
    text = page_of(client_of("member"), f"{reverse('templates')}?q=momentum")
    assert "Sweep with early stopping" in text and "DDP image" not in text
    assert "No templates match" in page_of(client_of("member"), f"{reverse('templates')}?q=nothing-like-it")
    assert "Train it" not in page_of(client_of("stranger"), reverse("templates"))


def test_parameters_are_controls_of_the_launch_page(train_it, client_of) -> None:
    text = page_of(client_of("member"), f"{reverse('templates')}?template={train_it.public_id}")
    assert "Continue to launch" in text and 'name="param-lr"' in text
    text = page_of(client_of("member"), f"{reverse('launch')}?template={train_it.public_id}&param-lr=0.25")
    assert re.search(r'<input type="number" name="param-lr" value="0.25"[^>]*min="0.001"[^>]*max="1', text)
    assert "Learning rate" in text and '<option value="large">' in text
    assert "Set by the parameter Gpus." in text
    assert "train --lr {lr} --model {model} {note}" in text


def test_values_fill_the_job_without_a_shell(opened, client_of) -> None:
    answer = client_of("member").post(reverse("launch"), opened)
    assert answer.status_code == 302, answer.content.decode()[:3000]
    job = Job.objects.get(name="my run")
    assert job.command == ["train", "--lr", "0.5", "--model", "large", "two words; $HOME"]
    assert job.gpus_per_task == 3
    assert (job.template.name, job.template_version) == ("train-it", 1)
    assert job.parameters == {"lr": 0.5, "model": "large", "note": "two words; $HOME", "gpus": 3}
    text = page_of(client_of("member"), reverse("job-run", args=[job.public_id]))
    assert "Train it" in text


def test_a_similar_job_keeps_the_template_and_its_values(opened, train_it, client_of) -> None:
    client = client_of("member")
    assert client.post("/launch/", opened | {"submit": "1"}).status_code == 302
    job = Job.objects.get(template=train_it)
    page = page_of(client, f"/launch/?like={job.public_id}")
    assert "train --lr {lr} --model {model} {note}" in page
    for field in ('name="param-lr" value="0.5"', 'name="param-note" value="two words; $HOME"', 'value="3"'):
        assert field in page, field
    assert re.search(r'value="large" selected', page)
    suggested = page_of(client, f"/launch/?like={job.public_id}&gpus_per_task=1")
    assert re.search(r'name="param-gpus" value="1"', suggested)
    Job.objects.filter(pk=job.pk).update(command=["train", "--lr", "0.7"])
    edited = page_of(client, f"/launch/?like={job.public_id}")
    assert "train --lr 0.7" in edited and "param-lr" not in edited
    Job.objects.filter(pk=job.pk).update(command=job.command, template_version=7)
    assert "param-lr" not in page_of(client, f"/launch/?like={job.public_id}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"param-lr": "5"}, "Must be at most 1"),
        ({"param-model": "huge"}, "Select a valid choice"),
        ({"param-gpus": "1.5"}, "Enter a whole number|Must be a number"),
        ({"template_version": "7"}, "it now has version 1, and this request is based on version 7"),
        ({"command": "train {lr} | tee log"}, "A shell would interpret the value of {lr}"),
    ],
)
def test_values_that_do_not_fit_are_refused(opened, client_of, changes: dict[str, str], message: str) -> None:
    answer = client_of("member").post(reverse("launch"), opened | changes)
    assert answer.status_code == 400 and re.search(message, answer.content.decode())
    assert not Job.objects.filter(name="my run").exists()


def test_a_template_that_changed_meanwhile_is_refused(opened, train_it, client_of) -> None:
    changed = DEFINITION | {
        "parameters_yaml": DEFINITION["parameters_yaml"].replace("maximum: 1,", "maximum: 2,")
    }
    client_of("member").post(reverse("edit-template", args=[train_it.public_id]), changed | {"version": "1"})
    answer = client_of("member").post(reverse("launch"), opened)
    assert answer.status_code == 400
    assert (
        "it now has version 2" in answer.content.decode()
        and "Parameters that changed: lr." in answer.content.decode()
    )


def test_a_sweep_of_a_template(opened, client_of) -> None:
    sweep = {"searcher": "grid", "sweep_parameters": "lr = 0.1, 0.2", "max_parallel": "2"}
    answer = client_of("member").post(reverse("launch"), opened | sweep)
    assert answer.status_code == 302, answer.content.decode()[:3000]
    found = Sweep.objects.get()
    assert found.job["command"] == ["train", "--lr", "{lr}", "--model", "large", "two words; $HOME"]
    answer = client_of("member").post(
        reverse("launch"), opened | sweep | {"sweep_parameters": "speed = 1, 2"}
    )
    assert answer.status_code == 400 and "The template has no parameter speed" in answer.content.decode()


def test_the_shipped_sweep_fills_the_form(dataset, client_of) -> None:
    ensure_starter_templates()
    row = Template.objects.get(name="sweep")
    text = page_of(client_of("member"), f"{reverse('launch')}?template={row.public_id}")
    assert "learning_rate = 0.001..0.5 log" in text
    assert '<option value="asha" selected>' in text
    assert "{fairway:secrets}/program --learning_rate {learning_rate}" in text


def test_a_definition_that_is_wrong_is_refused_at_its_field(dataset, client_of) -> None:
    client = client_of("member")
    for changes, message in [
        ({"fields_yaml": "a: ["}, "It is not valid YAML"),
        ({"fields_yaml": "command: [train]"}, "lr is not used"),
        ({"parameters_yaml": "- {name: x}"}, "x needs a default"),
        ({"scope": "everyone"}, "Select a valid choice"),
    ]:
        answer = client.post(reverse("new-template"), DEFINITION | changes)
        assert answer.status_code == 400 and message in answer.content.decode(), message
    assert not Template.objects.filter(name="train-it").exists()


def test_two_authors_do_not_overwrite_each_other(train_it, client_of) -> None:
    address = reverse("edit-template", args=[train_it.public_id])
    first = DEFINITION | {"fields_yaml": DEFINITION["fields_yaml"] + "cpu_milli: 2000\n", "version": "1"}
    assert client_of("member").post(address, first).status_code == 302
    answer = client_of("member").post(address, first | {"fields_yaml": DEFINITION["fields_yaml"]})
    assert answer.status_code == 400 and "Version 2 was saved meanwhile" in answer.content.decode()
    assert "cpu_milli" not in page_of(client_of("member"), f"{address}?version=1")
    assert "cpu_milli" in page_of(client_of("member"), address)


def test_a_template_of_a_job(typed, client_of) -> None:
    client = client_of("member")
    client.post(reverse("launch"), typed)
    job = Job.objects.get(name="my run")
    text = page_of(client, f"{reverse('new-template')}?job={job.public_id}")
    assert "two words" in text and "gpus_per_task: 2" in text and 'value="my run"' in text
