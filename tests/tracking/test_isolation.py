"""No endpoint that the portal offers reads or changes anything of another project by its ids."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import requests
from mlflow.entities import Metric

from portal.domain.experiments.tracking import CONTINUE_ENDPOINT, MODEL_LIST_ENDPOINT
from portal.services.jobs.tracking import tracking_url
from portal.tracking.endpoints import NOT_OFFERED, find_endpoint
from portal.tracking.metric_writes import read_points
from tests.tracking.conftest import TrackingWorld

pytestmark = pytest.mark.django_db(transaction=True)
SECRET = "only-for-its-project"


def requests_with(run: str, experiment: str, artifact: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Method, path and body or query of each endpoint that takes an id."""
    by_run, by_experiment = {"run_id": run}, {"experiment_id": experiment}
    point = {**by_run, "key": "loss", "value": 1.0, "timestamp": 1, "step": 1}
    tag = {"key": "a", "value": "b"}
    version = {"name": "model", "version": "1"}
    return [
        ("GET", "2.0/mlflow/experiments/get", by_experiment),
        ("GET", "2.0/mlflow/experiments/get-by-name", {"experiment_name": SECRET}),
        ("POST", "2.0/mlflow/experiments/search", {"max_results": 100}),
        ("POST", "2.0/mlflow/experiments/update", {**by_experiment, "new_name": "taken"}),
        ("POST", "2.0/mlflow/experiments/delete", by_experiment),
        ("POST", "2.0/mlflow/experiments/restore", by_experiment),
        ("POST", "2.0/mlflow/experiments/set-experiment-tag", {**by_experiment, **tag}),
        ("POST", "2.0/mlflow/experiments/delete-experiment-tag", {**by_experiment, "key": SECRET}),
        ("POST", "2.0/mlflow/runs/create", {**by_experiment, "start_time": 1}),
        ("GET", "2.0/mlflow/runs/get", by_run),
        ("POST", "2.0/mlflow/runs/search", {"experiment_ids": [experiment]}),
        ("POST", "2.0/mlflow/runs/update", {**by_run, "status": "FAILED"}),
        ("POST", "2.0/mlflow/runs/delete", by_run),
        ("POST", "2.0/mlflow/runs/restore", by_run),
        ("POST", "2.0/mlflow/runs/set-tag", {**by_run, **tag}),
        ("POST", "2.0/mlflow/runs/delete-tag", {**by_run, "key": SECRET}),
        ("POST", "2.0/mlflow/runs/log-metric", point),
        (
            "POST",
            "2.0/mlflow/runs/log-batch",
            {**by_run, "metrics": [{k: point[k] for k in point if k != "run_id"}]},
        ),
        ("POST", "2.0/mlflow/runs/log-batch", {**by_run, "params": [tag]}),
        ("POST", "2.0/mlflow/runs/log-parameter", {**by_run, **tag}),
        ("POST", "2.0/mlflow/runs/log-inputs", {**by_run, "datasets": []}),
        ("POST", "2.0/mlflow/runs/log-model", {**by_run, "model_json": json.dumps({"artifact_path": "a"})}),
        ("POST", "2.0/mlflow/runs/outputs", {**by_run, "models": [{"model_id": "m", "step": 1}]}),
        ("GET", "2.0/mlflow/metrics/get-history", {**by_run, "metric_key": "loss"}),
        (
            "GET",
            "2.0/mlflow/metrics/get-history-bulk-interval",
            {"run_ids": run, "metric_key": "loss", "max_results": 5},
        ),
        ("GET", "2.0/mlflow/artifacts/list", by_run),
        ("GET", f"2.0/mlflow-artifacts/artifacts/{artifact}", {}),
        ("PUT", f"2.0/mlflow-artifacts/artifacts/{artifact}", {}),
        ("DELETE", f"2.0/mlflow-artifacts/artifacts/{artifact}", {}),
        ("GET", "2.0/mlflow-artifacts/artifacts", {"path": artifact.rpartition("/")[0]}),
        ("GET", "2.0/mlflow/registered-models/get", {"name": "model"}),
        ("GET", "2.0/mlflow/registered-models/search", {"max_results": 10}),
        ("POST", "2.0/mlflow/registered-models/rename", {"name": "model", "new_name": "mine"}),
        ("PATCH", "2.0/mlflow/registered-models/update", {"name": "model", "description": "mine"}),
        ("DELETE", "2.0/mlflow/registered-models/delete", {"name": "model"}),
        ("POST", "2.0/mlflow/registered-models/alias", {**version, "alias": "best"}),
        ("GET", "2.0/mlflow/registered-models/alias", {"name": "model", "alias": "held"}),
        ("POST", "2.0/mlflow/registered-models/set-tag", {"name": "model", **tag}),
        ("GET", "2.0/mlflow/model-versions/get", version),
        ("GET", "2.0/mlflow/model-versions/search", {"max_results": 10}),
        ("GET", "2.0/mlflow/model-versions/get-download-uri", version),
        ("POST", "2.0/mlflow/model-versions/set-tag", {**version, **tag}),
        ("POST", "2.0/mlflow/model-versions/transition-stage", {**version, "stage": "Archived"}),
        ("PATCH", "2.0/mlflow/model-versions/update", {**version, "description": "mine"}),
        ("DELETE", "2.0/mlflow/model-versions/delete", version),
        ("POST", "2.0/mlflow/logged-models", {**by_experiment, "name": "m"}),
        ("POST", "2.0/mlflow/logged-models/search", {"experiment_ids": [experiment]}),
    ]


