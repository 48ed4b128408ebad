"""The start time of a job: from its submission to the decision, the verdict, the forecast and the preview."""

from __future__ import annotations

import datetime as dt

import pytest
from django.db.models import F
from django.utils import timezone

from portal.errors import InvalidRequest
from portal.models import ClusterSettings, Job, JobVerdict
from portal.services.jobs.stored_requests import base_request, request_fields
from portal.services.jobs.submission import JobRequest, preview_query_body
from scheduler.cycle import run_cycle
from scheduler.forecast.forecast_pass import run_forecast_pass
from scheduler.snapshot.decision_input import take_snapshot
from scheduler.what_if import _preview
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    factories.cluster_settings()
    return factories.basic_cluster()


def submit(dataset, **fields) -> Job:
    return factories.job(dataset["owner"], dataset["project"], dataset["environment"], **fields)


def in_minutes(minutes: float) -> dt.datetime:
    return (timezone.now() + dt.timedelta(minutes=minutes)).replace(microsecond=0)


def test_a_job_waits_for_its_start_time_while_later_jobs_start(dataset) -> None:
    at = in_minutes(90)
    waiting, other = submit(dataset, start_after=at), submit(dataset)
    run_cycle("test", "me")
    assert Job.objects.get(pk=other.pk).state == "RUNNING"
    verdict = JobVerdict.objects.get(job=waiting)
    assert (verdict.code, verdict.details["not_before_s"]) == ("begin_time", at.timestamp())
    assert f"{at:%Y-%m-%d %H:%M}" in verdict.message
    assert run_forecast_pass() == 1
    verdict.refresh_from_db()
    assert verdict.p10_at >= at

    Job.objects.filter(pk=waiting.pk).update(start_after=in_minutes(-1), version=F("version") + 1)
    run_cycle("test", "me")
    assert Job.objects.get(pk=waiting.pk).state == "RUNNING"


def test_queue_position_counts_from_the_start_time(dataset) -> None:
    early, late = submit(dataset, start_after=in_minutes(60)), submit(dataset)
    rows = {row.job: row for row in take_snapshot(ClusterSettings.objects.get()).snapshot.pending}
    assert rows[late.public_id].submitted_s < rows[early.public_id].submitted_s
    assert rows[early.public_id].submitted_s == rows[early.public_id].not_before_s


def test_the_preview_forecasts_a_start_after_it(dataset) -> None:
    at = in_minutes(30)
    request = JobRequest(
        name="later",
        project=dataset["project"],
        environment=dataset["environment"],
        command=["true"],
        start_after=at,
    )
    inputs = take_snapshot(ClusterSettings.objects.get())
    answer = _preview("would_start", preview_query_body(dataset["owner"], request), inputs)
    assert not answer["starts_now"]
    assert answer["verdict"]["code"] == "begin_time"
    assert not answer["alternatives"]
    assert answer["interval"] is None or answer["interval"]["p10_s"] >= at.timestamp()


def test_a_start_time_is_at_most_a_year_ahead_and_may_be_past(dataset) -> None:
    with pytest.raises(InvalidRequest) as refused:
        submit(dataset, start_after=in_minutes(60 * 24 * 370))
    assert refused.value.fields == {"start_after": "Must be within 366 days."}
    submit(dataset, start_after=in_minutes(-60))
    run_cycle("test", "me")
    assert Job.objects.get().state == "RUNNING"


def test_the_trials_of_a_sweep_keep_it(dataset) -> None:
    request = JobRequest(
        name="s", project=dataset["project"], environment=dataset["environment"], start_after=in_minutes(5)
    )

    class Row:
        project, environment, pool, template = dataset["project"], dataset["environment"], None, None
        job = request_fields(request)

    assert base_request(Row()).start_after == request.start_after
