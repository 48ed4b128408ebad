"""A clock that is set: no job ends early, leases go on, and beat goes on."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.db import connection, transaction
from django.db.models import F
from django.utils import timezone

from portal.config.celery import app
from portal.models import Attempt, Job, Lease, OutboxMessage
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from portal.valkey.client import valkey_client
from scheduler import beat, clock, periodic
from scheduler.clock import ClockRecord, ClockStep
from scheduler.leases import acquire, renew
from tests import factories

HOUR = 3600.0


class Clock:
    """Moves the clock that Fairway sees, as if the clock of the database's machine were set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.set_by_s = 0.0
        self.read = clock.read_now_s

    def set_forward(self, seconds: float) -> None:
        """Rows keep their times: they become older by these seconds."""
        self.set_by_s += seconds
        self._patch.setattr(clock, "read_now_s", lambda: self.read() + self.set_by_s)
        Attempt.objects.update(running_at=F("running_at") - dt.timedelta(seconds=seconds))


@pytest.fixture
def portal_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    valkey_client(clock.VALKEY_TIMEOUT_S).delete(clock.KEY)
    monkeypatch.setattr(clock, "_record", None)
    yield Clock(monkeypatch)
    valkey_client(clock.VALKEY_TIMEOUT_S).delete(clock.KEY)


def test_steps_are_counted_for_the_attempts_that_saw_them() -> None:
    record = ClockRecord("b", 1000.0)
    record = record.after("b", 1000.0 + 60, 60, 10)
    assert record.steps == ()
    record = record.after("b", 1000.0 + 120 + 7200, 120, 10)
    record = record.after("b", 1000.0 + 180 + 7200 + 20, 180, 12)  # corrected slowly: no step
    record = record.after("b", 1000.0 + 240 + 20, 240, 15)
    assert [(step.last_attempt, step.change_s) for step in record.steps] == [(10, 7200), (15, -7200)]
    assert [record.ahead_s(attempt) for attempt in (1, 10, 11, 15, 16)] == [0, 0, 0, 0, 0]
    middle = ClockRecord("b", 0.0, record.steps[:1])
    assert [middle.ahead_s(attempt) for attempt in (1, 10, 11)] == [7200, 7200, 0]
    back_first = ClockRecord("b", 0.0, (ClockStep(10, -7200, 0), ClockStep(15, 7200, 60)))
    assert [back_first.ahead_s(attempt) for attempt in (10, 11, 15, 16)] == [0, 7200, 7200, 0]


def test_another_start_of_the_machine_is_no_step() -> None:
    record = ClockRecord("b", 1000.0).after("c", 5000.0, 1, 10)
    assert (record.boot, record.offset_s, record.steps) == ("c", 4999.0, ())


def test_only_a_recent_step_forward_counts() -> None:
    forward, back = ClockStep(1, 7200, 100), ClockStep(1, -7200, 200)
    assert ClockRecord("b", 0, (forward,)).was_set_forward(150)
    assert not ClockRecord("b", 0, (forward, back)).was_set_forward(250)
    assert not ClockRecord("b", 0, (back,)).was_set_forward(250)
    assert not ClockRecord("b", 0, (forward,)).was_set_forward(100 + clock.CAUTION_S)


@pytest.mark.parametrize("steps", [clock.MAX_STEPS + 1, 3 * clock.MAX_STEPS + 1])
@pytest.mark.parametrize("attempts", [0, 1])
def test_a_clock_that_is_set_very_often_forgives_no_less_than_it_took(steps: int, attempts: int) -> None:
    """With ``attempts`` between two steps, from the first of which a job runs; it is set forward last."""
    record = ClockRecord("b", 0.0)
    ahead = dict.fromkeys(range(0, steps, 25), 0.0)
    offset_s = 0.0
    for number in range(steps):
        change_s = 7200.0 if number % 2 == 0 else -7200.0
        offset_s += change_s
        for first in ahead:
            ahead[first] += change_s if first <= number else 0.0
        steady_s = 60.0 * number
        record = record.after("b", steady_s + offset_s, steady_s, 10 + attempts * number)
    assert len(record.steps) <= clock.MAX_STEPS
    assert record.ahead_s(10) == 7200
    if attempts:
        assert all(record.ahead_s(10 + first) >= max(0.0, ahead[first]) for first in ahead)
    assert record.was_set_forward(60.0 * steps)


def test_a_step_before_a_reboot_is_recent_for_an_hour_after_it_and_not_later() -> None:
    record = ClockRecord("b", 0.0).after("b", 9000.0 + 7200, 9000, 10).after("c", 20_000.0, 20, 10)
    assert record.was_set_forward(60) and record.ahead_s(10) == 7200
    assert not record.was_set_forward(9000 + 60)


