"""kill -9 at named points while a gang begins on two nodes: all of it runs, or nothing is left of it."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from django.db import connection

from portal.domain.jobs.reasons import EndReason
from portal.models import Job, Node, NodePool, Rendezvous, UsageInterval
from portal.services.lifecycle import job_control
from tests.engine_harness import InProcessEngine, held_milli
from tests.failpoint_crash import crashes_at
from tests.two_local_nodes import TwoLocalNodes

pytestmark = pytest.mark.django_db(transaction=True)

BEGIN = [
    "commit.in_transaction",
    "commit.done",
    "prepare.before_mark",
    "prepare.marked",
    "prepare.before_send",
    "prepare.answered",
    "connectivity.before_send",
    "connectivity.answered",
    "connectivity.recorded",
    "start.before_send",
    "start.answered",
    "start.recorded",
]
SHORT = {"connectivity.answered", "prepare.recorded"}
"""The moments that are tried in each run; all of them in the long one."""
SAYS = 'echo "$FAIRWAY_ATTEMPT $RANK" >> "{folder}/begun"; exec sleep 600'
WITHIN_S = 25.0


def each_of(points: list[str]) -> list[Any]:
    return [pytest.param(point, marks=() if point in SHORT else pytest.mark.long) for point in points]


@pytest.fixture
def testbed(harness, request):
    number = zlib.crc32(request.node.name.encode())
    testbed = TwoLocalNodes(harness, f"k{number % 10**8}", SAYS)
    NodePool.objects.filter(pk=testbed.pool.pk).update(allow_host_network=True)
    (testbed.folder / "begun").touch()
    (testbed.folder / "begun").chmod(0o666)
    first = 19_100 + 10 * (number % 80)
    for node in testbed.nodes:
        Node.objects.filter(pk=node.pk).update(
            settings=node.settings | {"rendezvous_ports": [first, first + 9]}
        )
    return testbed


def begun(testbed: TwoLocalNodes) -> list[str]:
    return sorted((testbed.folder / "begun").read_text().splitlines())


def leases_run_out() -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE portal_lease SET expires_at = clock_timestamp() - interval '1 s'")


def nothing_is_left(testbed: TwoLocalNodes, job: Job) -> None:
    testbed.reach(job, lambda: Job.objects.get(pk=job.pk).state == "CANCELLED")
    assert held_milli() == 0 and testbed.alive() == []
    assert not UsageInterval.objects.filter(ended_at__isnull=True).exists()
    assert not Rendezvous.objects.filter(live=True).exists()


@pytest.mark.parametrize("point", each_of(BEGIN))
def test_killed_while_a_gang_starts(testbed: TwoLocalNodes, point: str) -> None:
    job = testbed.submit(tasks=2)

    def all_run() -> bool:
        return set(testbed.run(job)) == {0, 1} and begun(testbed) == ["1 0", "1 1"]

    assert crashes_at(point, lambda: InProcessEngine().run_until(all_run, WITHIN_S)), "never came by"
    leases_run_out()
    testbed.reach(job, all_run)
    assert begun(testbed) == ["1 0", "1 1"] and job.attempts.count() == 1
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    nothing_is_left(testbed, job)


@pytest.mark.parametrize(
    "point",
    [
        *each_of(["prepare.answered", "prepare.recorded"]),
        pytest.param("connectivity.answered", marks=pytest.mark.long),
    ],
)
def test_killed_between_the_steps_and_cancelled_before_anybody_is_back(
    testbed: TwoLocalNodes, point: str
) -> None:
    job = testbed.submit(tasks=2)
    assert crashes_at(point, lambda: InProcessEngine().run_until(lambda: False, WITHIN_S)), "never came by"
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    leases_run_out()
    nothing_is_left(testbed, job)
    assert begun(testbed) == []
