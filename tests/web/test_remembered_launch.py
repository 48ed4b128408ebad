"""The launch page is filled with what the user launched last, and with amounts in proportion to the GPUs."""

from __future__ import annotations

import pytest
from django.urls import reverse

from portal.models import Job, Node
from tests import factories


def page_of(client, **query):
    return client.get(reverse("launch"), query)


def test_the_last_launch_of_the_kind_is_remembered(dataset, client_of, typed):
    client = client_of("member")
    assert client.post(reverse("launch"), typed | {"cores": "3", "time_limit_s": "5 h"}).status_code == 302
    job = Job.objects.latest("id")
    shown = page_of(client, kind="training")
    form = shown.context["form"]
    assert shown.context["last_launch"] == job
    assert form["cores"].value() == "3" and form["time_limit_s"].value() == "5 h"
    assert form["name"].value() != job.name
    assert "your last launch" in shown.content.decode()
    preview = client.post(reverse("launch-check"), form.as_posted().data)
    assert "time limit 5" in preview.context["summaries"]["limits"]


def test_defaults_another_kind_and_another_user_are_not_filled(dataset, client_of, typed):
    client = client_of("member")
    Job.objects.update(kind="service")
    assert client.post(reverse("launch"), typed | {"cores": "3"}).status_code == 302
    for asked in (
        page_of(client, kind="training", defaults="1"),
        page_of(client, kind="workspace"),
        page_of(client_of("stranger"), kind="training"),
    ):
        assert asked.context["last_launch"] is None
        assert "your last launch" not in asked.content.decode()
        assert asked.context["form"]["cores"].value() != "3"


def test_amounts_are_in_proportion_to_the_gpus(dataset, client_of):
    Node.objects.update(cpu_milli=65_000, memory_mib=262_144)
    form = page_of(client_of("member"), kind="workspace", gpus_per_task="2").context["form"]
    assert (form["cores"].value(), form["memory_gib"].value()) == ("16", "64")
    assert form["shm_mib"].value() == 8192
    without = page_of(client_of("member"), kind="workspace", gpus_per_task="0").context["form"]
    assert float(without["cores"].value()) == 1


AMOUNTS = ("cores", "memory_gib", "shm_mib")


def amounts_of(form) -> tuple[float, ...]:
    return tuple(float(form[name].value()) for name in AMOUNTS)


def typed_values(form, **changed) -> dict:
    return form.as_posted().data | changed


@pytest.fixture
def proportional_nodes(dataset) -> None:
    """Each node has 8 cores and 32 GiB for each of its 8 GPUs."""
    Node.objects.update(cpu_milli=64_000, memory_mib=262_144)


@pytest.mark.parametrize("typed_name", [None, *AMOUNTS])
@pytest.mark.parametrize("kind", ["training", "workspace"])
def test_amounts_that_were_not_typed_are_remembered_as_such(
    dataset, client_of, typed, proportional_nodes, kind, typed_name
) -> None:
    """They follow the GPUs of the next launch, also when nodes have changed since; a typed one stays."""
    client = client_of("member")
    form = page_of(client, kind=kind, defaults="1").context["form"]
    changed = {"name": "first", "project": typed["project"], "typed_amounts": "recorded"}
    changed |= {"command": "true", "environment": typed["environment"]} if kind == "training" else {}
    changed |= {typed_name: "3", "typed_amounts": f"recorded {typed_name}"} if typed_name else {}
    assert client.post(reverse("launch"), typed_values(form, **changed)).status_code == 302
    Node.objects.update(cpu_milli=32_000, memory_mib=131_072)
    again = page_of(client, kind=kind).context["form"]
    expected = dict(zip(AMOUNTS, (4.0, 16.0, 2048.0), strict=True))
    if typed_name:
        expected[typed_name] = 3.0
    if typed_name == "memory_gib":
        expected["shm_mib"] = 384.0  # a part of the memory that was typed
    assert amounts_of(again) == tuple(expected.values())
    assert again["typed_amounts"].value() == (typed_name or "")


def test_amounts_of_a_job_of_the_api_stay_unless_nobody_chose_them(dataset, client_of, proportional_nodes):
    owner, project, batch = (
        dataset.people["m-okafor"], dataset.projects["vision"], dataset.environments["batch"]
    )  # fmt: skip
    client = client_of("member")
    factories.job(owner, project, batch, gpus_per_task=4)  # without amounts
    form = page_of(client, kind="training").context["form"]
    assert amounts_of(form) == (32.0, 128.0, 16384.0) and form["typed_amounts"].value() == ""
    factories.job(owner, project, batch, gpus_per_task=4, cpu_milli=5000)
    form = page_of(client, kind="training").context["form"]
    assert amounts_of(form) == (5.0, 128.0, 16384.0) and form["typed_amounts"].value() == "cores"


def test_a_copy_keeps_its_amounts_until_its_gpus_are_others(dataset, client_of, proportional_nodes):
    owner, project, batch = (
        dataset.people["m-okafor"], dataset.projects["vision"], dataset.environments["batch"]
    )  # fmt: skip
    job = factories.job(owner, project, batch, gpus_per_task=2, memory_mib=6144, typed_amounts=["memory_mib"])
    client = client_of("member")
    same = page_of(client, like=job.public_id, kind="training").context["form"]
    assert amounts_of(same) == (1.0, 6.0, 64.0)
    other = page_of(client, like=job.public_id, kind="training", gpus_per_task="4").context["form"]
    assert amounts_of(other) == (32.0, 6.0, 768.0) and other["typed_amounts"].value() == "memory_gib"
    asked = page_of(client, like=job.public_id, kind="training", gpus_per_task="4", cpu_milli="7000")
    assert amounts_of(asked.context["form"]) == (7.0, 6.0, 768.0)


def test_half_a_gpu_has_half_of_the_amounts(dataset, client_of, proportional_nodes):
    form = page_of(client_of("member"), kind="workspace", milli_per_gpu="500").context["form"]
    assert amounts_of(form) == (4.0, 16.0, 2048.0)
    whole = page_of(client_of("member"), kind="workspace", milli_per_gpu="500", gpus_per_task="2")
    assert amounts_of(whole.context["form"]) == (16.0, 64.0, 8192.0)


def test_a_yaml_document_types_the_amounts_that_it_names(dataset, client_of, proportional_nodes):
    environment = dataset.environments["batch"].public_id
    document = f"name: a\nproject: vision\nenvironment: {environment}\ncommand: ['true']\nmemory_mib: 5120\n"
    answer = client_of("member").post(reverse("import-job"), {"yaml": document})
    form = answer.context["form"]
    assert answer.status_code == 200, answer.context["import_errors"]
    assert form["typed_amounts"].value() == "memory_gib"
