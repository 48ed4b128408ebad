"""kill -9 at system calls of submit, plan, start, stop and comparison, by strace: nothing lost, nothing twice.

Each act is done by a child of its own, which dies on its way into one call after another. What it left is found by
the whole engine in this process, for some children at once. Every second call is taken three times.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import TERMINAL_JOB_STATES, JobState
from portal.models import Attempt, Job, Lease, Node, Task
from portal.services.lifecycle import job_control
from scheduler import leases
from scheduler.cycle import run_cycle
from scheduler.nodes import dispatch
from scheduler.nodes.engine_connect import open_engine
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.reconcile import on_connected, reconcile
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, containers_alive, held_milli
from tests.faults.counted_job import submit
from tests.faults.system_calls import calls_of, dies_at_call

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.rig,
    pytest.mark.timeout(3 * 3600),
]

GPUS = 8
HEALED_WITHIN_S = 60.0
HOLDER = "sweep"


def leases_run_out() -> None:
    """Those of the dead, and of the engine that healed: waiting for them is tested in test_workers.py."""
    Lease.objects.update(expires_at="2000-01-01T00:00Z")


class Testbed:
    """A node of eight GPUs, and acts that a child does and dies of."""

    __test__ = False

    def __init__(self, harness: EngineHarness, name: str) -> None:
        self.harness = harness
        owner = factories.user("ada")
        self.node = harness.mark_enrolled(harness.create_node(name=name, gpus=GPUS), gpus=GPUS)
        Node.objects.filter(pk=self.node.pk).update(cpu_milli=64_000)
        self.dataset = {
            "owner": owner,
            "project": factories.project(member=owner),
            "environment": factories.environment(runtime="process", tool=False),
        }
        self._own: NodeConnection | None = None
        self.door().engine.close()  # it is known from here on

    def door(self) -> NodeConnection:
        """A link of our own to the node, with the right to use it."""
        lease = leases.acquire(leases.node_lease(self.node.public_id), HOLDER, leases.NODE_TTL_S)
        assert lease is not None
        node = Node.objects.select_related("pool").get(pk=self.node.pk)
        connection = NodeConnection(open_engine(node), lease, node)
        on_connected(connection, time.time())
        return connection

    def task_of(self, job: Job) -> Task:
        (task,) = [each for each in dispatch.active_tasks(self.node) if each.attempt.job_id == job.pk]
        return task

    def starts(self) -> list[str]:
        return [
            line
            for path in self.harness.folder.glob(f"{self.node.name}/homes/*/starts")
            for line in path.read_text().splitlines()
        ]

    # -- before, and the act itself ------------------------------------------------------------------

    def placed(self, seconds: float) -> Job:
        job = submit(self.dataset, seconds)
        run_cycle("test", HOLDER)
        return job

    def running(self, seconds: float) -> Job:
        job = self.placed(seconds)
        self._own = self._own or self.door()  # one for some jobs
        dispatch.start_task(self._own, self.task_of(job), attempts_left=1)
        return job

    def before(self, act: str) -> Job | None:
        """The job with which an act begins."""
        match act:
            case "submit":
                return None
            case "plan":
                return submit(self.dataset, 0.1)
            case "start":
                return self.placed(0.1)
            case "stop":
                job = self.running(600)
                job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
                return job
        job = self.running(0.05)  # its end is news to the record
        time.sleep(0.3)
        return job

    def do(self, act: str, job: Job | None) -> None:
        """The act, as the child does it."""
        match act:
            case "submit":
                submit(self.dataset, 0.1)
            case "plan":
                run_cycle("test", HOLDER)
            case "start":
                dispatch.start_task(self.door(), self.task_of(job), attempts_left=1)  # type: ignore[arg-type]
            case "stop":
                dispatch.stop_attempt(self.door(), Attempt.objects.get(job=job))
            case _:
                reconcile(self.door())

    # -- after ---------------------------------------------------------------------------------------

    def heal(self, expected: JobState, reported: Callable[[], object]) -> None:
        """Everything ends as it should, once, and nothing is left."""
        if self._own is not None:
            self._own.engine.close()
            self._own = None
        leases_run_out()

        def look() -> bool:
            live = Job.objects.exclude(state__in=[state.value for state in TERMINAL_JOB_STATES]).exists()
            left = list(self.harness.folder.glob(f"{self.node.name}/state/tasks/fw-*"))
            return not live and held_milli() == 0 and not containers_alive(self.harness.folder) and not left

        assert InProcessEngine().run_until(look, HEALED_WITHIN_S), (
            reported(),
            list(Job.objects.values_list("state", "reason")),
        )
        starts = self.starts()
        assert len(starts) == len(set(starts)), starts
        ends = set(Job.objects.values_list("state", flat=True))
        assert ends <= {expected.value}, (ends, reported())
        assert Attempt.objects.count() == Job.objects.count(), "a dead portal disturbs nothing that runs"
        leases_run_out()


ACTS = {
    "submit": JobState.COMPLETED,
    "plan": JobState.COMPLETED,
    "start": JobState.COMPLETED,
    "stop": JobState.CANCELLED,
    "compare": JobState.COMPLETED,
}


def sweep(harness: EngineHarness, act: str, stride: int, times: int) -> tuple[int, int]:
    """Kills at each ``stride``-th call; gives how many calls the act makes and how many points were swept."""
    testbed = Testbed(harness, f"c{act}-{stride}")
    job = testbed.before(act)
    calls = calls_of(lambda: testbed.do(act, job))
    testbed.heal(ACTS[act], lambda: "before the sweep")
    points = [call for call in calls[::stride] for _ in range(times)]
    died = 0
    for first in range(0, len(points), GPUS):
        some = points[first : first + GPUS]
        for call in some:
            job = testbed.before(act)
            died += dies_at_call(call, lambda job=job: testbed.do(act, job))
        testbed.heal(ACTS[act], lambda some=some: f"{act}, killed at the calls {some}")
    return len(calls), died


@pytest.mark.rig
@pytest.mark.parametrize("act", ["plan", "start"])
def test_killed_at_a_few_system_calls(harness, act: str) -> None:
    calls, died = sweep(harness, act, stride=40, times=1)
    assert died >= calls // 60


@pytest.mark.long
@pytest.mark.parametrize("act", ACTS)
def test_killed_at_every_second_system_call_three_times(harness, capsys, act: str) -> None:
    calls, died = sweep(harness, act, stride=2, times=3)
    with capsys.disabled():
        print(f"\n{act}: {calls} system calls, killed {died} times at {-(-calls // 2)} of them")
    assert died >= calls, "more than two of three, for a call may be missing in a later run"
