"""Start intervals from the record: how long jobs ran, who runs and who waits."""

from __future__ import annotations

import datetime as dt

import pytest
from django.db.models import F
from django.utils import timezone

from portal.models import ClusterSettings, Forecast, Job, Node, Quota, Standing
from portal.services import lifecycle
from portal.services.jobs import do_cancel_job
from scheduler.cycle import run_cycle
from scheduler.foresee import Foresight, foresee, in_turn, learned_calibration
from scheduler.snapshot import take_photo
from tests import record

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def scene():
    record.cluster()
    return record.scene()


def submit(scene, **fields) -> Job:
    return record.job(scene["owner"], scene["project"], scene["environment"], **fields)


def ended(scene, minutes: float, count: int, **fields) -> None:
    """Jobs that ran so long and ended."""
    now = timezone.now()
    for _ in range(count):
        job = submit(scene, **fields)
        do_cancel_job(scene["owner"], job)
        Job.objects.filter(pk=job.pk).update(started_at=now - dt.timedelta(minutes=minutes), ended_at=now)


def test_a_job_that_waits_for_a_whole_node_is_foreseen_when_what_runs_there_should_have_ended(scene) -> None:
    Quota.objects.create(project=scene["project"], pool=scene["pool"], guaranteed_milli=4000)
    ended(scene, 30, 6)
    submit(scene)
    run_cycle("test", "me")
    waiting = submit(scene, gpus_per_task=4, preemptible=False)
    run_cycle("test", "me")
    assert foresee() == 1
    standing = Standing.objects.get(job=waiting)
    in_s = (standing.p50_at - timezone.now()).total_seconds()
    assert 25 * 60 < in_s < 31 * 60
    assert standing.p10_at < standing.p50_at < standing.p90_at
    first = Forecast.objects.get(job=waiting)
    assert first.at_submit
    assert first.played_s == pytest.approx(in_s, abs=60)
    assert foresee() == 0  # nothing moved


def test_who_was_looked_at_longest_ago_comes_first_though_nothing_moved(scene) -> None:
    jobs = [submit(scene, gpus_per_task=4) for _ in range(4)]
    run_cycle("test", "me")
    rows = {row.job: row for row in take_photo(ClusterSettings.objects.get()).snapshot.pending}
    first, *others = sorted(rows.values(), key=lambda row: row.submitted_s)
    assert {row.job for row in rows.values()} <= {job.public_id for job in jobs}
    kept = Foresight()
    assert in_turn(rows.values(), kept.looked_s) == [first, *others]
    foresee(kept=kept)
    assert set(kept.looked_s) == set(rows)
    for number, row in enumerate(reversed([first, *others])):
        kept.looked_s[row.job] = 4e9 + number
    assert in_turn(rows.values(), kept.looked_s) == [*reversed(others), first]


def test_nothing_waits(scene) -> None:
    assert foresee() == 0


def test_what_came_of_forecasts_widens_the_next_ones(scene) -> None:
    now = timezone.now()
    for late in range(25):
        job, made_at = submit(scene), now - dt.timedelta(hours=late, seconds=1000)
        Forecast.objects.create(
            job=job,
            made_at=made_at,
            at_submit=True,
            p10_at=made_at + dt.timedelta(seconds=100),
            p50_at=made_at + dt.timedelta(seconds=200),
            p90_at=made_at + dt.timedelta(seconds=300),
            played_s=1000.0,
            started_at=made_at + dt.timedelta(seconds=1000 + 200 * late),
            inside=True,
        )
    interval = learned_calibration().interval(1000, 1000.0)
    assert interval.p10_s == pytest.approx(1400)  # a tenth of them waited at most so long
    assert interval.p90_s == pytest.approx(5400, abs=201)


def test_what_was_promised_of_a_job_is_taken_back_when_it_is_held(scene) -> None:
    submit(scene)
    run_cycle("test", "me")
    waiting = submit(scene, gpus_per_task=4)
    run_cycle("test", "me")
    assert foresee() == 1
    lifecycle.set_held(waiting.pk, True, actor="x")
    run_cycle("test", "me")
    assert foresee() == 0
    standing = Standing.objects.get(job=waiting)
    assert (standing.code, standing.p10_at, standing.p50_at, standing.p90_at) == ("held", None, None, None)
    assert standing.foreseen_at is None
    lifecycle.set_held(waiting.pk, False, actor="x")
    run_cycle("test", "me")
    assert foresee() == 1
    assert (
        Forecast.objects.filter(job=waiting, at_submit=True).count() == 1
    )  # the first is the one that counts


@pytest.mark.parametrize("why", ["limit", "drained"])
def test_nothing_is_promised_where_waiting_alone_does_not_help(scene, why) -> None:
    waiting = submit(scene, gpus_per_task=2)
    if why == "limit":
        Quota.objects.create(project=scene["project"], pool=scene["pool"], limit_milli=1000)
    else:
        Node.objects.update(state="cordoned")
    run_cycle("test", "me")
    assert foresee() == 0
    standing = Standing.objects.get(job=waiting)
    assert standing.p50_at is None
    assert standing.foreseen_at is not None  # it was looked for
    assert not Forecast.objects.exists()
    seen_at = standing.foreseen_at
    foresee()
    assert Standing.objects.get(job=waiting).foreseen_at == seen_at  # nothing new, nothing written


def test_no_interval_begins_before_a_job_may_be_tried_again(scene) -> None:
    job = submit(scene)
    Job.objects.filter(pk=job.pk).update(
        reason="start_refused", attempts_made=5, queued_at=timezone.now(), version=F("version") + 1
    )
    run_cycle("test", "me")
    standing = Standing.objects.get(job=job)
    assert standing.code == "delayed_until"
    assert foresee() == 1
    standing.refresh_from_db()
    assert standing.p10_at.timestamp() == pytest.approx(standing.numbers["not_before_s"], abs=1e-3)
