"""A submitted job runs to its end through real workers, the real agent and real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import JobState
from portal.models import Job, UsageInterval
from portal.selectors.jobs.logs.lines import log_file, read_lines
from portal.services.lifecycle import job_control
from tests import factories
from tests.engine_harness import EngineHarness, containers_alive, engine_harness, held_milli, wait_for

pytestmark = [pytest.mark.heavy, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def harness(settings):
    with engine_harness() as each:
        settings.LOG_DIR = Path(each.folder) / "logs"
        yield each


@pytest.fixture
def dataset(harness):
    owner = factories.user("ada")
    node = harness.create_node()
    harness.start_worker()
    wait_for("the node is ready", lambda: (node.refresh_from_db() or node.state) == "ready", 30)
    return {
        "node": node,
        "owner": owner,
        "project": factories.project(member=owner),
        "environment": factories.environment(runtime="process", tool=False),
    }


def submit(dataset, *command: str, **fields) -> Job:
    return factories.job(
        dataset["owner"],
        dataset["project"],
        dataset["environment"],
        command=list(command),
        memory_mib=64,
        **fields,
    )


def state_of(job: Job) -> str:
    job.refresh_from_db()
    return job.state


def test_jobs_run_and_end_with_the_status_of_their_commands(harness: EngineHarness, dataset) -> None:
    good = submit(
        dataset, "sh", "-c", "echo hello from $FAIRWAY_JOB; echo $CUDA_VISIBLE_DEVICES", gpus_per_task=2
    )
    wait_for("the job completes", lambda: state_of(good) == JobState.COMPLETED)
    assert good.exit_code == 0
    gpus = set(dataset["node"].gpus.values_list("uuid", flat=True))
    attempt = good.attempts.get()
    wait_for("the log is here", lambda: attempt.task_rows.get().log_complete)
    lines = [line.text for line in read_lines(log_file(good.public_id, 1, 0)).lines]
    assert lines[0] == f"hello from {good.public_id}"
    assert set(lines[1].split(",")) <= gpus and len(lines[1].split(",")) == 2

    bad = submit(dataset, "sh", "-c", "exit 3")
    wait_for("the job fails", lambda: state_of(bad) == JobState.FAILED)
    assert (bad.exit_code, bad.reason) == (3, EndReason.EXIT_CODE)
    assert bad.message == "The command ended with exit code 3."

    long = submit(dataset, "sleep", "600")
    wait_for("it runs", lambda: long.attempts.filter(state="RUNNING").exists())
    assert held_milli() == 1000
    job_control.cancel_job(long.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    wait_for("it is cancelled", lambda: state_of(long) == JobState.CANCELLED)
    assert containers_alive(harness.folder) == []
    assert held_milli() == 0
    assert not UsageInterval.objects.filter(ended_at__isnull=True).exists()

    timed = submit(dataset, "sleep", "600", time_limit_s=1)
    wait_for("its time is over", lambda: state_of(timed) == JobState.TIMEOUT)
    wait_for("nothing is left on the node", lambda: not list(harness.folder.glob("local/state/tasks/fw-*")))
