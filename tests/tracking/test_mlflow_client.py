"""MLflow's own client against the tracking server behind the access policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import requests
from mlflow import MlflowException
from mlflow.entities import Metric, Param, RunTag

from portal.services.accounts.tokens import Scope
from portal.services.jobs.tracking import tracking_url
from tests.tracking.conftest import TrackingWorld

pytestmark = pytest.mark.django_db(transaction=True)


def test_experiments_runs_params_metrics_tags_and_search(tracking: TrackingWorld) -> None:
    client = tracking.client()
    experiment = client.create_experiment("vit", tags={"team": "vision"})
    assert client.get_experiment_by_name("vit").experiment_id == experiment
    assert {each.name for each in client.search_experiments()} == {"vit", "Default"}
    runs = [client.create_run(experiment, run_name=f"lr-{lr}").info.run_id for lr in (1, 2)]
    for lr, run in zip((1, 2), runs, strict=True):
        client.log_param(run, "lr", lr)
        client.set_tag(run, "stage", "tuned" if lr == 2 else "first")
        for step in range(20):
            client.log_metric(run, "loss", lr / (step + 1), step=step)
    client.log_batch(
        runs[0],
        metrics=[Metric("acc", 0.5, 1000, 1), Metric("acc", float("nan"), 1001, 2)],
        params=[Param("depth", "12")],
        tags=[RunTag("note", "a batch")],
    )
    history = client.get_metric_history(runs[1], "loss")
    assert [point.step for point in history] == list(range(20))
    assert client.get_run(runs[1]).data.metrics["loss"] == 2 / 20
    found = client.search_runs([experiment], "params.lr = '2' and metrics.loss < 1")
    assert [run.info.run_id for run in found] == [runs[1]]
    first = client.get_run(runs[0])
    assert first.data.params == {"lr": "1", "depth": "12"}
    assert first.data.tags["note"] == "a batch" and first.data.tags["mlflow.user"] == tracking.member.username
    client.set_terminated(runs[0], "FINISHED")
    client.delete_run(runs[0])
    assert client.get_run(runs[0]).info.lifecycle_stage == "deleted"
    client.rename_experiment(experiment, "vit-h")
    client.delete_tag(runs[1], "stage")
    assert "stage" not in client.get_run(runs[1]).data.tags


def test_points_of_a_batch_equal_those_stored_by_mlflow(tracking: TrackingWorld) -> None:
    """The short way into the tables and MLflow's own give the same answers."""
    client = tracking.client()
    experiment = client.create_experiment("points")
    points = [
        Metric("loss", 1.5, 5, 3),
        Metric("loss", 2.5, 6, 3),
        Metric("loss", 9.0, 9, 1),
        Metric("a/b c", -1, 0, 0),
    ]
    short, own = (client.create_run(experiment).info.run_id for _ in range(2))
    client.log_batch(short, metrics=points)
    client.log_batch(short, metrics=points)  # a repeated request adds nothing
    client.log_batch(own, metrics=points, params=[Param("goes", "through MLflow")])
    for key in ("loss", "a/b c"):
        assert [(p.value, p.timestamp, p.step) for p in client.get_metric_history(short, key)] == [
            (p.value, p.timestamp, p.step) for p in client.get_metric_history(own, key)
        ]
    assert (
        client.get_run(short).data.metrics == client.get_run(own).data.metrics == {"loss": 2.5, "a/b c": -1.0}
    )
    with pytest.raises(MlflowException, match="Invalid value"):
        client.log_batch(short, metrics=[Metric("bad\nname", 1.0, 0, 0)])
    client.delete_run(short)
    with pytest.raises(MlflowException, match="must be in the 'active' state"):
        client.log_metric(short, "loss", 1.0)


