"""A node where everything fails beside one where all is well, with real agents: put aside, tried, trusted again."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import NodeState
from portal.models import Attempt, Job, Membership, Node
from portal.selectors.cluster.cluster_map import clock_skew_message
from portal.selectors.cluster.metrics import collect_metrics
from portal.services.lifecycle import job_control
from scheduler.nodes import dispatch
from tests import factories
from tests.engine_harness import InProcessEngine, containers_alive, engine_harness, held_milli
from tests.unkillable_process import missing_freezer, unkillable

pytestmark = pytest.mark.django_db(transaction=True)

FAILS_ON_BAD = 'case "$HOME" in */bad/*) exit 3;; esac; sleep 0.2'
WELL = "sleep 0.5"


@pytest.fixture
def harness(settings):
    with engine_harness() as made:
        settings.DATA_DIR = made.folder
        settings.LOG_DIR = Path(made.folder) / "logs"
        yield made


def test_a_node_where_jobs_fail_is_put_aside_then_tried_with_one_job_and_trusted(harness) -> None:
    owners = [factories.user(name) for name in ("ada", "ben")]
    project = factories.project(member=owners[0])
    Membership.objects.create(project=project, user=owners[1], role="member")
    environment, pool, engine = (
        factories.environment(runtime="process", tool=False),
        factories.pool(),
        InProcessEngine(),
    )
    bad, good = (harness.mark_enrolled(harness.create_node(pool=pool, name=name)) for name in ("bad", "good"))

    def submit(number: int, script: str) -> Job:
        return factories.job(
            owners[number % 2], project, environment, command=["sh", "-c", script], memory_mib=64
        )

    def only(node: Node) -> None:
        Node.objects.exclude(pk=node.pk).update(state=NodeState.CORDONED.value)
        Node.objects.filter(pk=node.pk).update(state=NodeState.READY.value)

    def reach(look) -> None:
        assert engine.run_until(look, 40)

    def trust_of(node: Node) -> str:
        return Node.objects.values_list("breaker_state", flat=True).get(pk=node.pk)

    only(bad)
    for number in range(3):
        submit(number, FAILS_ON_BAD)
    reach(lambda: trust_of(bad) == "quarantined")
    assert Node.objects.get(pk=bad.pk).breaker_cause == "early_failures"

    Node.objects.update(state=NodeState.READY.value)
    jobs = [submit(number, FAILS_ON_BAD) for number in range(4)]
    reach(lambda: all(Job.objects.get(pk=job.pk).state == "COMPLETED" for job in jobs))
    assert set(Attempt.objects.filter(job__in=jobs).values_list("task_rows__node", flat=True)) == {good.pk}

    only(bad)
    Node.objects.filter(pk=bad.pk).update(probe_at=timezone.now())
    tried = [submit(number, WELL) for number in range(3)]
    reach(lambda: all(Job.objects.get(pk=job.pk).state == "COMPLETED" for job in tried))
    first, second, third = Attempt.objects.filter(job__in=tried).order_by("created_at", "pk")
    assert first.ended_at <= second.created_at, "it was tried with one job alone"
    assert third.created_at < second.ended_at, "then it took them side by side"
    assert trust_of(bad) == "healthy"
    assert held_milli() == 0 and containers_alive(harness.folder) == []


def pid_of(harness, job: Job) -> int:
    (path,) = harness.folder.glob(f"*/state/tasks/*-{job.public_id}-*/pid.json")
    return int(json.loads(path.read_text())["pid"])


@pytest.mark.long
@pytest.mark.skipif(missing_freezer() is not None, reason=missing_freezer() or "")
def test_a_task_that_cannot_be_killed_holds_its_gpu_and_blocks_nothing_else(harness, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "STUCK_AFTER_KILL_S", 1.0)
    owner, engine = factories.user("ada"), InProcessEngine()
    project, environment = (
        factories.project(member=owner),
        factories.environment(runtime="process", tool=False),
    )
    node = harness.mark_enrolled(harness.create_node(name="alone"))

    def submit(script: str) -> Job:
        words = {
            "command": ["sh", "-c", script],
            "cpu_milli": 100,
            "memory_mib": 64,
            "termination_grace_s": 1,
        }
        return factories.job(owner, project, environment, **words)

    def reach(look) -> None:
        assert engine.run_until(look, 40), list(
            Node.objects.values("breaker_state", "breaker_cause", "status_message")
        )

    def trust_of() -> tuple[str, str]:
        node.refresh_from_db()
        return node.breaker_state, node.breaker_cause

    jobs = [submit("sleep 600") for _ in range(3)]
    reach(lambda: Attempt.objects.filter(state="RUNNING").count() == 3)
    stuck, other, third = jobs
    with unkillable(pid_of(harness, stuck)):
        job_control.cancel_job(stuck.pk, EndReason.CANCELLED_BY_USER, actor="ada")
        reach(lambda: trust_of() == ("quarantined", "stuck"))
        job_control.cancel_job(other.pk, EndReason.CANCELLED_BY_USER, actor="ada")
        reach(lambda: Job.objects.get(pk=other.pk).state == "CANCELLED")
        late = submit("true")
        reach(lambda: hasattr(Job.objects.get(pk=late.pk), "verdict"))
        stuck.refresh_from_db()
        assert (stuck.state, stuck.attempts.get().state) == ("RUNNING", "COMPLETING")
        assert held_milli() == 2000, "the stuck one and the third hold theirs"
        assert "alone cannot end it. It holds its GPUs" in stuck.attempts.get().task_rows.get().status_message
        assert node.reachable and not node.incidents.exclude(kind="stuck").exists()
    reach(lambda: Job.objects.get(pk=stuck.pk).state == "CANCELLED")
    reach(lambda: Job.objects.get(pk=late.pk).state == "COMPLETED" and trust_of()[0] == "healthy")
    job_control.cancel_job(third.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    reach(lambda: held_milli() == 0 and containers_alive(harness.folder) == [])


@pytest.mark.long
def test_a_wrong_clock_is_reported_and_blocks_nothing(harness, monkeypatch) -> None:
    owner, engine, real = factories.user("ada"), InProcessEngine(), time.time
    project, environment = (
        factories.project(member=owner),
        factories.environment(runtime="process", tool=False),
    )
    node = harness.mark_enrolled(harness.create_node(name="slow"))
    job = factories.job(
        owner, project, environment, command=["sleep", "600"], memory_mib=64, termination_grace_s=1
    )
    assert engine.run_until(lambda: job.attempts.filter(state="RUNNING").exists(), 40)
    monkeypatch.setattr(time, "time", lambda: real() + 300.0)  # this process is the worker

    def reported() -> bool:
        node.refresh_from_db()
        return (node.clock_skew_s or 0.0) < -299.0

    assert engine.run_until(reported, 40)
    assert clock_skew_message(node) == "Its clock is 300.0 s behind ours."
    assert collect_metrics().clock_skewed_nodes == 1
    assert containers_alive(harness.folder) and job.attempts.get().state == "RUNNING"
    monkeypatch.undo()
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    assert engine.run_until(lambda: held_milli() == 0 and not reported(), 40)
    assert clock_skew_message(node) == ""
