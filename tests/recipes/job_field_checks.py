"""What a new job field must show; ``test_job_fields.py`` runs it in a copy of the sources that has the field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from django.test import Client

from portal.api.jobs.job_requests import JobBody
from portal.domain.jobs.job_spec import placement_fields
from portal.errors import InvalidRequest
from portal.models import ClusterSettings, Gpu, Job
from portal.services.jobs.job_document import request_body, to_yaml
from portal.services.jobs.submission import (
    JobRequest,
    do_submit_job,
    preview_query_body,
    request_from_job,
    validate_request,
)
from portal.web.jobs.launch.form import LaunchForm
from portal.web.jobs.launch.initial_values import initial_from_job
from scheduler.core.decide import decide
from scheduler.core.model.apply_plan import apply_plan
from scheduler.snapshot.decision_input import take_snapshot
from scheduler.what_if import build_request_row
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def cluster() -> dict[str, Any]:
    made = factories.basic_cluster()
    made["older"] = factories.node(made["pool"])
    Gpu.objects.filter(node=made["node"]).update(compute_capability=10.0)
    Gpu.objects.filter(node=made["older"]).update(compute_capability=8.0)
    return made


def check_interfaces(cluster: dict[str, Any], name: str, value: float, invalid: float) -> JobRequest:
    """The field is on the launch page and in REST, is validated and stored, and is copied to a new job."""
    owner = cluster["owner"]
    rows = {"project": cluster["project"], "environment": cluster["environment"]}
    typed = {each: row.public_id for each, row in rows.items()}
    typed |= {"kind": "training", "name": "run", "command": "true", "cores": "1", "memory_gib": "1"}
    typed |= {"tasks": "1", "gpus_per_task": "1", "preemptible": "on"}
    client = Client()
    client.force_login(owner)
    assert f'name="{name}"' in client.get("/launch/").content.decode()
    assert name in LaunchForm(owner, typed | {name: str(invalid)}).errors
    form = LaunchForm(owner, typed | {name: str(value)})
    assert form.is_valid(), form.errors
    request = form.to_job_request()
    assert getattr(request, name) == value

    wrong = JobBody(data=request_body(request) | {name: invalid})
    assert not wrong.is_valid()
    assert wrong.errors.keys() == {name}
    body = JobBody(data=request_body(request))
    assert body.is_valid(), body.errors
    assert body.validated_data[name] == value
    assert f"{name}: {value}\n" in to_yaml(request_body(request))

    with pytest.raises(InvalidRequest) as refused:
        validate_request(owner, replace(request, **{name: invalid}))
    assert refused.value.fields.keys() == {name}

    job = Job.objects.get(pk=do_submit_job(owner, request).pk)
    assert getattr(job, name) == value
    assert getattr(request_from_job(job), name) == value
    assert str(initial_from_job(owner, job)[name]) == str(value)
    assert client.get(f"/api/v1/jobs/{job.public_id}/").json()[name] == value
    assert name in client.get(f"/jobs/{job.public_id}/run/").content.decode()
    return request


def test_placement_field(cluster) -> None:
    name = "max_compute_capability"
    request = check_interfaces(cluster, name, 9.0, 0.5)
    query = preview_query_body(cluster["owner"], request)
    assert query[name] == 9.0
    inputs = take_snapshot(ClusterSettings.objects.get_or_create(id=1)[0])
    assert build_request_row(query, inputs).request.constraints.max_compute_capability == 9.0
    (row,) = inputs.snapshot.pending
    assert row.request.constraints.max_compute_capability == 9.0
    plan = decide(inputs.snapshot, inputs.policy)
    nodes = [task.node for start in plan.starts for task in start.tasks]
    assert nodes == [cluster["older"].public_id], plan.verdicts
    (running,) = apply_plan(inputs.snapshot, plan).running
    assert running.constraints.max_compute_capability == 9.0
    never = replace(inputs.snapshot, pending=(row.change({"max_compute_capability": 7.0}),))
    assert not decide(never, inputs.policy).starts


def test_display_field(cluster) -> None:
    name = "ticket_number"
    request = check_interfaces(cluster, name, 71, -1)
    assert name not in placement_fields()
    assert name not in preview_query_body(cluster["owner"], request)
    (row,) = take_snapshot(ClusterSettings.objects.get_or_create(id=1)[0]).snapshot.pending
    assert not hasattr(row, name)
