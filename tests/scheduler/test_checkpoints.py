"""A program says that it saved its work, and the scheduler believes it: from the file on the node to the victim."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone

from agents.engines.replies import Container, PollResult
from portal.models import Attempt, Job, JobEvent, Quota
from scheduler import what_if
from scheduler.core.decide import decide
from scheduler.cycle import run_cycle
from scheduler.snapshot.decision_input import take_snapshot
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine

pytestmark = pytest.mark.django_db(transaction=True)

SAVES = 'sleep 0.2; touch "$FAIRWAY_CHECKPOINT_FILE"; sleep 600'
HOUR = dt.timedelta(hours=1)


@pytest.fixture
def dataset(harness: EngineHarness, request: pytest.FixtureRequest, monkeypatch: Any) -> dict[str, Any]:
    """Two GPUs, promised to the project ``owed``; the project ``lent`` may borrow them."""
    monkeypatch.setattr(what_if, "_cached_inputs", None)
    name = f"c{abs(hash(request.node.name)) % 10**9}"
    node = harness.mark_enrolled(harness.create_node(name=name, gpus=2), gpus=2)
    owner, other = factories.user("ada"), factories.user("eve")
    owed, allowed_folder = factories.project("owed", member=owner), factories.project("lent", member=other)
    Quota.objects.create(project=owed, pool=node.pool, guaranteed_milli=2000)
    return {
        "owner": owner,
        "owed": owed,
        "other": other,
        "lent": allowed_folder,
        "environment": factories.environment(runtime="process", tool=False),
        "engine": InProcessEngine(),
    }


def borrow(dataset: dict[str, Any], name: str, script: str) -> Job:
    fields = {"name": name, "command": ["sh", "-c", script], "memory_mib": 64, "termination_grace_s": 1}
    return factories.job(dataset["other"], dataset["lent"], dataset["environment"], **fields)


def attempt(job: Job) -> Attempt:
    return job.attempts.get()


def both_run(dataset: dict[str, Any], *, saved: str = "") -> None:
    """Both borrowers run, and the one named ``saved`` has said that it saved its work."""

    def look() -> bool:
        running = Attempt.objects.filter(state="RUNNING").count() == 2
        return running and (
            not saved or Attempt.objects.filter(job__name=saved, checkpoint_at__isnull=False).exists()
        )

    assert dataset["engine"].run_until(look, 30.0)


def aged(job: Job, hours: int) -> None:
    Attempt.objects.filter(job=job).update(created_at=timezone.now() - hours * HOUR)


def asked_to_leave() -> set[str]:
    return set(Job.objects.filter(attempts__stop_requested_at__isnull=False).values_list("name", flat=True))


def claim(dataset: dict[str, Any]) -> None:
    """The project to which the GPUs are promised wants one."""
    fields = {"name": "wanted", "memory_mib": 64, "gpus_per_task": 1}
    factories.job(dataset["owner"], dataset["owed"], dataset["environment"], **fields)
    run_cycle("test", dataset["engine"].holder)


def test_the_older_job_with_a_fresh_checkpoint_is_preempted(
    dataset: dict[str, Any],
) -> None:
    older, younger = borrow(dataset, "older", SAVES), borrow(dataset, "younger", "sleep 600")
    both_run(dataset, saved="older")
    saved_at = attempt(older).checkpoint_at
    assert saved_at is not None and timezone.now() - saved_at < dt.timedelta(seconds=60)
    assert attempt(younger).checkpoint_at is None
    assert not JobEvent.objects.filter(kind="checkpoint").exists()
    aged(older, 3)
    aged(younger, 1)
    claim(dataset)
    assert asked_to_leave() == {"older"}


def test_without_checkpoints_the_younger_job_is_preempted(dataset: dict[str, Any]) -> None:
    older, younger = borrow(dataset, "older", "sleep 600"), borrow(dataset, "younger", "sleep 600")
    both_run(dataset)
    aged(older, 3)
    aged(younger, 1)
    claim(dataset)
    assert asked_to_leave() == {"younger"}


def test_a_job_with_an_older_checkpoint_than_the_others_start_stays(dataset: dict[str, Any]) -> None:
    older, younger = borrow(dataset, "older", SAVES), borrow(dataset, "younger", "sleep 600")
    both_run(dataset, saved="older")
    aged(older, 3)
    aged(younger, 1)
    Attempt.objects.filter(job=older).update(checkpoint_at=timezone.now() - 2 * HOUR)
    plan = decide_for_one_more(dataset)
    assert plan == {younger.public_id}


def decide_for_one_more(dataset: dict[str, Any]) -> set[str]:
    """Who would leave for one GPU, by the snapshot of now."""
    factories.job(dataset["owner"], dataset["owed"], dataset["environment"], name="wanted", memory_mib=64)
    inputs = take_snapshot(factories.cluster_settings())
    return {str(one.job) for one in decide(inputs.snapshot, inputs.policy).evictions}


def test_an_older_agent_without_checkpoint_reports_is_supported(
    dataset: dict[str, Any], monkeypatch: Any
) -> None:
    from_wire, left_out = PollResult.from_wire, []

    def as_before(answer: dict[str, Any]) -> PollResult:
        """Its rows lack the field."""
        left_out.extend(row.pop("checkpoint_age_s") for row in answer["containers"])
        return from_wire(answer)

    monkeypatch.setattr(PollResult, "from_wire", as_before)
    job = borrow(dataset, "saves", SAVES)
    borrow(dataset, "other", "sleep 600")
    both_run(dataset)
    assert dataset["engine"].run_until(lambda: set(left_out) - {None} != set(), 30.0)
    assert attempt(job).checkpoint_at is None and attempt(job).state == "RUNNING"


ROW = {
    "name": "fw-c-j-1-0", "cluster": "c", "job": "j", "attempt": 1, "task": 0, "digest": "d", "runtime": "process",
    "state": "running", "ports": {}, "gpus": [],
}  # fmt: skip


def test_rows_with_missing_or_unknown_fields_are_read() -> None:
    assert Container.from_wire(ROW).checkpoint_age_s is None
    assert Container.from_wire(ROW | {"checkpoint_age_s": None}).checkpoint_age_s is None
    assert Container.from_wire(ROW | {"checkpoint_age_s": 1.5, "of_a_later_agent": 1}).checkpoint_age_s == 1.5


@pytest.mark.parametrize("word", ["checkpoint_age_s", "progress", "progress_age_s"])
@pytest.mark.parametrize("odd", ["soon", True, [1], float("nan"), float("inf")])
def test_values_other_than_numbers_are_refused(word: str, odd: object) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        Container.from_wire(ROW | {word: odd})
