"""Start intervals from the record: how long jobs ran, who runs and who waits."""

from __future__ import annotations

import datetime as dt
from functools import partialmethod

import pytest
from django.db.models import Count, F
from django.utils import timezone

from portal.models import Forecast, Job, JobVerdict, Node, Quota
from portal.selectors.scheduling.forecasts import no_forecast_reason
from portal.services.jobs.submission import do_cancel_job
from portal.services.lifecycle import job_control
from scheduler.core.forecast.start_times import QueueForecast
from scheduler.core.model.plan import StartInterval
from scheduler.core.model.snapshot import JobId
from scheduler.cycle import run_cycle
from scheduler.forecast import forecast_store
from scheduler.forecast.forecast_pass import ForecastState, load_calibration, run_forecast_pass
from scheduler.forecast.forecast_store import save_intervals
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    factories.cluster_settings()
    return factories.basic_cluster()


def submit(dataset, **fields) -> Job:
    fields.setdefault("time_limit_s", 86_400)  # without a limit and without similar jobs it has no known end
    return factories.job(dataset["owner"], dataset["project"], dataset["environment"], **fields)


def ended(dataset, minutes: float, count: int, **fields) -> None:
    """Jobs that ran so long and ended."""
    now = timezone.now()
    for _ in range(count):
        job = submit(dataset, **fields)
        do_cancel_job(dataset["owner"], job)
        Job.objects.filter(pk=job.pk).update(started_at=now - dt.timedelta(minutes=minutes), ended_at=now)


def test_a_job_waiting_for_a_whole_node_is_forecast_from_the_expected_end(
    dataset,
) -> None:
    Quota.objects.create(project=dataset["project"], pool=dataset["pool"], guaranteed_milli=4000)
    ended(dataset, 30, 6)
    submit(dataset)
    run_cycle("test", "me")
    waiting = submit(dataset, gpus_per_task=4, preemptible=False)
    run_cycle("test", "me")
    assert run_forecast_pass() == 1
    standing = JobVerdict.objects.get(job=waiting)
    in_s = (standing.p50_at - timezone.now()).total_seconds()
    assert 25 * 60 < in_s < 31 * 60
    assert standing.p10_at < standing.p50_at < standing.p90_at
    first = Forecast.objects.get(job=waiting)
    assert first.is_first
    assert first.simulated_s == pytest.approx(in_s, abs=60)
    assert run_forecast_pass() == 0  # nothing moved


def test_one_pass_forecasts_all_jobs(dataset) -> None:
    jobs = [submit(dataset, gpus_per_task=4) for _ in range(4)]
    run_cycle("test", "me")
    waiting = {job.pk for job in jobs} & set(JobVerdict.objects.values_list("job_id", flat=True))
    assert len(waiting) >= 3
    assert run_forecast_pass() == len(waiting)
    by_turn = JobVerdict.objects.order_by("job__submitted_at").values_list("p50_at", flat=True)
    assert list(by_turn) == sorted(by_turn)


def test_beyond_the_horizon_there_is_neither_interval_nor_reason(dataset, monkeypatch) -> None:
    job = [submit(dataset, gpus_per_task=4) for _ in range(3)][-1]
    run_cycle("test", "me")
    assert run_forecast_pass()
    one_step = partialmethod(QueueForecast.median_starts_s, max_steps=1)
    monkeypatch.setattr(QueueForecast, "median_starts_s", one_step)
    run_forecast_pass()
    standing = JobVerdict.objects.get(job=job)
    assert (standing.p10_at, standing.p50_at, standing.p90_at, standing.forecast_at) == (None,) * 4
    assert no_forecast_reason(job, standing) is None
    monkeypatch.undo()
    run_forecast_pass()
    assert JobVerdict.objects.get(job=job).p50_at is not None


def test_pools_alternate_when_time_is_too_short_for_all(dataset) -> None:
    pools = [dataset["pool"], factories.pool()]
    factories.node(pools[1])
    jobs = {pool: [submit(dataset, gpus_per_task=4, pool=pool) for _ in range(2)][-1] for pool in pools}
    run_cycle("test", "me")
    kept, foreseen = ForecastState(), []
    for _ in range(3):
        run_forecast_pass(0.0, kept)
        rows = JobVerdict.objects.filter(job__in=jobs.values(), p50_at__isnull=False)
        foreseen.append(rows.count())
    assert foreseen == [1, 2, 2]


