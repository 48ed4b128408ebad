"""Cycles that follow each other closely start jobs each time and say why others wait a little later."""

from __future__ import annotations

from typing import Any

import pytest

from portal.models import Job, Standing
from scheduler import tasks
from scheduler.cycle import run_cycle
from scheduler.remembered import Remembered
from scheduler.tasks import CycleGate
from tests import record

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    record.cluster()
    monkeypatch.setattr("scheduler.recall.TOLD_ALWAYS", 1)
    return record.scene()


def submit(scene: dict[str, Any], jobs: int) -> list[Job]:
    return [record.job(scene["owner"], scene["project"], scene["environment"]) for _ in range(jobs)]


def test_a_cycle_right_after_another_starts_jobs_and_leaves_what_was_said(scene: dict[str, Any]) -> None:
    submit(scene, 12)
    remembered = Remembered()
    first = run_cycle("test", "holder", remembered)
    assert first is not None and first.told
    said = dict(Standing.objects.values_list("job_id", "decided_at"))
    late = submit(scene, 1)[0]
    second = run_cycle("test", "holder", remembered)
    assert second is not None and not second.told
    assert dict(Standing.objects.values_list("job_id", "decided_at")) == said
    remembered.recall._told_s -= 1.0
    third = run_cycle("test", "holder", remembered)
    assert third is not None and third.told
    assert Standing.objects.filter(job=late).exists()


def test_whoever_leaves_reasons_untold_asks_for_one_cycle_that_tells(
    scene: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, list[str], str, float]] = []

    def send(task: str, arguments: list[str], queue: str, after_s: float = 0.0) -> bool:
        sent.append((task, arguments, queue, after_s))
        return True

    monkeypatch.setattr(tasks, "send_hint", send)
    submit(scene, 12)
    gate = CycleGate()
    gate.run("test", None)
    assert sent == []
    gate.run("test", None)
    gate.run("test", None)
    assert sent == [("scheduler.cycle", ["telling"], "cycle", 1.0)]
