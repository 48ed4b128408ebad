"""The launch page is filled with what the user launched last, and with amounts in proportion to the GPUs."""

from __future__ import annotations

from django.urls import reverse

from portal.models import Job, Node


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
