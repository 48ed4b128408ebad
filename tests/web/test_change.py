"""The page that changes a waiting job has every field that can be changed."""

from __future__ import annotations

import json

import pytest
from django.urls import reverse

from portal.domain.jobs.job_spec import job_fields
from portal.models import Gpu, Job, JobVerdict, Node
from portal.services.jobs.changes import CHANGEABLE_FIELDS, change_refusal
from tests import factories


@pytest.mark.parametrize("kind", ["training", "workspace"])
@pytest.mark.parametrize("attempts", [0, 1])
def test_the_form_has_every_field_that_can_be_changed(dataset, client_of, kind, attempts):
    """And each is saved: the fields are those that the specification declares as changeable."""
    owner = dataset.people["m-okafor"]
    environment = dataset.environments["lab" if kind == "workspace" else "batch"]
    older = factories.job(owner, dataset.projects["vision"], dataset.environments["batch"], name="older")
    other = factories.project("other", member=owner)
    job = factories.job(
        owner, dataset.projects["vision"], environment, kind=kind, name="waits", held=True, tasks=1
    )
    Job.objects.filter(pk=job.pk).update(attempt_count=attempts)
    Gpu.objects.update(compute_capability=9.0)
    Gpu.objects.filter(node__name="a100-1").update(mig_profile="1g.10gb")
    client, address = client_of("member"), reverse("job-change", args=[job.public_id])
    new = {
        "priority": "-3", "time_limit_s": "90 min", "tasks": "2", "min_tasks": "1", "gpus_per_task": "2",
        "milli_per_gpu": "500", "gpu_model": "NVIDIA H200", "min_gpu_memory_gib": "16", "mig_profile": "1g.10gb",
        "min_compute_capability": "8.0", "allow_mixed_gpus": "on", "cores": "3", "memory_gib": "5",
        "shm_mib": "512", "preemptible": "", "ignore_dependency_failure": "on",
        "pool": dataset.pools["h200"].public_id, "project": other.public_id,
        "dependencies": [older.public_id],
    }  # fmt: skip
    names = {rule.form_name: name for name, rule in job_fields().items()}
    assert {names.get(name, name) for name in new} == set(CHANGEABLE_FIELDS)
    job.refresh_from_db()
    for shown, value in new.items():
        name = names.get(shown, shown)
        form = client.get(address).context["form"]
        assert (shown in form.fields) == (change_refusal(job, [name]) is None), shown
        if shown not in form.fields or shown in ("mig_profile", "milli_per_gpu"):
            continue  # they exclude each other
        before = {each: form[each].value() for each in form.fields if form[each].value() not in (None, False)}
        answer = client.post(address, before | {shown: value})
        assert answer.status_code == 302, (shown, answer.context["form"].errors)
        again = client.get(address).context["form"][shown].value()
        assert (
            str(again or "") == str(value).replace("on", "True") or again == value or again == "1 h 30 min"
        ), shown


def test_amounts_that_a_suggestion_gave_are_nobodys_typing(dataset, client_of):
    """They stay with the changed job, and the next launch has those of its own GPUs again."""
    Node.objects.update(cpu_milli=64_000, memory_mib=262_144)
    client, job = client_of("member"), Job.objects.get(name="depth-anything-ft")
    Job.objects.filter(pk=job.pk).update(typed_amounts=["shm_mib"])
    fields = {"gpus_per_task": 2, "cpu_milli": 1000, "memory_mib": 8192}
    suggestion = {"kind": "fewer_gpus", "message": "It would start now.", "fields": fields}
    JobVerdict.objects.filter(job=job).update(suggestion=suggestion)
    form = client.get(reverse("job-change", args=[job.public_id]) + "?suggested=1").context["form"]
    assert (float(form["cores"].value()), float(form["memory_gib"].value())) == (1, 8)
    assert form["typed_amounts"].value() == "shm_mib"
    copied = client.get(reverse("launch"), {"like": job.public_id, **fields}).context["form"]
    assert (float(copied["cores"].value()), float(copied["memory_gib"].value())) == (1, 8)
    assert copied["typed_amounts"].value() == "shm_mib"
    values = {"version": job.version, "values": json.dumps(fields)}
    assert client.post(reverse("job-apply-suggestion", args=[job.public_id]), values).status_code == 302
    job.refresh_from_db()
    assert (job.gpus_per_task, job.cpu_milli, job.typed_amounts) == (2, 1000, ["shm_mib"])
    Job.objects.exclude(pk=job.pk).update(kind="service")
    again = client.get(reverse("launch"), {"kind": "training"})
    assert again.context["last_launch"] == job
    assert float(again.context["form"]["cores"].value()) > 1