@pytest.mark.django_db
def test_steps_that_cannot_be_read_are_not_replaced_and_end_no_job(
    portal_clock: Clock, running_job: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.observe()
    portal_clock.set_forward(2 * HOUR)
    clock.observe()
    monkeypatch.setattr(clock, "_record", None)  # another process, at a moment at which Valkey is away
    with monkeypatch.context() as away:
        away.setattr(clock, "valkey_client", lambda timeout_s: redis.Redis(port=1, socket_timeout=timeout_s))
        with pytest.raises(redis.RedisError):
            periodic.stop_overdue_attempts()
    periodic.stop_overdue_attempts()
    running_job.refresh_from_db()
    assert running_job.stop_requested_at is None
    assert clock.observe().ahead_s(running_job.pk) == pytest.approx(2 * HOUR, abs=5)


@pytest.fixture
def running_job(db: None) -> Attempt:
    """The attempt of a job that ran for a minute of its hour."""
    factories.cluster_settings()
    rows = factories.basic_cluster()
    asks = {"gpus_per_task": 1, "time_limit_s": 3600}
    job = factories.job(rows["owner"], rows["project"], rows["environment"], **asks)
    with transaction.atomic():
        locked = Job.objects.select_for_update().get(pk=job.pk)
        gpu = rows["node"].gpus.order_by("index")[0]
        slots = [RankPlacement(rows["node"], [(gpu.pk, 1000)])]
        attempt = job_control.start_attempt(locked, rows["pool"], slots, epoch=1)
    task = attempt.task_rows.get()
    job_control.mark_task_sent(task)
    began = timezone.now() - dt.timedelta(seconds=60)
    job_control.record_task_running(task.pk, container="c", ports={}, at=began)
    return Attempt.objects.get(pk=attempt.pk)


@pytest.mark.django_db
def test_no_running_job_ends_when_the_clock_is_two_hours_ahead(
    portal_clock: Clock, running_job: Attempt
) -> None:
    periodic.stop_overdue_attempts()
    portal_clock.set_forward(2 * HOUR)
    periodic.stop_overdue_attempts()
    running_job.refresh_from_db()
    assert running_job.stop_requested_at is None
    portal_clock.set_forward(-2 * HOUR)
    periodic.stop_overdue_attempts()
    running_job.refresh_from_db()
    assert running_job.stop_requested_at is None
    Attempt.objects.update(running_at=F("running_at") - dt.timedelta(seconds=3600))  # time that did pass
    periodic.stop_overdue_attempts()
    running_job.refresh_from_db()
    assert running_job.stop_reason == "time_limit"


@pytest.mark.django_db
def test_a_step_is_known_after_a_restart_of_the_process(
    portal_clock: Clock, running_job: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.observe()
    monkeypatch.setattr(clock, "_record", None)  # another process
    portal_clock.set_forward(2 * HOUR)
    periodic.stop_overdue_attempts()
    monkeypatch.setattr(clock, "_record", None)
    periodic.stop_overdue_attempts()
    running_job.refresh_from_db()
    assert running_job.stop_requested_at is None
    valkey_client(clock.VALKEY_TIMEOUT_S).delete(clock.KEY)  # a process that knows writes it again
    clock.observe()
    assert clock.observe().ahead_s(running_job.pk) == pytest.approx(2 * HOUR, abs=5)


@pytest.mark.django_db
def test_nothing_is_deleted_for_its_age_while_the_clock_was_set_forward(portal_clock: Clock) -> None:
    old = timezone.now() - dt.timedelta(days=2)
    OutboxMessage.objects.create(name="scheduler.cycle", queue="cycle", sent_at=old)
    clock.observe()
    portal_clock.set_forward(2 * HOUR)
    periodic.delete_old_rows()
    assert OutboxMessage.objects.filter(sent_at=old).exists()
    portal_clock.set_forward(-2 * HOUR)
    periodic.delete_old_rows()
    assert not OutboxMessage.objects.filter(sent_at=old).exists()


@pytest.mark.django_db(transaction=True)
def test_a_lease_from_before_the_clock_was_set_back_ends_in_its_usual_time() -> None:
    killed = acquire("leader", "killed", 1)
    assert killed is not None
    with connection.cursor() as cursor:  # granted when the clock was two hours ahead
        cursor.execute("UPDATE portal_lease SET expires_at = clock_timestamp() + interval '2 h'")
    assert acquire("leader", "next", 1) is None
    time.sleep(1.1)
    taken = acquire("leader", "next", 1)
    assert taken is not None and taken.epoch > killed.epoch


@pytest.mark.django_db(transaction=True)
def test_a_living_holder_keeps_its_lease_when_the_clock_is_set_back() -> None:
    held = acquire("leader", "alive", 5)
    Lease.objects.update(expires_at=timezone.now() + dt.timedelta(hours=2))
    assert acquire("leader", "next", 5) is None
    assert renew(["leader"], "alive", 5) == [held]
    assert acquire("leader", "next", 5) is None


class CountingBeat(beat.ClockTolerantScheduler):
    """Counts instead of sending."""

    def apply_async(self, entry: Any, *_: Any, **__: Any) -> None:
        self.sent = [*getattr(self, "sent", []), entry.name]


@pytest.mark.parametrize("change_s", [2 * HOUR, -2 * HOUR])
def test_beat_goes_on_when_the_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, change_s: float
) -> None:
    set_by = {"s": 0.0}
    offset_s = beat._offset_s
    monkeypatch.setattr(beat, "_offset_s", lambda: offset_s() + set_by["s"])
    monkeypatch.setattr(app, "now", lambda: dt.datetime.now(dt.UTC) + dt.timedelta(seconds=set_by["s"]))
    schedule = {
        name: {"task": name, "schedule": 0.2, "options": {"queue": "none"}}
        for name in ("first", "second", "third")
    }
    named = app.conf.beat_schedule
    app.conf.beat_schedule = schedule
    request.addfinalizer(lambda: setattr(app.conf, "beat_schedule", named))
    sender = CountingBeat(app=app, schedule_filename=str(tmp_path / "beat"))

    def run_for(seconds: float) -> list[str]:
        sender.sent = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            sender.tick()
            time.sleep(0.02)
        return sorted(set(sender.sent) & set(schedule))

    assert run_for(1.0) == ["first", "second", "third"]
    set_by["s"] = change_s
    assert run_for(1.0) == ["first", "second", "third"]
    set_by["s"] = 0.0
    assert run_for(1.0) == ["first", "second", "third"]
    for _ in range(20):  # back in steps that are too small to be noticed one by one
        sender.tick()
        set_by["s"] -= beat.STEP_S - 0.5
    assert run_for(1.0) == ["first", "second", "third"]
    sender.close()
