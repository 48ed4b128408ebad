"""A node where everything fails beside one where all is well, with real agents: put aside, tried, trusted again."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.utils import timezone

from portal.models import Attempt, Job, Membership, Node
from portal.words.states import NodeState
from tests import record
from tests.engine_room import Engine, containers_alive, engine_room, held_milli

pytestmark = pytest.mark.django_db(transaction=True)

FAILS_ON_BAD = 'case "$HOME" in */bad/*) exit 3;; esac; sleep 0.2'
WELL = "sleep 0.5"


@pytest.fixture
def room(settings):
    with engine_room() as made:
        settings.DATA_DIR = made.folder
        settings.LOG_DIR = Path(made.folder) / "logs"
        yield made


def test_a_node_where_jobs_fail_is_put_aside_then_tried_with_one_job_and_trusted(room) -> None:
    owners = [record.person(name) for name in ("ada", "ben")]
    project = record.project(member=owners[0])
    Membership.objects.create(project=project, user=owners[1], role="member")
    environment, pool, engine = record.environment(runtime="process", tool=False), record.pool(), Engine()
    bad, good = (room.known(room.node(pool=pool, name=name)) for name in ("bad", "good"))

    def submit(number: int, script: str) -> Job:
        return record.job(
            owners[number % 2], project, environment, command=["sh", "-c", script], memory_mib=64
        )

    def only(node: Node) -> None:
        Node.objects.exclude(pk=node.pk).update(state=NodeState.CORDONED.value)
        Node.objects.filter(pk=node.pk).update(state=NodeState.READY.value)

    def reach(look) -> None:
        assert engine.run_until(look, 40)

    def trust_of(node: Node) -> str:
        return Node.objects.values_list("trust", flat=True).get(pk=node.pk)

    only(bad)
    for number in range(3):
        submit(number, FAILS_ON_BAD)
    reach(lambda: trust_of(bad) == "aside")
    assert Node.objects.get(pk=bad.pk).trust_cause == "failed_soon"

    Node.objects.update(state=NodeState.READY.value)
    jobs = [submit(number, FAILS_ON_BAD) for number in range(4)]
    reach(lambda: all(Job.objects.get(pk=job.pk).state == "COMPLETED" for job in jobs))
    assert set(Attempt.objects.filter(job__in=jobs).values_list("task_rows__node", flat=True)) == {good.pk}

    only(bad)
    Node.objects.filter(pk=bad.pk).update(try_at=timezone.now())
    tried = [submit(number, WELL) for number in range(3)]
    reach(lambda: all(Job.objects.get(pk=job.pk).state == "COMPLETED" for job in tried))
    first, second, third = Attempt.objects.filter(job__in=tried).order_by("created_at", "pk")
    assert first.ended_at <= second.created_at, "it was tried with one job alone"
    assert third.created_at < second.ended_at, "then it took them side by side"
    assert trust_of(bad) == "trusted"
    assert held_milli() == 0 and containers_alive(room.folder) == []