def test_of_many_changed_intervals_the_oldest_are_written_first(dataset, monkeypatch) -> None:
    monkeypatch.setattr(forecast_store, "MAX_NEW", 3)
    monkeypatch.setattr(forecast_store, "MAX_CHANGED", 2)
    monkeypatch.setattr(forecast_store, "MAX_BATCH", 2)
    submit(dataset, gpus_per_task=4)
    run_cycle("test", "me")
    jobs = {JobId(submit(dataset, gpus_per_task=4).public_id) for _ in range(5)}
    run_cycle("test", "me")

    def intervals(in_s: float) -> dict[JobId, StartInterval]:
        at_s = timezone.now().timestamp() + in_s
        return {job: StartInterval(at_s, at_s, at_s) for job in jobs}

    def times() -> list[int]:
        rows = Forecast.objects.values("job").annotate(times=Count("pk"))
        return sorted(row["times"] for row in rows)

    assert [save_intervals(intervals(1000)) for _ in range(3)] == [3, 2, 0]
    assert times() == [1, 1, 1, 1, 1]
    assert save_intervals(intervals(9000)) == 2
    assert times() == [1, 1, 1, 2, 2]
    assert [save_intervals(intervals(9000)) for _ in range(3)] == [2, 1, 0]
    assert times() == [2, 2, 2, 2, 2]


def test_an_empty_queue(dataset) -> None:
    assert run_forecast_pass() == 0


def test_past_forecast_errors_widen_the_next_intervals(dataset) -> None:
    now = timezone.now()
    before = load_calibration().interval(1000, 1000.0)
    for late in range(25):
        job, made_at = submit(dataset), now - dt.timedelta(hours=late, seconds=1000)
        Forecast.objects.create(
            job=job,
            made_at=made_at,
            is_first=True,
            p10_at=made_at + dt.timedelta(seconds=100),
            p50_at=made_at + dt.timedelta(seconds=200),
            p90_at=made_at + dt.timedelta(seconds=300),
            simulated_s=1000.0,
            started_at=made_at + dt.timedelta(seconds=1000 + 200 * late),
            covered=True,
        )
    interval = load_calibration().interval(1000, 1000.0)
    assert interval.p10_s > before.p10_s and interval.p50_s > 1.5 * before.p50_s  # each of them was late
    assert interval.p90_s == pytest.approx(5400, abs=601)  # as late as a tenth of them


def test_the_forecast_of_a_held_job_is_removed(dataset) -> None:
    submit(dataset)
    run_cycle("test", "me")
    waiting = submit(dataset, gpus_per_task=4)
    run_cycle("test", "me")
    assert run_forecast_pass() == 1
    job_control.set_job_held(waiting.pk, True, actor="x")
    run_cycle("test", "me")
    assert run_forecast_pass() == 0
    standing = JobVerdict.objects.get(job=waiting)
    assert (standing.code, standing.p10_at, standing.p50_at, standing.p90_at) == ("held", None, None, None)
    assert standing.forecast_at is None
    job_control.set_job_held(waiting.pk, False, actor="x")
    run_cycle("test", "me")
    assert run_forecast_pass() == 1
    assert (
        Forecast.objects.filter(job=waiting, is_first=True).count() == 1
    )  # the first is the one that counts


@pytest.mark.parametrize("why", ["limit", "drained"])
def test_no_forecast_where_waiting_alone_does_not_help(dataset, why) -> None:
    waiting = submit(dataset, gpus_per_task=2)
    if why == "limit":
        Quota.objects.create(project=dataset["project"], pool=dataset["pool"], limit_milli=1000)
    else:
        Node.objects.update(state="cordoned")
    run_cycle("test", "me")
    assert run_forecast_pass() == 0
    standing = JobVerdict.objects.get(job=waiting)
    assert standing.p50_at is None
    assert standing.forecast_at is not None  # it was looked for
    assert not Forecast.objects.exists()
    seen_at = standing.forecast_at
    run_forecast_pass()
    assert JobVerdict.objects.get(job=waiting).forecast_at == seen_at  # nothing new, nothing written


def test_no_interval_starts_before_the_next_attempt_is_allowed(dataset) -> None:
    job = submit(dataset)
    Job.objects.filter(pk=job.pk).update(
        reason="start_refused", attempt_count=5, pending_since=timezone.now(), version=F("version") + 1
    )
    run_cycle("test", "me")
    standing = JobVerdict.objects.get(job=job)
    assert standing.code == "begin_time"
    assert run_forecast_pass() == 1
    standing.refresh_from_db()
    assert standing.p10_at.timestamp() == pytest.approx(standing.details["not_before_s"], abs=1e-3)
