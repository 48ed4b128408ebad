"""readyz while cycles end, hang, fail or are not run at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from django.db import OperationalError, connection
from django.test import Client

from portal.api.cluster import health
from portal.models import Cycle
from portal.selectors.scheduling import cycles
from portal.selectors.scheduling.cycles import CycleWatch
from scheduler import cycle, leases
from scheduler.cycle import CycleState, run_cycle
from tests.standalone.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)

LIMIT_S = 3.0


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process; the limit is that of intervals of a fraction of a second, and of no slow cycle."""
    monkeypatch.setattr(cycles, "CYCLE_EVERY_S", LIMIT_S / cycles.MISSED_CYCLES)
    monkeypatch.setattr(cycles, "SLOW_FACTOR", 0)
    monkeypatch.setattr(health, "CYCLE_WATCH", CycleWatch())


def scheduler_part(status: int | None = None) -> dict[str, object]:
    answer = Client().get("/readyz")
    if status is not None:
        assert answer.status_code == status, answer.json()
    part: dict[str, object] = answer.json()["parts"]["scheduler"]
    return part


def is_reported() -> bool:
    return Client().get("/readyz").status_code == 503


def run(state: CycleState | None = None, decide: cycle.Decide | None = None) -> None:
    assert run_cycle("test", "test", state, decide=decide) is not None


@pytest.fixture
def hung_cycle() -> Iterator[threading.Event]:
    """A cycle whose decision does not return, in a thread that keeps its lease as a leader does."""
    deciding, released = threading.Event(), threading.Event()

    def decide(*_: object) -> object:
        deciding.set()
        while not released.wait(0.2):
            leases.renew([leases.LEADER], "hung", leases.LEADER_TTL_S)
        raise RuntimeError("released")

    def hang() -> None:
        try:
            run_cycle("test", "hung", decide=decide)  # type: ignore[arg-type]
        finally:
            connection.close()

    thread = threading.Thread(target=hang)
    thread.start()
    assert deciding.wait(20)
    yield released
    released.set()
    thread.join(20)


def test_a_cycle_that_hangs_is_reported_with_its_lease_held(hung_cycle, monkeypatch):
    monkeypatch.setattr(health, "CYCLE_WATCH", CycleWatch())  # the cycle may have taken long to begin
    assert scheduler_part(200)["ok"] is True
    assert eventually(is_reported, 20)
    assert "No scheduling cycle has ended for" in str(scheduler_part(503)["reason"])
    assert Client().get("/readyz?exclude=scheduler").status_code == 200
    assert Client().get("/healthz").status_code == 200
    hung_cycle.set()


def test_cycles_that_always_fail_are_reported_although_they_end():
    def fail(*_: object) -> object:
        raise ValueError("job secret-name has no shape")

    deadline_s = time.monotonic() + 20
    while not is_reported() and time.monotonic() < deadline_s:
        run(decide=fail)  # type: ignore[arg-type]
        time.sleep(0.1)
    reason = str(scheduler_part(503)["reason"])
    assert "every cycle fails" in reason
    assert "secret-name" not in reason
    run()
    assert scheduler_part(200)["ok"] is True


def test_a_scheduler_that_stopped_is_reported_and_not_one_without_jobs():
    state = CycleState()
    deadline_s = time.monotonic() + 2 * LIMIT_S
    while time.monotonic() < deadline_s:
        run(state)
        assert scheduler_part(200)["ok"] is True
        time.sleep(LIMIT_S / 5)
    assert eventually(is_reported, 20)
    run(state)
    assert scheduler_part(200)["ok"] is True


def test_the_time_before_the_process_started_does_not_count():
    run()
    Cycle.objects.update(started_at="2020-01-01T00:00:00Z")  # also: a clock that was years behind
    assert scheduler_part(200)["ok"] is True
    assert eventually(is_reported, 20)


def test_a_clock_ahead_hides_no_stop():
    run()
    Cycle.objects.update(started_at="2099-01-01T00:00:00Z")
    assert scheduler_part(200)["ok"] is True
    assert eventually(is_reported, 20)


def test_the_time_without_the_database_does_not_count(monkeypatch):
    run()
    assert scheduler_part(200)["ok"] is True

    def away() -> bool:
        raise OperationalError("x")

    with monkeypatch.context() as outage:
        outage.setattr(health, "_database", away)
        time.sleep(LIMIT_S * 1.5)
        assert Client().get("/readyz").json()["parts"]["scheduler"] == {"ok": False}
    assert scheduler_part(200)["ok"] is True
    assert eventually(is_reported, 20)


def test_a_restarted_database_is_no_stopped_scheduler(monkeypatch):
    run()
    watch = CycleWatch()
    assert watch.observe().ok
    time.sleep(LIMIT_S * 1.5)
    assert not watch.observe().ok
    with connection.cursor() as cursor:
        cursor.execute("SELECT extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())")
        up_s = float(cursor.fetchone()[0])
    assert watch.observe().age_s < up_s


def test_the_limit_allows_for_slow_cycles(monkeypatch):
    run()
    monkeypatch.setattr(cycles, "SLOW_FACTOR", 3)
    Cycle.objects.update(decide_ms=20_000, snapshot_ms=0, commit_ms=0)
    assert CycleWatch().observe().limit_s == pytest.approx(LIMIT_S + 60)
