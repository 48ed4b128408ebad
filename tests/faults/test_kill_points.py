"""kill -9 at every named point of submission, start, stop and end: at most one container, and a consistent database.

The process that dies is a child of the test with the real engine in it; the one that heals is the test's own.
Leases of the dead are made to run out at once: waiting for them is tested in test_workers.py.
"""

from __future__ import annotations

import glob
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import connection

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import TERMINAL_JOB_STATES, JobState
from portal.models import Attempt, Job, UsageInterval
from portal.services.lifecycle import job_control
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, containers_alive, engine_harness, held_milli
from tests.failpoint_crash import crashes_at
from tests.faults.counted_job import submit
from tests.time_budget import budget_s

pytestmark = pytest.mark.django_db(transaction=True)

SUBMIT = ["hint.before_send", "hint.sent"]
START = [
    "cycle.snapshot_taken",
    "cycle.decided",
    "commit.in_transaction",
    "commit.before_commit",
    "commit.done",
    "cycle.committed",
    "hello.recorded",
    "start.before_mark",
    "start.marked",
    "start.before_send",
    "start.answered",
    "start.recorded",
    "reconcile.done",
]
END = ["end.before_record", "end.recorded", "remove.before_send", "remove.answered"]
STOP = ["stop.before_send", "stop.answered", "end.before_record", "end.recorded", "remove.before_send"]

HEALED_WITHIN_S = 20.0


@pytest.fixture(scope="module")
def folder_and_room():
    with engine_harness() as harness:
        yield harness


@pytest.fixture
def harness(folder_and_room, settings, request):
    harness = folder_and_room
    settings.DATA_DIR = harness.folder
    settings.LOG_DIR = Path(harness.folder) / "logs"
    return harness


@pytest.fixture
def dataset(harness: EngineHarness, request):
    owner = factories.user("ada")
    return {
        "node": harness.mark_enrolled(harness.create_node(name=f"n{abs(hash(request.node.name)) % 10**9}")),
        "owner": owner,
        "project": factories.project(member=owner),
        "environment": factories.environment(runtime="process", tool=False),
    }


def leases_run_out() -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE portal_lease SET expires_at = clock_timestamp() - interval '1 s'")


def ended(job: Job) -> bool:
    job.refresh_from_db()
    return JobState(job.state) in TERMINAL_JOB_STATES


def starts_of(harness: EngineHarness, job: Job) -> list[str]:
    """Attempts of the job that really began to run, one line for each time they did."""
    lines: list[str] = []
    for path in map(Path, glob.glob(f"{harness.folder}/*/homes/*/starts")):
        lines += [line.split()[1] for line in path.read_text().splitlines() if line.startswith(job.public_id)]
    return lines


def healed(harness: EngineHarness, dataset, job: Job) -> Callable[[], bool]:
    """Ended, nothing held, nothing alive, nothing left on the node; at no time two containers of the job."""
    node_folder = harness.folder / dataset["node"].name

    def look() -> bool:
        alive = [name for name in containers_alive(harness.folder) if job.public_id in name]
        assert len(alive) <= 1, alive
        left = glob.glob(f"{node_folder}/state/tasks/fw-*")
        return ended(job) and held_milli() == 0 and not alive and not left

    return look


def check_the_books(harness: EngineHarness, job: Job) -> None:
    starts = starts_of(harness, job)
    assert len(starts) == len(set(starts)), f"an attempt began twice: {starts}"
    assert not UsageInterval.objects.filter(ended_at__isnull=True).exists()
    for attempt in Attempt.objects.filter(job=job):
        assert attempt.ended_at is not None and attempt.reason


@pytest.mark.parametrize("point", SUBMIT)
def test_killed_while_submitting(harness: EngineHarness, dataset, point: str) -> None:
    assert crashes_at(point, lambda: submit(dataset, 0.1))
    job = Job.objects.get()  # the transaction was over: the job is there although nobody was told
    assert InProcessEngine().run_until(healed(harness, dataset, job), HEALED_WITHIN_S)
    job.refresh_from_db()
    assert job.state == JobState.COMPLETED
    assert starts_of(harness, job) == ["1"]
    check_the_books(harness, job)


@pytest.mark.parametrize("point", START + END)
def test_killed_while_starting_or_ending(harness: EngineHarness, dataset, point: str) -> None:
    job = submit(dataset, 0.4)
    assert crashes_at(
        point, lambda: InProcessEngine().run_until(healed(harness, dataset, job), HEALED_WITHIN_S)
    ), "never came by"
    leases_run_out()
    began_s = time.monotonic()
    assert InProcessEngine().run_until(healed(harness, dataset, job), HEALED_WITHIN_S), room_story(job)
    job.refresh_from_db()
    assert job.state == JobState.COMPLETED, room_story(job)
    assert starts_of(harness, job) == ["1"], "a dead portal must not disturb what runs"
    check_the_books(harness, job)
    assert time.monotonic() - began_s < budget_s(HEALED_WITHIN_S)


@pytest.mark.parametrize("point", STOP)
def test_killed_while_stopping(harness: EngineHarness, dataset, point: str) -> None:
    job = submit(dataset, 600)
    assert InProcessEngine().run_until(lambda: bool(containers_alive(harness.folder)), HEALED_WITHIN_S)
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    assert crashes_at(
        point, lambda: InProcessEngine().run_until(healed(harness, dataset, job), HEALED_WITHIN_S)
    ), "never came by"
    leases_run_out()
    assert InProcessEngine().run_until(healed(harness, dataset, job), HEALED_WITHIN_S), room_story(job)
    job.refresh_from_db()
    assert job.state == JobState.CANCELLED
    assert starts_of(harness, job) == ["1"]
    check_the_books(harness, job)


@pytest.mark.parametrize("point", ["start.marked", "start.before_send", "start.answered"])
def test_cancelled_after_a_death_while_starting(harness: EngineHarness, dataset, point: str) -> None:
    """The start may or may not have arrived; a cancel now must end it either way, and it never runs later."""
    job = submit(dataset, 600)
    assert crashes_at(
        point, lambda: InProcessEngine().run_until(healed(harness, dataset, job), HEALED_WITHIN_S)
    )
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    leases_run_out()
    assert InProcessEngine().run_until(healed(harness, dataset, job), HEALED_WITHIN_S), room_story(job)
    job.refresh_from_db()
    assert job.state == JobState.CANCELLED
    assert len(starts_of(harness, job)) <= 1
    check_the_books(harness, job)


def room_story(job: Job) -> str:
    """What happened to the job, for the reader of a failed test."""
    return "\n".join(
        f"{event.at:%H:%M:%S.%f} {event.kind} {event.before}>{event.after} {event.reason} {event.message}"
        for event in job.events.all()
    )
