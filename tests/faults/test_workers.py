"""Whole workers die, stop and lose their broker: another goes on, and nothing starts twice."""

from __future__ import annotations

import datetime as dt
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import redis
from django.conf import settings as django_settings
from django.db import connections
from django.utils import timezone

from portal.config.celery import app
from portal.domain.states import JobState
from portal.models import Attempt, BulkOperation, Job, Lease, Node, OutboxMessage
from portal.services.jobs.bulk import start_bulk
from portal.services.jobs.submission import do_cancel_job
from portal.standalone.servers.binaries import find_valkey
from scheduler import leases
from tests import factories
from tests.engine_harness import EngineHarness, containers_alive, engine_harness, held_milli, wait_for
from tests.faults.counted_job import submit
from tests.time_budget import budget_s

pytestmark = [pytest.mark.heavy, pytest.mark.early, pytest.mark.django_db(transaction=True)]

TAKEOVER_WITHIN_S = 15.0
HEALED_WITHIN_S = 60.0


@pytest.fixture
def harness(settings):
    with engine_harness() as each:
        settings.LOG_DIR = Path(each.folder) / "logs"
        yield each


@pytest.fixture
def dataset(harness: EngineHarness):
    owner = factories.user("ada")
    return {
        "node": harness.mark_enrolled(harness.create_node()),
        "owner": owner,
        "project": factories.project(member=owner),
        "environment": factories.environment(runtime="process", tool=False),
    }


def all_are(jobs: list[Job], state: JobState):
    return lambda: Job.objects.filter(pk__in=[job.pk for job in jobs], state=state).count() == len(jobs)


def starts(harness: EngineHarness) -> list[str]:
    return [
        line for path in harness.folder.glob("*/homes/*/starts") for line in path.read_text().splitlines()
    ]


def test_repeated_messages_start_nothing_twice(harness: EngineHarness, dataset) -> None:
    harness.start_worker()
    jobs = [submit(dataset, 0.05) for _ in range(12)]
    for _ in range(100):
        app.send_task("scheduler.cycle", args=["again"], queue="cycle")
        app.send_task("scheduler.notify_node", args=[dataset["node"].public_id, "start", ""], queue="nodes")
    wait_for("all end", all_are(jobs, JobState.COMPLETED), 60)
    assert sorted(starts(harness)) == sorted(f"{job.public_id} 1" for job in jobs)
    assert Attempt.objects.count() == len(jobs)
    assert held_milli() == 0


def test_an_emptied_broker_loses_no_job(harness: EngineHarness, dataset) -> None:
    """Hints are lost before anybody read them and again while work runs; rows and periods bring it all back."""
    store = redis.Redis.from_url(django_settings.REDIS_URL)
    jobs = [submit(dataset) for _ in range(3)]
    store.flushdb()
    harness.start_worker()
    wait_for("the first run", lambda: Job.objects.filter(state=JobState.COMPLETED).exists(), 30)
    jobs += [submit(dataset) for _ in range(3)]
    store.flushdb()
    began_s = time.monotonic()
    wait_for("all end", all_are(jobs, JobState.COMPLETED), 30)
    assert time.monotonic() - began_s < budget_s(30)
    assert len(starts(harness)) == len(set(starts(harness))) == len(jobs)


