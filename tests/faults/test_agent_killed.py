"""kill -9 of the agent at swept moments of a start and of a stop: a new one goes on from its ledger."""

from __future__ import annotations

import glob
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import JobState
from portal.models import Attempt, Job
from portal.services.lifecycle import job_control
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, containers_alive, held_milli

pytestmark = pytest.mark.django_db(transaction=True)

MOMENTS_MS = [
    *(0, 20, 60),
    *(pytest.param(moment, marks=pytest.mark.long) for moment in (5, 10, 35, 100, 160, 250)),
]


@pytest.fixture
def dataset(harness: EngineHarness, request):
    owner = factories.user("ada")
    name = f"n{abs(hash(request.node.name)) % 10**9}"
    return {
        "killed": [],
        "harness": harness,
        "node": harness.mark_enrolled(harness.create_node(name=name)),
        "owner": owner,
        "project": factories.project(member=owner),
        "environment": factories.environment(runtime="process", tool=False),
    }


def agents_of(dataset) -> list[int]:
    """Process ids of the agents that serve this scene's node: children of this process."""
    settings_file = f"{dataset['node'].public_id}.json"
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = Path(path).read_bytes().split(b"\0")
            parent = int(Path(path).with_name("stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        if parent == os.getpid() and any(word.endswith(settings_file.encode()) for word in words):
            found.append(int(path.split("/")[2]))
    return found


def kill_once_when(happened, dataset, after_ms: float) -> threading.Thread:
    """Kills the agent ``after_ms`` after something happened, from a thread."""

    def run() -> None:
        deadline_s = time.monotonic() + 20
        while not happened() and time.monotonic() < deadline_s:
            time.sleep(0.001)
        time.sleep(after_ms / 1000)
        for pid in agents_of(dataset):
            os.kill(pid, signal.SIGKILL)
            dataset["killed"].append(pid)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def submit(dataset, seconds: float) -> Job:
    script = f'echo "$FAIRWAY_JOB $FAIRWAY_ATTEMPT" >> "$HOME/starts"; sleep {seconds}'
    words = ["sh", "-c", script]
    return factories.job(
        dataset["owner"],
        dataset["project"],
        dataset["environment"],
        command=words,
        memory_mib=64,
        termination_grace_s=1,
    )


def begun(dataset) -> list[str]:
    pattern = f"{dataset['harness'].folder}/homes/*/starts"
    own = f"{dataset['harness'].folder}/{dataset['node'].name}/homes/*/starts"
    return [
        line for path in glob.glob(own) + glob.glob(pattern) for line in Path(path).read_text().splitlines()
    ]


def ledger_knows(dataset, job: Job) -> bool:
    try:
        ledger = json.loads(
            (dataset["harness"].folder / dataset["node"].name / "state/ledger.json").read_text()
        )
    except (OSError, ValueError):
        return False
    return any(task["job"] == job.public_id for task in ledger["tasks"].values())


def quiet(dataset, job: Job):
    def look() -> bool:
        alive = [name for name in containers_alive(dataset["harness"].folder) if job.public_id in name]
        assert len(alive) <= 1, alive
        job.refresh_from_db()
        left = glob.glob(f"{dataset['harness'].folder}/{dataset['node'].name}/state/tasks/fw-*")
        return job.ended_at is not None and held_milli() == 0 and not alive and not left

    return look


@pytest.mark.parametrize("after_ms", MOMENTS_MS)
def test_killed_during_a_start(dataset, after_ms: int) -> None:
    job = submit(dataset, 0.3)
    killer = kill_once_when(lambda: ledger_knows(dataset, job), dataset, after_ms)
    assert InProcessEngine().run_until(quiet(dataset, job), 40)
    killer.join(20)
    assert dataset["killed"], "the agent was not there to be killed"
    starts = begun(dataset)
    assert len(starts) == len(set(starts))
    assert job.state == JobState.COMPLETED
    assert Attempt.objects.filter(job=job).count() == len(starts)


@pytest.mark.parametrize("after_ms", MOMENTS_MS)
def test_killed_during_a_stop(dataset, after_ms: int) -> None:
    job = submit(dataset, 600)
    engine = InProcessEngine()
    assert engine.run_until(lambda: job.attempts.filter(state="RUNNING").exists(), 40)
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")

    def stopping() -> bool:
        path = dataset["harness"].folder / dataset["node"].name / "state/ledger.json"
        try:
            jobs = json.loads(path.read_text())["jobs"]
        except (OSError, ValueError):
            return False
        return bool(jobs.get(job.public_id, {}).get("tombstones"))

    killer = kill_once_when(stopping, dataset, after_ms)
    assert engine.run_until(quiet(dataset, job), 40)
    killer.join(20)
    assert dataset["killed"], "the agent was not there to be killed"
    assert job.state == JobState.CANCELLED
    assert len(begun(dataset)) == 1
