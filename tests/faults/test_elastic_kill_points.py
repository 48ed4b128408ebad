"""kill -9 at named points while an elastic job grows and gives back: each number once, and a record that heals."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from portal.domain.jobs.reasons import EndReason
from portal.models import Attempt, Job, UsageInterval
from portal.services.lifecycle import job_control
from portal.services.lifecycle.elastic import TaskEviction, request_task_evictions
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, containers_alive, held_milli
from tests.failpoint_crash import crashes_at

pytestmark = pytest.mark.django_db(transaction=True)

GROW = [
    "commit.in_transaction",
    "commit.before_commit",
    "commit.done",
    "start.before_mark",
    "start.marked",
    "start.before_send",
    "start.answered",
    "start.recorded",
]
LEAVE = ["evict.before_send", "evict.answered", "end.before_record", "end.recorded", "evict.recorded"]
SHORT = {"start.before_send", "evict.before_send"}
"""The moments that are tried in each run; all of them in the long one."""
WITHIN_S = 25.0
SAYS = 'echo "$FAIRWAY_JOB $FAIRWAY_ATTEMPT $FAIRWAY_TASK" >> ~/starts; exec sleep 600'


def each_of(points: list[str]) -> list[Any]:
    return [pytest.param(point, marks=() if point in SHORT else pytest.mark.long) for point in points]


@pytest.fixture
def dataset(harness: EngineHarness, request):
    owner = factories.user("ada")
    return {
        "node": harness.mark_enrolled(
            harness.create_node(name=f"k{abs(hash(request.node.name)) % 10**9}", gpus=3), gpus=3
        ),
        "owner": owner,
        "project": factories.project(member=owner),
        "environment": factories.environment(runtime="process", tool=False),
    }


def submit(dataset, *, says: str = SAYS, **fields) -> Job:
    fields = {"memory_mib": 64, "termination_grace_s": 1, "cpu_milli": 100, **fields}
    return factories.job(
        dataset["owner"], dataset["project"], dataset["environment"], command=["sh", "-c", says], **fields
    )


def reach(harness: EngineHarness, job: Job, look) -> None:
    assert InProcessEngine().run_until(look, WITHIN_S), "\n".join(
        f"{event.kind} {event.reason} {event.message}" for event in job.events.all()
    )


def runs(harness: EngineHarness, dataset, job: Job, *ranks: int):
    """Exactly these tasks run, by the record and on the node; no number ever began twice."""

    def look() -> bool:
        begun = [line for path in glob.glob(f"{harness.folder}/*/homes/*/starts") for line in lines(path)]
        assert len(begun) == len(set(begun)), begun
        rows = job.attempts.get().task_rows.filter(container_removed=False) if job.attempts.exists() else []
        alive = [
            name for name in containers_alive(harness.folder / dataset["node"].name) if job.public_id in name
        ]
        return (
            sorted(row.rank for row in rows) == list(ranks)
            and all(row.state == "RUNNING" for row in rows)
            and len(alive) == len(ranks)
        )

    return look


def lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def check_the_end(harness: EngineHarness, job: Job) -> None:
    """Once it is cancelled nothing of it is held or alive."""
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    reach(harness, job, lambda: Job.objects.get(pk=job.pk).state == "CANCELLED")
    assert held_milli() == 0
    assert not UsageInterval.objects.filter(ended_at__isnull=True).exists()
    assert not [name for name in containers_alive(harness.folder) if job.public_id in name]


def leases_run_out() -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE portal_lease SET expires_at = clock_timestamp() - interval '1 s'")


@pytest.mark.parametrize("point", each_of(GROW))
def test_killed_while_a_job_grows(harness: EngineHarness, dataset, point: str) -> None:
    other = submit(dataset, says="exec sleep 600", gpus_per_task=2)
    reach(harness, other, runs(harness, dataset, other, 0))
    job = submit(dataset, tasks=3, min_tasks=1)
    reach(harness, job, runs(harness, dataset, job, 0))
    job_control.cancel_job(other.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    reach_all = runs(harness, dataset, job, 0, 1, 2)
    assert crashes_at(point, lambda: InProcessEngine().run_until(reach_all, WITHIN_S)), "never came by"
    leases_run_out()
    reach(harness, job, reach_all)
    assert job.attempts.count() == 1
    check_the_end(harness, job)


@pytest.mark.parametrize("point", each_of(LEAVE))
def test_killed_while_a_task_is_evicted(harness: EngineHarness, dataset, point: str) -> None:
    job = submit(dataset, tasks=3, min_tasks=1)
    reach(harness, job, runs(harness, dataset, job, 0, 1, 2))
    job_control.set_job_held(job.pk, True, actor="ada")  # it is not to grow again at once
    attempt = Attempt.objects.get(job=job)
    assert request_task_evictions([TaskEviction(attempt.pk, frozenset({2}), EndReason.PREEMPTED)]) == []
    less = runs(harness, dataset, job, 0, 1)
    # a killed process may have written down all that there was to write: it goes on for one look more
    assert crashes_at(point, lambda: InProcessEngine().run_until(lambda: less() and False, WITHIN_S)), (
        "never came by"
    )
    leases_run_out()
    reach(harness, job, less)
    task = attempt.task_rows.get(rank=2)
    assert (task.state, task.container_removed, job.attempts.count()) == ("PREEMPTED", True, 1)
    check_the_end(harness, job)