def test_a_broker_that_is_down_at_submit_leaves_the_hint_in_the_outbox(
    harness: EngineHarness, dataset
) -> None:
    connections.close_all()
    child = os.fork()
    if child == 0:  # a web process whose broker does not answer
        app.conf.broker_url = "redis://127.0.0.1:1/0"
        app._pool = app.amqp._producer_pool = None
        began_s = time.monotonic()
        submit(dataset)
        os._exit(0 if time.monotonic() - began_s < budget_s(3) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert OutboxMessage.objects.filter(name="scheduler.cycle", sent_at__isnull=True).exists()
    harness.start_worker()
    wait_for("it runs all the same", all_are([Job.objects.get()], JobState.COMPLETED), 30)
    wait_for("the hint went out", lambda: not OutboxMessage.objects.filter(sent_at__isnull=True).exists(), 10)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("cycle.decided", "stepping down"),
        ("commit.in_transaction", "idle-in-transaction timeout"),  # PostgreSQL ended it, and so its locks
    ],
)
def test_a_stopped_leader_is_replaced_and_starts_nothing_more(
    harness: EngineHarness, dataset, where: str, says: str
) -> None:
    harness.start_worker("nodes")
    wait_for("the node answers", lambda: Node.objects.filter(reachable=True).exists(), 30)
    job = submit(dataset, 600)
    old = harness.start_worker("cycle", beat=False, FAIRWAY_STOP_AT=where)
    wait_for("the leader stands still", lambda: _state(old.pid) == "T", 60)
    epoch = Lease.objects.get(name=leases.LEADER).epoch
    began_s = time.monotonic()
    harness.start_worker("cycle", beat=False)
    wait_for("another starts the job", all_are([job], JobState.RUNNING), 30)
    assert time.monotonic() - began_s < budget_s(TAKEOVER_WITHIN_S)
    assert Lease.objects.get(name=leases.LEADER).epoch > epoch
    os.kill(old.pid, signal.SIGCONT)
    wait_for("the old one gives up", lambda: says in harness.log(), 10)
    assert harness.log().count(says) == 1
    wait_for("it runs", lambda: len(containers_alive(harness.folder)) == 1, 20)
    wait_for("it has begun once", lambda: starts(harness) == [f"{job.public_id} 1"], 10)
    assert Attempt.objects.count() == 1


def test_an_unresponsive_valkey_does_not_block_recording(harness: EngineHarness, dataset) -> None:
    """The end of a job is news: who has written it down goes on although nobody takes the news."""
    valkey, address = _own_valkey(harness)
    harness.start_worker(REDIS_URL=address)
    jobs = [submit(dataset, seconds) for seconds in (4, 6)]
    wait_for("both run", all_are(jobs, JobState.RUNNING), 30)
    os.kill(valkey, signal.SIGSTOP)
    wait_for("both ends are written down", all_are(jobs, JobState.COMPLETED), 20)
    assert _state(valkey) == "T"
    assert held_milli() == 0


def test_a_killed_worker_leaves_jobs_running_and_another_takes_over(harness: EngineHarness, dataset) -> None:
    first = harness.start_worker()
    long = submit(dataset, 600)
    wait_for("it runs", lambda: Attempt.objects.filter(job=long, state="RUNNING").exists(), 30)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    short = submit(dataset)
    began_s = time.monotonic()
    harness.start_worker()
    wait_for("the next job ends", all_are([short], JobState.COMPLETED), HEALED_WITHIN_S)
    assert time.monotonic() - began_s < budget_s(HEALED_WITHIN_S)
    assert len(containers_alive(harness.folder)) == 1, "the job that ran was not disturbed"
    assert sorted(starts(harness)) == sorted([f"{long.public_id} 1", f"{short.public_id} 1"])


def _own_valkey(harness: EngineHarness) -> tuple[int, str]:
    """A server that can be stopped without others missing it: its process and address."""
    socket = harness.folder / "valkey.sock"
    words = [str(find_valkey().program), "--port", "0", "--unixsocket", str(socket), "--save", ""]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    harness.processes.append(process)
    wait_for("Valkey listens", socket.exists, 10)
    return process.pid, f"unix://{socket}?db=0"


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_killed_worker_leaves_the_rest_of_an_action_on_many_jobs_to_another(harness, dataset) -> None:
    """Requeued ended jobs are new jobs: one that is processed twice, or not at all, changes their number."""
    jobs = [submit(dataset, 0.05) for _ in range(120)]
    for job in jobs:
        do_cancel_job(dataset["owner"], job)
    act = start_bulk(dataset["owner"], jobs, "requeue")
    BulkOperation.objects.filter(pk=act.pk).update(created_at=timezone.now() - dt.timedelta(minutes=1))
    first = harness.start_worker("ask,nodes")

    def done() -> int:
        return len(BulkOperation.objects.get(pk=act.pk).results)

    wait_for("some are processed", done, 60)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert done() < len(jobs), "the worker was killed too late"
    assert Job.objects.count() == len(jobs) + done()
    harness.start_worker("ask,nodes")
    wait_for("all are processed", lambda: BulkOperation.objects.get(pk=act.pk).finished_at, 60)
    assert {refusal for _, refusal in BulkOperation.objects.get(pk=act.pk).results.values()} == {""}
    assert Job.objects.count() == 2 * len(jobs)