def test_artifacts_are_uploaded_and_downloaded(tracking: TrackingWorld, tmp_path: Path) -> None:
    client = tracking.client()
    run = client.create_run(client.create_experiment("files")).info.run_id
    model = tmp_path / "model.bin"
    model.write_bytes(bytes(range(256)) * 20_000)
    client.log_artifact(run, str(model), "weights")
    client.log_text(run, "<script>alert(1)</script>", "page.html")
    assert {(each.path, each.is_dir) for each in client.list_artifacts(run)} == {
        ("page.html", False),
        ("weights", True),
    }
    (found,) = client.list_artifacts(run, "weights")
    assert found.file_size == model.stat().st_size
    down = client.download_artifacts(run, "weights/model.bin", str(tmp_path))
    assert Path(down).read_bytes() == model.read_bytes()


@pytest.mark.parametrize("folder", ["", ".", "./", "./weights", "weights/."])
def test_a_folder_is_listed_and_downloaded_under_each_of_its_names(
    tracking: TrackingWorld, tmp_path: Path, folder: str
) -> None:
    client = tracking.client()
    run = client.create_run(client.create_experiment("folders")).info.run_id
    client.log_text(run, "best", "weights/model.txt")
    down = Path(client.download_artifacts(run, folder, str(tmp_path)))
    (file,) = (each for each in down.rglob("*") if each.is_file())
    assert (file.name, file.read_text()) == ("model.txt", "best")


def test_a_query_with_too_many_parameters_is_refused_in_the_form_of_mlflow(tracking: TrackingWorld) -> None:
    """MLflow's client shows the message of an error in this form only."""
    answer = requests.get(
        f"{tracking_url(tracking.project.public_id)}/api/2.0/mlflow/metrics/get-history-bulk-interval",
        params={"run_ids": [f"r{number}" for number in range(1000)], "metric_key": "loss"},
        headers={"Authorization": f"Bearer {tracking.token(tracking.member)}"},
        timeout=30,
    )
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert answer.json()["message"] == "A query may have at most 1000 parameters."


def test_registry(tracking: TrackingWorld, tmp_path: Path) -> None:
    client = tracking.client()
    run = client.create_run(client.create_experiment("models"))
    client.log_text(run.info.run_id, "weights", "model/weights.txt")
    client.create_registered_model("depth", description="Depth from one picture.")
    made = client.create_model_version("depth", f"{run.info.artifact_uri}/model", run.info.run_id)
    assert (made.version, made.run_id) == ("1", run.info.run_id)
    client.transition_model_version_stage("depth", "1", "Staging")
    client.set_registered_model_alias("depth", "champion", "1")
    client.set_model_version_tag("depth", "1", "checks", "passed")
    assert client.get_model_version_by_alias("depth", "champion").current_stage == "Staging"
    assert [each.version for each in client.search_model_versions("name = 'depth'")] == ["1"]
    assert [each.name for each in client.search_registered_models()] == ["depth"]
    assert client.get_model_version_download_uri("depth", "1").endswith("/model")
    client.delete_model_version("depth", "1")
    client.delete_registered_model("depth")
    assert client.search_registered_models() == []


def test_a_stranger_is_refused_and_a_viewer_reads_only(tracking: TrackingWorld) -> None:
    client = tracking.client()
    experiment = client.create_experiment("guarded")
    run = client.create_run(experiment).info.run_id
    viewer = tracking.client(tracking.viewer)
    assert viewer.get_run(run).info.run_id == run
    with pytest.raises(MlflowException, match="PERMISSION_DENIED"):
        viewer.log_metric(run, "loss", 1.0)
    stranger = tracking.client(tracking.stranger)
    for attempt in (lambda: stranger.get_run(run), lambda: stranger.search_runs([experiment])):
        with pytest.raises(MlflowException, match="There is no such project"):
            attempt()
    with pytest.raises(MlflowException, match="lacks the scope experiments"):
        reader = tracking.client(token=tracking.token(tracking.member, Scope.READ))
        reader.get_run(run)
        reader.set_tag(run, "a", "b")
    with pytest.raises(MlflowException, match="UNAUTHENTICATED"):
        tracking.client(token="fw_wrong").get_run(run)
    with pytest.raises(MlflowException, match="set by Fairway"):
        tracking.client().set_tag(run, "fairway.job", "another")