def test_ids_of_another_project_are_not_found(tracking: TrackingWorld) -> None:
    owner = tracking.client()
    experiment = owner.create_experiment(SECRET, tags={SECRET: "1"})
    run = owner.create_run(experiment, run_name=SECRET, tags={SECRET: "1"})
    owner.log_batch(run.info.run_id, metrics=[Metric("loss", 0.25, 1, 1)])
    owner.log_text(run.info.run_id, SECRET, "held.txt")
    owner.create_registered_model("model", description=SECRET)
    owner.create_model_version("model", f"{run.info.artifact_uri}/", run.info.run_id)
    owner.set_registered_model_alias("model", "held", "1")

    def state() -> list[str]:
        reader = tracking.client()
        data = reader.get_run(run.info.run_id)
        return [
            str(reader.get_experiment(experiment)),
            str(data.info),
            str(data.data.to_dictionary()),
            str(reader.get_metric_history(run.info.run_id, "loss")),
            str(reader.get_registered_model("model")),
            str([each.path for each in reader.list_artifacts(run.info.run_id)]),
        ]

    before = state()
    session = requests.Session()
    session.headers["Authorization"] = f"Bearer {tracking.token(tracking.stranger)}"
    artifact = f"workspaces/{tracking.project.public_id}/{experiment}/{run.info.run_id}/artifacts/held.txt"
    for method, path, given in requests_with(run.info.run_id, experiment, artifact):
        assert find_endpoint(method, path) is not None, path
        place = {"params": given} if method == "GET" else {"json": given}
        for project in (tracking.other, tracking.project):
            answer = session.request(method, f"{tracking_url(project.public_id)}/api/{path}", **place)
            assert answer.status_code < 500, (path, answer.text)
            if project == tracking.project:
                assert answer.status_code == 404, path
            shown = answer.text.replace(
                json.dumps(SECRET), ""
            )  # an error repeats the name that was asked for
            assert answer.status_code >= 400 or (SECRET not in shown and "0.25" not in shown), (
                path,
                answer.text,
            )
    assert state() == before


def test_the_documentation_lists_what_is_not_offered_of_the_installed_mlflow() -> None:
    """Every endpoint of MLflow is offered, or belongs to a part that docs/experiments.md lists."""
    from mlflow.server.handlers import get_endpoints

    used: set[str] = set()
    for path, _, methods in get_endpoints():
        sample = re.sub(r"<[^>]+>", "x", path)
        for method in methods:
            if not sample.startswith("/api/") or find_endpoint(method, sample.removeprefix("/api/")) is None:
                part = next((each for each in NOT_OFFERED if each.covers(sample)), None)
                assert part is not None, (method, path)
                used.add(part.name)
    assert used == {each.name for each in NOT_OFFERED}
    text = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
    table = text.partition("**Not offered.**")[2].partition("\n\n**")[0]
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    assert [row for row in rows if row != "part of MLflow"] == [each.name for each in NOT_OFFERED]


def test_other_endpoints_of_the_server_are_refused(tracking: TrackingWorld) -> None:
    session = requests.Session()
    session.headers["Authorization"] = f"Bearer {tracking.token(tracking.member)}"
    at = f"{tracking_url(tracking.project.public_id)}/api"
    for method, path in (
        ("POST", f"2.0/mlflow/{MODEL_LIST_ENDPOINT}"),
        ("POST", f"2.0/mlflow/{CONTINUE_ENDPOINT}"),
        ("GET", "3.0/mlflow/workspaces"),
        ("POST", "3.0/mlflow/workspaces"),
        ("POST", "2.0/mlflow/webhooks"),
        ("POST", "2.0/mlflow/artifacts/presigned-upload-url"),
        ("POST", "3.0/mlflow/traces"),
        ("POST", "2.0/mlflow/runs/get"),
        ("GET", "2.0/mlflow/runs/../../../health"),
    ):
        assert session.request(method, f"{at}/{path}", json={}).status_code == 404, path
    refused = session.post(f"{at}/3.0/mlflow/traces", json={}).json()["message"]
    assert refused.endswith("Traces and assessments: not offered.")
    assert session.get(f"{at}/3.0/mlflow/server-info").status_code == 200
    assert requests.get(f"{at}/3.0/mlflow/server-info", timeout=30).status_code == 401


@pytest.mark.parametrize(
    ("body", "points"),
    [
        ({"run_id": "r", "key": "k", "value": 1, "timestamp": 5}, ("r", ["k"], [1.0], [5], [0])),
        (
            {"run_uuid": "r", "metrics": [{"key": "a/b", "value": 2.5, "timestamp": 5, "step": 3}]},
            ("r", ["a/b"], [2.5], [5], [3]),
        ),
        ({"run_id": "r", "metrics": [], "params": []}, None),
        ({"run_id": "r", "metrics": [{"key": "k", "value": "NaN", "timestamp": 5}]}, None),
        ({"run_id": "r", "metrics": [{"key": "k", "value": True, "timestamp": 5}]}, None),
        ({"run_id": "r", "metrics": [{"key": "../k", "value": 1, "timestamp": 5}]}, None),
        ({"run_id": "r", "metrics": [{"key": "k", "value": 1, "timestamp": 2**63}]}, None),
        ({"run_id": "r", "metrics": [{"key": "k", "value": 1, "timestamp": 5, "model_id": "m"}]}, None),
        (
            {"run_id": "r", "metrics": [{"key": "k", "value": 1, "timestamp": 5}], "tags": [{"key": "t"}]},
            None,
        ),
        ([], None),
    ],
)
def test_only_plain_points_use_the_fast_path(body: Any, points: Any) -> None:
    assert read_points(json.dumps(body).encode()) == points
