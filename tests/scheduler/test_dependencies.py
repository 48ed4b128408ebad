"""A chain of jobs through whole cycles: who waits is told so, starts after the others, or is cancelled with them."""

from __future__ import annotations

import threading

import pytest
from django.db import connection

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import LIVE_ATTEMPT_STATES, JobState
from portal.errors import InvalidRequest
from portal.models import EngineQuery, Job
from portal.services.jobs.dependencies import cancel_dependents
from portal.services.jobs.submission import JobRequest, preview_query_body
from portal.services.lifecycle import job_control
from scheduler import periodic, what_if
from scheduler.cycle import run_cycle
from scheduler.forecast.forecast_pass import run_forecast_pass
from scheduler.what_if import answer_query
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset(monkeypatch):
    factories.cluster_settings()
    monkeypatch.setattr(what_if, "_cached_inputs", None)
    return factories.basic_cluster()


def submit(dataset, name: str, **fields) -> Job:
    return factories.job(dataset["owner"], dataset["project"], dataset["environment"], name=name, **fields)


def cycle() -> None:
    assert run_cycle("test", "me") is not None


def end(job: Job, exit_code: int) -> None:
    task = job.attempts.get(state__in=LIVE_ATTEMPT_STATES).task_rows.get()
    job_control.mark_task_sent(task)
    job_control.record_task_running(task.pk, container="c", ports={})
    reason = EndReason.EXIT_CODE if exit_code else EndReason.COMPLETED
    job_control.record_task_ended(task.pk, exit_code=exit_code, reason=reason)


def state(job: Job) -> str:
    job.refresh_from_db()
    return job.state


def test_a_dependent_job_starts_in_the_cycle_after_its_last_dependency(dataset) -> None:
    first, second = submit(dataset, "first"), submit(dataset, "second")
    job = submit(dataset, "last", gpus_per_task=2, dependencies=[first, second])
    cycle()
    assert job.verdict.code == "dependency"
    assert job.verdict.message == "It starts after first, second have completed."
    end(first, 0)
    cycle()
    job.verdict.refresh_from_db()
    assert job.verdict.message == "It starts after second has completed."
    end(second, 0)
    cycle()
    assert state(job) == JobState.RUNNING


def test_the_periodic_pass_finds_those_whose_hint_was_lost(dataset) -> None:
    first = submit(dataset, "first")
    strict, loose = (
        submit(dataset, "strict", dependencies=[first]),
        submit(dataset, "loose", dependencies=[first], ignore_dependency_failure=True),
    )
    cycle()
    assert loose.verdict.message == "It starts after first has ended."
    end(first, 1)
    cycle()  # before anybody was cancelled
    assert (state(strict), state(loose)) == (JobState.PENDING, JobState.RUNNING)
    periodic.run_periodic_pass()
    assert state(strict) == JobState.CANCELLED
    cycle()
    assert state(strict) == JobState.CANCELLED


def test_a_submit_that_races_an_end_is_refused_or_cancelled(dataset) -> None:
    """Whoever locks the first job decides; no job is left that waits for ever."""
    for number in range(6):
        first = submit(dataset, f"first-{number}")
        gate = threading.Barrier(2)
        refused: list[InvalidRequest] = []

        def join(first=first, gate=gate, refused=refused, number=number) -> None:
            gate.wait()
            try:
                submit(dataset, f"late-{number}", dependencies=[first])
            except InvalidRequest as error:
                refused.append(error)
            finally:
                connection.close()

        def stop(first=first, gate=gate) -> None:
            gate.wait()
            try:
                job_control.cancel_job(first.pk, EndReason.CANCELLED_BY_USER, actor="x")
            finally:
                connection.close()

        threads = [threading.Thread(target=act) for act in (join, stop)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(30)
        cancel_dependents()
        late = Job.objects.filter(name=f"late-{number}").first()
        if late is None:
            assert "dependencies" in refused[0].fields
        else:
            assert late.state == JobState.CANCELLED


def test_a_dependent_job_has_no_forecast(dataset) -> None:
    busy = submit(dataset, "busy", gpus_per_task=4, time_limit_s=3600)
    cycle()
    waits, chained = submit(dataset, "waits"), submit(dataset, "chained", dependencies=[busy])
    cycle()
    run_forecast_pass()
    assert waits.forecasts.exists() and not chained.forecasts.exists()


def test_a_preview_reports_the_dependency(dataset) -> None:
    first = submit(dataset, "first")
    asked = JobRequest(
        name="asked", project=dataset["project"], environment=dataset["environment"], command=["true"],
        dependencies=[first], ignore_dependency_failure=True,
    )  # fmt: skip
    question = EngineQuery.objects.create(
        kind="would_start", body=preview_query_body(dataset["owner"], asked)
    )
    answer_query(question.public_id)
    question.refresh_from_db()
    assert not question.answer["starts_now"] and not question.answer["unsatisfiable"]
    assert question.answer["verdict"]["code"] == "dependency"
    assert question.answer["verdict"]["message"] == "It starts after first has ended."
    assert question.answer["alternatives"] == []
