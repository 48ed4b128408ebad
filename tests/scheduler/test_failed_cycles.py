"""A cycle that cannot decide: nothing is changed, admins are told, and its case replays to the same error."""

from __future__ import annotations

import dataclasses
import datetime as dt
import gzip
import io
import json
import math
from contextlib import redirect_stderr, redirect_stdout

import pytest
from django.db import InterfaceError, OperationalError
from django.utils import timezone

from portal.models import Attempt, ClusterSettings, Cycle, FailedCycle, Job, JobVerdict
from scheduler import cycle, failed_cycles, periodic
from scheduler.core.decide import decide
from scheduler.core.model.serialization import plan_to_json, snapshot_from_json
from scheduler.cycle import run_cycle
from scheduler.replay.__main__ import main
from scheduler.snapshot.decision_input import take_snapshot
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    factories.cluster_settings()
    return factories.basic_cluster()


@pytest.fixture
def waiting(dataset) -> Job:
    return factories.job(dataset["owner"], dataset["project"], dataset["environment"])


def replayed(path) -> tuple[int, list[str], str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["snapshot", str(path)])
    return status, out.getvalue().splitlines(), err.getvalue()


def nothing_changed(waiting: Job) -> bool:
    return not (
        Attempt.objects.exists()
        or JobVerdict.objects.exists()
        or Cycle.objects.exists()
        or Job.objects.get(pk=waiting.pk).version != waiting.version
    )


def broken(monkeypatch):
    """Take snapshots whose time is not a number: no row is invalid, so that no row can be left out."""

    def snapshot_without_time(settings, row_cache):
        inputs = take_snapshot(settings, row_cache)
        return dataclasses.replace(inputs, snapshot=dataclasses.replace(inputs.snapshot, now_s=math.nan))

    monkeypatch.setattr(cycle, "take_snapshot", snapshot_without_time)


def test_a_snapshot_that_cannot_be_true_stops_the_cycle_and_replays(
    dataset, waiting, monkeypatch, tmp_path
) -> None:
    broken(monkeypatch)
    outcome = run_cycle("test", "me")
    assert outcome is not None and (outcome.started, outcome.rerun) == (0, False)
    assert nothing_changed(waiting)
    row = FailedCycle.objects.get()
    assert (row.kind, row.repeat_count, row.trigger) == ("snapshot", 1, "test")
    assert row.field == "now_s" and "now_s" in row.message
    alert = ClusterSettings.objects.get()
    assert alert.scheduler_alert == row.message and alert.scheduler_alert_at is not None
    path = tmp_path / "case.json.gz"
    path.write_bytes(row.content)
    status, lines, _ = replayed(path)
    assert status == 1 and json.loads(lines[-1])["field"] == row.field
    assert json.loads(lines[-1])["error"] in row.message


def test_the_scheduler_retries_and_recovers_by_itself(dataset, waiting) -> None:
    ClusterSettings.objects.update(policy={"usage_half_life_s": 1})
    for _ in range(3):
        run_cycle("period", "me")
    row = FailedCycle.objects.get()
    assert row.repeat_count == 3 and row.last_at > row.first_at
    ClusterSettings.objects.update(policy={})
    outcome = run_cycle("period", "me")
    assert outcome is not None and outcome.started == 1
    assert ClusterSettings.objects.get().scheduler_alert == ""
    assert FailedCycle.objects.count() == 1  # kept for whoever asks why


def test_a_fault_of_ours_is_kept_with_its_case(dataset, waiting, tmp_path) -> None:
    def faulty(snapshot, policy):
        raise KeyError("gone")

    assert run_cycle("test", "me", decide=faulty) is not None
    row = FailedCycle.objects.get()
    assert (row.kind, row.field) == ("fault", "")
    assert "The decision failed with: KeyError" in row.message
    assert nothing_changed(waiting)
    path = tmp_path / "case.json.gz"
    path.write_bytes(row.content)
    status, lines, _ = replayed(path)  # without the fault the same case has a plan, and the same each time
    outer = json.loads(gzip.decompress(row.content))
    snapshot_without_time = snapshot_from_json(gzip.decompress(row.content).decode())
    assert status == 0 and lines[-1] == plan_to_json(
        decide(snapshot_without_time, take_snapshot(factories.cluster_settings()).policy)
    )
    assert [job["job"] for job in outer["snapshot"]["pending"]] == [waiting.public_id]


def test_an_invalid_cluster_setting_is_named(dataset, waiting, tmp_path) -> None:
    ClusterSettings.objects.update(
        policy={"usage_half_life_s": 1}
    )  # past the services, as a hand in the database would
    run_cycle("test", "me")
    row = FailedCycle.objects.get()
    assert (row.kind, row.field) == ("policy", "usage_half_life_s")
    assert nothing_changed(waiting)
    path = tmp_path / "case.json.gz"
    path.write_bytes(row.content)
    status, lines, _ = replayed(path)
    assert (status, json.loads(lines[-1])["field"]) == (1, "usage_half_life_s")


@pytest.mark.parametrize("incident", [OperationalError, InterfaceError])
def test_an_unavailable_database_raises_no_alert(dataset, waiting, monkeypatch, incident) -> None:
    def away(settings, row_cache):
        raise incident("gone for a moment")

    monkeypatch.setattr(cycle, "take_snapshot", away)
    with pytest.raises(incident):
        run_cycle("test", "me")
    assert not FailedCycle.objects.exists() and ClusterSettings.objects.get().scheduler_alert == ""


def test_the_newest_twenty_of_thirty_days_are_kept() -> None:
    now = timezone.now()
    for number in range(25):
        at = now - dt.timedelta(days=31) if number == 24 else now
        FailedCycle.objects.create(first_at=at, last_at=at, kind="fault", message=str(number), content=b"")
    failed_cycles.delete_old_failed_cycles()
    assert sorted(map(int, FailedCycle.objects.values_list("message", flat=True))) == list(range(4, 24))
    FailedCycle.objects.update(last_at=now - dt.timedelta(days=31))
    periodic.delete_old_rows()
    assert not FailedCycle.objects.exists()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{", "JSON"),
        ("[]", "snapshot"),
        ('{"format": 1, "snapshot": {}, "policy": 3}', "policy"),
        ('{"format": 1, "snapshot": {"nodes": 5}, "policy": {}}', "snapshot.now_s"),
        ('{"format": 9, "snapshot": {}, "policy": {}}', "format"),
    ],
)
def test_a_file_that_is_not_a_case_exits_with_status_2(tmp_path, text, place) -> None:
    path = tmp_path / "case.json"
    path.write_text(text)
    status, lines, err = replayed(path)
    assert (status, lines) == (2, []) and place in err
