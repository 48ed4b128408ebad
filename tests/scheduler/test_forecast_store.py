"""Forecasts: written when new or moved, the first one scored once, by the equation; measured over thirty days."""

from __future__ import annotations

import dataclasses
import datetime as dt

import pytest
from django.utils import timezone
from django.utils.translation import override

from portal.models import Forecast, Job, JobVerdict
from portal.selectors.scheduling.forecasts import forecast_accuracy, forecast_revisions
from portal.web.jobs.job.forecast_display import revision_reasons
from scheduler import periodic
from scheduler.core.decide import decide
from scheduler.core.model.plan import StartInterval
from scheduler.cycle import run_cycle
from scheduler.forecast.forecast_store import save_intervals, score_started
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    factories.cluster_settings()
    return factories.basic_cluster()


@pytest.fixture
def waiting(dataset) -> Job:
    """A job that waits for all four GPUs of the node, of which another holds one."""
    factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    run_cycle("test", "me")
    job = factories.job(
        dataset["owner"], dataset["project"], dataset["environment"], gpus_per_task=4, preemptible=False
    )
    run_cycle("test", "me")
    return job


def interval(low_s: float, middle_s: float, high_s: float) -> StartInterval:
    now_s = timezone.now().timestamp()
    return StartInterval(now_s + low_s, now_s + middle_s, now_s + high_s)


def foreseeing(given: StartInterval | None):
    def decided(snapshot, policy):
        plan = decide(snapshot, policy)
        verdicts = tuple(dataclasses.replace(verdict, interval=given) for verdict in plan.verdicts)
        return dataclasses.replace(plan, verdicts=verdicts)

    return decided


def test_a_cycle_stores_the_intervals_of_its_verdicts(waiting) -> None:
    assert not Forecast.objects.exists() and JobVerdict.objects.get().p50_at is None
    given = interval(60, 600, 1800)
    run_cycle("test", "me", decide=foreseeing(given))
    row, standing = Forecast.objects.get(), JobVerdict.objects.get()
    assert row.job == waiting and row.is_first and row.code == standing.code
    assert standing.p50_at == row.p50_at == dt.datetime.fromtimestamp(given.p50_s, dt.UTC)
    assert standing.forecast_at == row.made_at
    run_cycle("test", "me", decide=foreseeing(None))  # no news is no reason to forget
    assert JobVerdict.objects.get().p50_at == row.p50_at and Forecast.objects.count() == 1


@pytest.mark.parametrize(("moved_s", "written"), [(0, 1), (100, 1), (-100, 1), (130, 2), (-130, 2)])
def test_an_interval_is_stored_again_when_the_median_moves_by_a_fifth(waiting, moved_s, written) -> None:
    save_intervals({waiting.public_id: interval(60, 600, 1800)})
    save_intervals({waiting.public_id: interval(60, 600 + moved_s, 1800)})
    assert Forecast.objects.count() == written
    assert Forecast.objects.filter(is_first=True).count() == 1


def test_a_job_without_a_verdict_has_no_forecast(waiting) -> None:
    JobVerdict.objects.all().delete()
    assert save_intervals({waiting.public_id: interval(1, 2, 3), "nobody": interval(1, 2, 3)}) == 0


def started(job: Job, *, waited_s: float) -> None:
    now = timezone.now()
    submitted = now - dt.timedelta(seconds=waited_s)
    Job.objects.filter(pk=job.pk).update(submitted_at=submitted, started_at=now)


@pytest.mark.parametrize(
    ("low_s", "high_s", "waited_s", "inside", "score_s"),
    [(-60, 60, 300, True, 120), (30, 60, 300, False, 30 + 10 * 30), (-60, 60, 1, True, 120)],
)
def test_the_first_forecast_is_scored_once_when_the_job_starts(
    waiting, low_s, high_s, waited_s, inside, score_s
) -> None:
    save_intervals({waiting.public_id: interval(low_s, high_s, high_s)})
    save_intervals({waiting.public_id: interval(low_s + 9000, high_s + 9000, high_s + 9000)})
    assert score_started() == 0
    started(waiting, waited_s=waited_s)
    periodic.run_periodic_pass()
    first, later = Forecast.objects.order_by("id")
    assert (first.covered, later.covered, later.started_at) == (inside, None, None)
    assert first.started_at is not None and first.score_s == pytest.approx(score_s, abs=20)
    assert score_started() == 0
    reported = forecast_accuracy()
    assert (reported.scored, reported.covered) == (1, int(inside))
    assert reported.percent == 100 * int(inside)


def test_measured_forgets_after_thirty_days(waiting) -> None:
    save_intervals({waiting.public_id: interval(-60, 0, 60)})
    started(waiting, waited_s=300)
    score_started()
    Forecast.objects.update(started_at=timezone.now() - dt.timedelta(days=31))
    assert forecast_accuracy().scored == 0 and forecast_accuracy().mean_score_s is None
    Forecast.objects.update(made_at=timezone.now() - dt.timedelta(days=91))
    periodic.delete_old_rows()
    assert not Forecast.objects.exists()


def test_a_later_wait_of_a_job_is_not_its_first(waiting) -> None:
    Job.objects.filter(pk=waiting.pk).update(
        started_at=timezone.now()
    )  # it ran, left for another, waits again
    save_intervals({waiting.public_id: interval(60, 600, 1800)})
    assert not Forecast.objects.get().is_first


def test_a_changed_forecast_has_a_reason(waiting) -> None:
    save_intervals({waiting.public_id: interval(60, 600, 1800)})
    JobVerdict.objects.update(code="project_limit", jobs_ahead=["aaaaaaaaaa", "bbbbbbbbbb"])
    save_intervals({waiting.public_id: interval(60, 1200, 1800)})
    newest, first = forecast_revisions(waiting)
    assert first.shift_s is None and newest.shift_s == pytest.approx(600, abs=2)
    assert newest.jobs_ahead_added == ("aaaaaaaaaa", "bbbbbbbbbb") and newest.is_later
    sentences = " ".join(revision_reasons(newest, {"aaaaaaaaaa": "sweep"}))
    assert (
        "later." in sentences and "changed from “Non preemptible over quota” to “Project limit”." in sentences
    )
    with override("de"):
        german = " ".join(revision_reasons(newest, {}))
    assert "von „Nicht verdrängbar, über Kontingent“ zu „Projektgrenze“ geändert." in german
    assert "sweep, 1\u00a0job of another project are now ahead of it." in sentences


@pytest.mark.parametrize(
    "given",
    [
        StartInterval(2e9, 1.9e9, 2.1e9),
        StartInterval(2e9, 2.1e9, float("nan")),
        StartInterval(2e9, 2.1e9, float("inf")),
        StartInterval(-5.0, 0.0, 5.0),
    ],
)
def test_an_invalid_interval_breaks_no_cycle(waiting, given) -> None:
    outcome = run_cycle("test", "me", decide=foreseeing(given))
    assert outcome is not None and not Forecast.objects.exists()
