"""Where many wait, a cycle starts jobs first and then says why others wait, until the next is asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest

from portal.models import ClusterSettings, Job, JobVerdict
from portal.outbox import has_queued_messages
from portal.valkey.client import valkey_client
from scheduler import tasks
from scheduler.core.model.plan import Verdict
from scheduler.core.model.snapshot import JobId
from scheduler.core.verdicts.report import VerdictReport
from scheduler.cycle import CycleResult, CycleState, run_cycle
from scheduler.tasks import CycleRunner
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    factories.cluster_settings()
    monkeypatch.setattr("scheduler.incremental.EXPLAIN_ALL_LIMIT", 1)
    return factories.basic_cluster()


def submit(dataset: dict[str, Any], jobs: int) -> list[Job]:
    return [factories.job(dataset["owner"], dataset["project"], dataset["environment"]) for _ in range(jobs)]


def test_a_cycle_followed_by_others_starts_jobs_and_writes_only_some_verdicts(
    dataset: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.incremental.EXPLAIN_BATCH_SIZE", 4)
    submit(dataset, 14)
    remembered = CycleState()
    first = run_cycle("test", "holder", remembered, next_cycle_requested=lambda: True)
    assert first is not None and first.started and not first.explained
    some = set(JobVerdict.objects.values_list("job_id", flat=True))
    assert 0 < len(some) <= 4
    hurried = run_cycle("test", "holder", remembered, next_cycle_requested=lambda: True)
    assert hurried is not None and not hurried.explained
    assert set(JobVerdict.objects.values_list("job_id", flat=True)) == some  # it is not a second since
    second = run_cycle("test", "holder", remembered)
    assert second is not None and second.explained
    waiting = set(Job.objects.filter(state="PENDING").values_list("id", flat=True))
    assert set(JobVerdict.objects.values_list("job_id", flat=True)) == waiting > some


def test_a_failing_explanation_raises_an_alert_and_the_decision_stands(
    dataset: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: VerdictReport, jobs: Iterable[JobId]) -> list[Verdict]:
        raise RuntimeError("no words")

    monkeypatch.setattr(VerdictReport, "for_jobs", fails)
    submit(dataset, 14)
    outcome = run_cycle("test", "holder", CycleState())
    assert outcome is not None and outcome.started and not outcome.explained
    assert Job.objects.exclude(state="PENDING").count() == outcome.started
    assert "no words" in ClusterSettings.objects.get().scheduler_alert


def test_the_last_of_many_old_hints_triggers_the_remaining_verdicts(
    dataset: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hints of a burst are all older than the cycle that the first of them began."""
    left = [True]
    ran: list[bool] = []
    monkeypatch.setattr("scheduler.incremental.EXPLAIN_BATCH_SIZE", 4)
    monkeypatch.setattr(tasks, "has_queued_messages", lambda queue: left[0])

    def counted(*arguments: Any, **named: Any) -> CycleResult | None:
        outcome = run_cycle(*arguments, **named)
        ran.append(outcome is not None and outcome.explained)
        return outcome

    monkeypatch.setattr(tasks, "run_cycle", counted)
    submit(dataset, 14)
    gate, sent_s = CycleRunner(), time.time()
    gate.run("test", sent_s)
    gate.run("test", sent_s)
    assert ran == [False]
    left[0] = False  # this is the last of them
    gate.run("test", sent_s)
    assert ran == [False, True]
    gate.run("test", sent_s)
    assert ran == [False, True]


def test_one_cycle_covers_the_events_during_its_pause(
    dataset: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def counted(trigger: str, *arguments: Any, **named: Any) -> CycleResult | None:
        ran.append(trigger)
        return run_cycle(trigger, *arguments, **named)

    monkeypatch.setattr(tasks, "run_cycle", counted)
    monkeypatch.setattr(tasks, "PAUSE_PER_CYCLE", 1e6)
    monkeypatch.setattr(tasks, "MAX_PAUSE_S", 0.6)
    gate = CycleRunner()
    gate.run("first", time.time())
    sent_s: list[float] = []
    threading.Timer(0.2, lambda: sent_s.append(time.time())).start()
    gate.run("second", time.time())
    gate.run("during the pause", sent_s[0])
    assert ran == ["first", "second"]
    gate.run("later", time.time())
    assert ran == ["first", "second", "later"]


@pytest.mark.usefixtures("dataset")
def test_the_broker_is_asked_whether_hints_wait() -> None:
    client = valkey_client(1.0)
    client.delete("quiet")
    assert not has_queued_messages("quiet")
    client.rpush("quiet", "{}")
    assert has_queued_messages("quiet")
    client.delete("quiet")
