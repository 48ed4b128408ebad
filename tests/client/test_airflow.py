"""The operator in a real Airflow, which is installed once per machine, against the real web application."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from portal.domain.jobs.reasons import EndReason
from portal.models import Job
from portal.services.lifecycle import job_control
from tests.cached_environment import cached_environment
from tests.client.test_client import ROOT, address, dataset, fields, run

__all__ = ["address", "dataset", "fields"]
pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.django_db(transaction=True)]
DAG = """
import json, os, signal, sys
from airflow.sdk import DAG
from fairway.airflow import FairwayOperator

mode = os.environ["MODE"]
with DAG("nightly", schedule=None) as dag:
    task = FairwayOperator(
        task_id="train", fields=json.loads(os.environ["FIELDS"]), connection="", poll_s=0.2,
        deferrable=mode == "deferrable",
    )

class Task:
    dag_id, run_id, task_id, map_index = "nightly", "manual-1", "train", -1

def stop(*_):
    task.on_kill()
    os._exit(1)

if __name__ == "__main__":
    if mode.isdigit():  # the number of the attempt
        signal.signal(signal.SIGTERM, stop)  # as Airflow does in the process of a task
        Task.try_number = int(mode)
        print("job", task.execute({"ti": Task()}), flush=True)
    else:
        state = dag.test().state
        print("state", getattr(state, "value", state), flush=True)
"""


@pytest.fixture(scope="session")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Python with Airflow and the client, and the variables of a prepared home."""
    cache = cached_environment("apache-airflow==3.3.2")
    folder = tmp_path_factory.mktemp("airflow")
    (folder / "packages").mkdir()
    (folder / "dags").mkdir()
    (folder / "packages/fairway").symlink_to(ROOT / "client")
    variables = {"AIRFLOW_HOME": str(folder), "PYTHONPATH": str(folder / "packages")}
    variables |= {"AIRFLOW__CORE__LOAD_EXAMPLES": "False", "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags")}
    env = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"} | variables
    subprocess.run([str(cache / "bin/airflow"), "db", "migrate"], env=env, check=True, capture_output=True)
    (folder / "dags/nightly.py").write_text(DAG)
    return cache / "bin/python", variables


def start(airflow: tuple[Path, dict[str, str]], fields: dict[str, Any], mode: str) -> subprocess.Popen[str]:
    """Run the DAG, or an attempt of its task alone."""
    python, variables = airflow
    return subprocess.Popen(
        [str(python), f"{variables['AIRFLOW_HOME']}/dags/nightly.py"],
        env=os.environ | variables | {"FIELDS": json.dumps(fields), "MODE": mode},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def submitted(number: int) -> Job:
    """Return the job that the operator submits, once it has."""
    deadline = time.monotonic() + 120
    while Job.objects.count() < number:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return Job.objects.order_by("-pk")[0]


def end(dataset: dict[str, Any], job: Job, exit_code: int) -> None:
    run(dataset, job)
    reason = EndReason.EXIT_CODE if exit_code else EndReason.COMPLETED
    with transaction.atomic():
        job_control.record_task_ended(
            job.attempts.get().task_rows.get().pk, exit_code=exit_code, reason=reason
        )


@pytest.mark.parametrize(
    ("mode", "exit_code", "state"),
    [("poll", 0, "success"), ("deferrable", 0, "success"), ("poll", 1, "failed")],
)
def test_a_task_has_the_state_of_its_job(airflow, address, dataset, fields, mode, exit_code, state) -> None:
    process = start(airflow, fields | {"max_attempts": 1}, mode)
    end(dataset, submitted(1), exit_code)
    output = process.communicate(timeout=120)[0]
    assert f"state {state}" in output, output[-4000:]
    assert Job.objects.count() == 1


def test_an_attempt_takes_over_a_live_job_and_repeats_a_failed_one(airflow, address, dataset, fields) -> None:
    lost = start(airflow, fields, "1")
    job = submitted(1)
    lost.kill()
    lost.wait()
    second = start(airflow, fields, "2")
    time.sleep(5)
    Job.objects.filter(pk=job.pk).update(max_attempts=1)
    end(dataset, job, exit_code=1)
    assert "ended as FAILED" in second.communicate(timeout=120)[0] and Job.objects.count() == 1
    third = start(airflow, fields, "3")
    again = submitted(2)
    end(dataset, again, exit_code=0)
    assert f"job {again.public_id}" in third.communicate(timeout=120)[0] and Job.objects.count() == 2


def test_a_killed_task_stops_its_job(airflow, address, dataset, fields) -> None:
    process = start(airflow, fields, "1")
    job = submitted(1)
    time.sleep(1)  # until it has the answer
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    job.refresh_from_db()
    assert job.desired_state == "cancelled" or job.state == "CANCELLED"
