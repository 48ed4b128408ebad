"""MLflow's client with the two documented variables alone: its default experiment, of each project its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import requests
from mlflow import MlflowException

from portal.models import User
from portal.services.jobs.tracking import tracking_url
from tests.process_environment import service_environment
from tests.tracking.conftest import TrackingWorld

pytestmark = pytest.mark.django_db(transaction=True)

PROGRAM = """
import mlflow
mlflow.log_metric("loss", 0.5)
with mlflow.start_run(nested=True):
    mlflow.log_param("lr", 0.1)
mlflow.end_run()
assert len(mlflow.search_runs(output_format="list")) == 2
assert mlflow.get_experiment("0").name == "Default"
assert mlflow.get_experiment_by_name("Default").experiment_id == mlflow.get_experiment("0").experiment_id
print(mlflow.last_active_run().info.experiment_id)
"""
"""Names no experiment, as most tutorials."""
CLIENTS = [sys.executable, *filter(None, os.environ.get("FAIRWAY_TEST_MLFLOW_CLIENTS", "").split(os.pathsep))]
"""Pythons with a client of MLflow: that of the server's version, and others that are installed beside it."""


class Requests:
    """Requests as clients of MLflow 2 and 3 send them."""

    def __init__(self, tracking: TrackingWorld, user: User) -> None:
        self._url = f"{tracking_url(tracking.project.public_id)}/api/2.0/mlflow"
        self._headers = {"Authorization": f"Bearer {tracking.token(user)}"}

    def get(self, name: str, /, **query: Any) -> requests.Response:
        return requests.get(f"{self._url}/{name}", params=query, headers=self._headers, timeout=30)

    def post(self, name: str, /, **body: Any) -> requests.Response:
        return requests.post(f"{self._url}/{name}", json=body, headers=self._headers, timeout=30)


@pytest.mark.parametrize("python", CLIENTS)
def test_a_program_that_names_no_experiment_logs_with_the_two_documented_variables(
    tracking: TrackingWorld, python: str
) -> None:
    variables = {
        "MLFLOW_TRACKING_URI": tracking_url(tracking.project.public_id),
        "MLFLOW_TRACKING_TOKEN": tracking.token(tracking.member),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    done = subprocess.run(
        [python, "-c", PROGRAM],
        env={**service_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (default,) = tracking.client().search_experiments(filter_string="name = 'Default'")
    assert done.stdout.split()[-1] == default.experiment_id


def test_every_request_that_names_an_experiment_takes_its_default_id(tracking: TrackingWorld) -> None:
    member = Requests(tracking, tracking.member)
    run = member.post("runs/create", experiment_id="0", start_time=1).json()["run"]["info"]
    for body in ({"experiment_id": 0}, {"experimentId": "0"}, {}, {"experiment_id": ""}):
        made = member.post("runs/create", **body, start_time=2).json()["run"]["info"]
        assert made["experiment_id"] == run["experiment_id"] != "0"
    for query in ({"experiment_id": "0"}, {"experimentId": "0"}):
        assert member.get("experiments/get", **query).json()["experiment"]["name"] == "Default"
    for body in ({"experiment_ids": ["0"]}, {"experimentIds": [0]}):
        assert len(member.post("runs/search", **body).json()["runs"]) == 5
    assert member.post("experiments/set-experiment-tag", experiment_id="0", key="a", value="b").ok
    assert member.post("logged-models", experiment_id="0", name="vit").ok
    assert member.post("logged-models/search", experiment_ids=["0"]).json()["models"]
    names = [each["name"] for each in member.post("experiments/search", max_results=9).json()["experiments"]]
    assert names == ["Default"]


def test_each_project_has_a_default_of_its_own_and_readers_create_none(tracking: TrackingWorld) -> None:
    viewer = Requests(tracking, tracking.viewer)
    assert viewer.get("experiments/get", experiment_id="0").status_code == 404
    assert viewer.get("experiments/get-by-name", experiment_name="Default").status_code == 404
    assert viewer.post("experiments/search", max_results=9).json() == {}
    run = tracking.client().create_run("0").info
    assert (
        viewer.get("experiments/get", experiment_id="0").json()["experiment"]["experiment_id"]
        == run.experiment_id
    )
    assert [
        each["info"]["run_id"] for each in viewer.post("runs/search", experiment_ids=["0"]).json()["runs"]
    ] == [run.run_id]
    other = tracking.client(tracking.stranger, tracking.other).create_run("0").info
    assert other.experiment_id != run.experiment_id
    with pytest.raises(MlflowException, match="PERMISSION_DENIED"):
        tracking.client(tracking.viewer).create_run("0")
