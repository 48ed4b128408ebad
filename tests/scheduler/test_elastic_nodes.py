"""An elastic job on two nodes with real agents and processes: it grows, gives back, loses a task, and completes."""

from __future__ import annotations

import pytest

from agents.verbs import CAN_STOP_TASKS
from portal.domain.states import NodeState
from portal.models import Node
from portal.services.jobs.submission import do_cancel_job
from portal.services.nodes.nodes import do_set_node_state
from tests import factories
from tests.engine_harness import held_milli, wait_for
from tests.two_local_nodes import TwoLocalNodes, agents_without

pytestmark = pytest.mark.django_db(transaction=True)

LOOPS = """
echo "$FAIRWAY_TASKS of $FAIRWAY_TASKS_MIN to $FAIRWAY_TASKS_MAX" > "{folder}/told-$FAIRWAY_TASK"
while true; do
  [ -e "{folder}/end" ] && exit 0
  [ -e "{folder}/fail-$FAIRWAY_TASK" ] && exit 3
  sleep 0.1
done
"""


@pytest.fixture
def testbed(harness, request):
    return TwoLocalNodes(harness, f"e{abs(hash(request.node.name)) % 10**8}", LOOPS)


def reported(testbed: TwoLocalNodes) -> list[str]:
    """What the tasks were told of each other, each as it began."""
    return [path.read_text().strip() for path in sorted(testbed.folder.glob("told-*"))]


def test_an_elastic_job_grows_shrinks_for_another_and_completes(testbed) -> None:
    other = testbed.submit(command="sleep 600")
    testbed.reach(other, lambda: len(testbed.run(other)) == 1)
    job = testbed.submit(tasks=2, min_tasks=1)
    testbed.reach(job, lambda: set(testbed.run(job)) == {0})
    attempt = job.attempts.get()
    assert attempt.state == "RUNNING"
    do_cancel_job(testbed.owner, other)
    testbed.reach(job, lambda: set(testbed.run(job)) == {0, 1})
    assert sorted(testbed.run(job).values()) == testbed.names
    wait_for("told", lambda: reported(testbed) == ["1 of 1 to 2", "2 of 1 to 2"])

    urgent = testbed.submit("manager", command="sleep 600", priority=50)
    testbed.reach(urgent, lambda: len(testbed.run(urgent)) == 1)
    assert set(testbed.run(job)) == {0} and job.attempts.count() == 1
    assert len([name for name in testbed.alive() if job.public_id in name]) == 1

    do_cancel_job(testbed.manager, urgent)
    testbed.reach(job, lambda: set(testbed.run(job)) == {0, 2})
    (testbed.folder / "end").touch()
    testbed.reach(job, testbed.ended(job))
    assert job.attempts.count() == 1 and held_milli() == 0 and testbed.alive() == []
    assert list(job.attempts.get().task_rows.values_list("rank", "state").order_by("rank")) == [
        (0, "COMPLETED"),
        (1, "PREEMPTED"),
        (2, "COMPLETED"),
    ]
    testbed.engine.run_until(lambda: not attempt.task_rows.filter(log_complete=False).exists(), 20)
    assert not attempt.task_rows.filter(log_complete=False).exists()


def test_a_failed_task_and_a_restarted_node_do_not_affect_the_others(testbed, monkeypatch) -> None:
    monkeypatch.setattr("portal.services.lifecycle.attempt_end.backoff_s", lambda *given: 0.0)
    job = testbed.submit(tasks=2, min_tasks=1)
    testbed.reach(job, lambda: set(testbed.run(job)) == {0, 1})
    (testbed.folder / "fail-1").touch()
    testbed.reach(job, lambda: set(testbed.run(job)) == {0, 2})
    testbed.harness.reboot(testbed.run(job)[2], boot="boot-9")
    testbed.reach(job, lambda: set(testbed.run(job)) == {0, 3})
    assert job.attempts.count() == 1
    kinds = list(job.events.filter(kind="task_lost").values_list("reason", flat=True))
    assert kinds == ["exit_code", "node_rebooted"]
    (testbed.folder / "end").touch()
    testbed.reach(job, testbed.ended(job))
    assert held_milli() == 0 and testbed.alive() == []


def test_a_node_that_is_drained_loses_only_the_tasks_there(testbed) -> None:
    job = testbed.submit(tasks=2, min_tasks=1)
    testbed.reach(job, lambda: set(testbed.run(job)) == {0, 1})
    node = Node.objects.get(name=testbed.run(job)[1])
    do_set_node_state(factories.user("root", admin=True), node, NodeState.DRAINED, reason="dust")
    testbed.reach(job, lambda: set(testbed.run(job)) == {0})
    assert job.attempts.get().stop_requested_at is None
    (testbed.folder / "end").touch()
    testbed.reach(job, testbed.ended(job))


def test_an_agent_that_cannot_stop_one_task_returns_the_whole_attempt(testbed, monkeypatch) -> None:
    agents_without(monkeypatch, CAN_STOP_TASKS)
    job = testbed.submit(tasks=2, min_tasks=1)
    testbed.reach(job, lambda: set(testbed.run(job)) == {0, 1})
    urgent = testbed.submit("manager", command="sleep 600", priority=50)
    testbed.reach(urgent, lambda: len(testbed.run(urgent)) == 1)
    testbed.reach(job, lambda: job.attempts.count() == 2 and len(testbed.run(job)) == 1)
    assert job.attempts.get(number=1).state == "PREEMPTED"
