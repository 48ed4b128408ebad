"""REST: an action on many jobs answers 202 with its status when it does not fit into the request."""

from __future__ import annotations

import json

import pytest
from django.test import Client

from portal.models import BulkOperation, Job
from portal.services.jobs import bulk
from tests import factories
from tests.locked_rows import locked_row

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def owner():
    return factories.user("ada")


@pytest.fixture
def jobs(owner):
    return factories.pending_jobs(owner, 130)


def test_more_than_fits_is_accepted_and_followed(owner, jobs, monkeypatch):
    monkeypatch.setattr(bulk, "_CHUNK_S", 0.0)
    monkeypatch.setattr(
        "portal.api.jobs.job_lists.advance_in_request", lambda operation: bulk.advance_bulk(operation, 0.01)
    )
    client = Client()
    client.force_login(owner)
    body = {"action": "stop", "jobs": [job.public_id for job in jobs]}
    headers = {"Idempotency-Key": "once"}

    def post():
        return client.post(
            "/api/v1/jobs/bulk/", json.dumps(body), content_type="application/json", headers=headers
        )

    answer = post()
    assert answer.status_code == 202, answer.content
    said = answer.json()
    assert said["total"] == 130 and 0 < said["done"] < 130 and said["finished_at"] is None
    assert post().json()["id"] == said["id"] and BulkOperation.objects.count() == 1
    bulk.advance_bulk(BulkOperation.objects.get(), 60)
    followed = client.get(answer["Location"]).json()
    assert followed["finished_at"] and followed["done"] == followed["changed"] == 130
    assert [one["job"]["name"] for one in followed["results"]] == [job.name for job in jobs]
    assert post().status_code == 200
    assert not Job.objects.exclude(state="CANCELLED").exists()
    other = Client()
    other.force_login(factories.user("eve"))
    assert other.get(answer["Location"]).status_code == 404


def test_a_repeated_request_finds_its_results_after_the_jobs_became_invisible(owner, jobs):
    client = Client()
    client.force_login(owner)
    body = {"action": "stop", "jobs": [job.public_id for job in jobs[:3]]}
    headers = {"Idempotency-Key": "once"}

    def post():
        return client.post(
            "/api/v1/jobs/bulk/", json.dumps(body), content_type="application/json", headers=headers
        )

    first = post()
    assert first.status_code == 200 and first.json()["changed"] == 3
    Job.objects.filter(pk=jobs[0].pk).update(owner=factories.user("eve"), project=factories.project("secret"))
    again = post()
    assert again.status_code == 200, again.content
    assert again.json()["id"] == first.json()["id"] and again.json()["done"] == 3
    assert [one["job"]["name"] for one in again.json()["results"]] == ["j1", "j2"]


def test_a_failure_after_the_action_was_recorded_is_no_failure_of_the_request(owner, jobs, monkeypatch):
    """Else a client that is told to try again would requeue the jobs twice."""
    client = Client()
    client.force_login(owner)
    body = {"action": "stop", "jobs": [job.public_id for job in jobs[:3]]}
    headers = {"Idempotency-Key": "once"}

    def post():
        return client.post(
            "/api/v1/jobs/bulk/", json.dumps(body), content_type="application/json", headers=headers
        )

    with monkeypatch.context() as patched:
        patched.setattr("portal.api.jobs.job_lists.advance_in_request", lambda operation: operation)
        assert post().status_code == 202
    with locked_row(BulkOperation.objects.get()):
        answer = post()
    assert answer.status_code == 202, answer.content
    assert answer.json()["done"] == 0 and answer["Location"]
    assert post().json()["changed"] == 3
