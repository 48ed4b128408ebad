"""Idempotency-Key for each operation: what creates something honours it, and nothing refuses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.utils import timezone

from portal.api.schema import openapi_document
from portal.models import IdempotencyKey, Job, Sweep, UserRequest
from tests.api import fixture_data as worlds
from tests.api.fixture_data import ACTORS, FixtureData
from tests.api.table import ROWS, Row

CREATING = [row for row in ROWS if row.method == "post" and row.status in (201, 202)]
CUMULATIVE = {"jobs_move", "jobs_extend", "jobs_restart_elsewhere", "services_update", "sweeps_repeat_trial"}
"""Operations that create nothing with an address, and whose repetition would change something again."""


@pytest.fixture(scope="module")
def make_world() -> Callable[[], FixtureData]:
    """One with every kind of actor."""
    return worlds.make_wide


def test_every_operation_that_creates_something_takes_a_key() -> None:
    for methods in openapi_document()["paths"].values():
        for method, operation in methods.items():
            if method == "post" and {"201", "202"} & set(operation["responses"]):
                names = {parameter["name"] for parameter in operation["parameters"]}
                assert "Idempotency-Key" in names, operation["operationId"]


def test_every_operation_whose_repetition_changes_more_takes_a_key() -> None:
    taking = {
        operation["operationId"]
        for methods in openapi_document()["paths"].values()
        for operation in methods.values()
        if "Idempotency-Key" in {parameter["name"] for parameter in operation.get("parameters", [])}
    }
    assert taking >= CUMULATIVE


def post_row(fixture_data: FixtureData, row: Row, key: str) -> Any:
    actor = next(each for each in ("member", *ACTORS) if each in row.allowed)
    client, headers = fixture_data.client(actor), {}
    text = json.dumps(row.body)
    for name, value in fixture_data.names_of(actor).items():
        text = text.replace(f"{{{name}}}", value)
    if row.if_match:
        headers = {**headers, "If-Match": worlds.etag(fixture_data)}
    path = f"/api/v1/{row.path.format(**fixture_data.names_of(actor))}"
    return client.post(
        path, text, content_type="application/json", headers={**headers, "Idempotency-Key": key}
    )


DONE_ONCE = [row for row in ROWS if row in CREATING or (row.name in CUMULATIVE and row.status == 200)]


@pytest.mark.parametrize("row", DONE_ONCE, ids=lambda row: row.name)
def test_what_creates_something_is_answered_twice_and_done_once(fixture_data: FixtureData, row: Row) -> None:
    first, second = (post_row(fixture_data, row, "k") for _ in range(2))
    assert first.status_code == second.status_code == row.status, first.content
    assert first.content == second.content
    assert second["Idempotency-Replayed"] == "true"


OTHERS = [row for row in ROWS if row.method == "post" and row not in DONE_ONCE]


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row.name)
def test_a_key_is_accepted_where_it_is_not_used(fixture_data: FixtureData, row: Row) -> None:
    assert post_row(fixture_data, row, "k").status_code == row.status


def test_a_stored_response_does_not_disclose_a_secret(fixture_data: FixtureData) -> None:
    rows = [row for row in CREATING if row.name in ("tokens_create", "webhooks_set")]
    for row in rows:
        assert post_row(fixture_data, row, row.name).status_code == 201
        stored = IdempotencyKey.objects.get(key=row.name)
        assert list(stored.body) == ["encrypted"], row.name


def test_a_repeated_request_for_more_time_adds_it_once(fixture_data: FixtureData) -> None:
    job = Job.objects.get(public_id=fixture_data.names_of("member")["running"])
    UserRequest.objects.filter(job=job).delete()
    Job.objects.filter(pk=job.pk).update(time_limit_s=3600)
    job.attempts.update(state="RUNNING", running_at=timezone.now())
    row = next(each for each in ROWS if each.name == "jobs_extend")
    first, second = (post_row(fixture_data, row, "more") for _ in range(2))
    assert (first.status_code, first.content) == (200, second.content), first.content
    assert UserRequest.objects.filter(job=job).count() == 1
    assert post_row(fixture_data, row, "other").json()["code"] == "extension_pending"


def test_a_repeated_request_to_repeat_a_trial_adds_one(fixture_data: FixtureData) -> None:
    sweep = Sweep.objects.get(public_id=fixture_data.names_of("member")["sweep"])
    sweep.trials.update(state="FAILED")
    count = sweep.trials.count()
    row = next(each for each in ROWS if each.name == "sweeps_repeat_trial")
    first, second = (post_row(fixture_data, row, "again") for _ in range(2))
    assert (first.status_code, first.content) == (200, second.content), first.content
    assert sweep.trials.count() == count + 1
