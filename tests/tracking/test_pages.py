"""Pages of experiments and models show what MLflow's client logged, and change it."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connection
from django.test import Client
from mlflow.entities import Metric

from portal.domain.experiments.tracking import JOB_TAG, NOTE_TAG
from portal.errors import NotFound
from portal.models import AuditEntry, Project, Service, ServiceVersion, Sweep, User
from portal.services.experiments import experiments
from portal.services.jobs.tracking import tracking_url
from portal.tracking import client as tracking_client
from tests import factories
from tests.tracking.conftest import TrackingWorld

pytestmark = pytest.mark.django_db(transaction=True)


def browser(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def runs(tracking: TrackingWorld) -> list[str]:
    """Three runs that differ in a parameter, with curves."""
    client = tracking.client()
    experiment = client.create_experiment("vit")
    made = []
    for number in (1, 2, 3):
        run = client.create_run(experiment, run_name=f"vit-{number}").info.run_id
        client.log_param(run, "lr", number / 10)
        client.log_param(run, "batch", 64)
        client.log_batch(
            run, metrics=[Metric("loss", number / (step + 1), 1000 + step, step) for step in range(600)]
        )
        made.append(run)
    client.log_text(made[0], "<script>alert(1)</script>", "report/page.html")
    return made


def test_the_list_filters_compares_and_pages(tracking: TrackingWorld, runs: list[str]) -> None:
    page = browser(tracking.viewer)
    at = f"/experiments/?project={tracking.project.public_id}"
    text = page.get(at).content.decode()
    assert all(f"vit-{number}" in text for number in (1, 2, 3)) and "0.3" in text
    assert "vit-2" in (found := page.get(f"{at}&q=vit-2").content.decode()) and "vit-1" not in found
    found = page.get(f"{at}&q=params.lr = '0.3'").content.decode()
    assert "vit-3" in found and "vit-1" not in found
    assert "This filter is not valid" in page.get(f"{at}&q=loss < < 3").content.decode()
    assert "No runs match" in page.get(f"{at}&q=vit's 1").content.decode()
    compared = page.get(f"{at}&run={runs[0]}&run={runs[2]}").content.decode()
    assert (
        "Compare 2\xa0runs" in compared
        and compared.count("<polyline") == 3
        and 'data-places="2,2"' in compared
    )
    assert (
        '<span class="fw-diff">0.1</span>' in compared and '<span class="fw-diff">64</span>' not in compared
    )


def test_the_list_shows_own_and_running_runs_and_is_downloaded(
    tracking: TrackingWorld, runs: list[str]
) -> None:
    tracking.client().set_terminated(runs[0])
    at = f"/experiments/?project={tracking.project.public_id}"
    member, viewer = browser(tracking.member), browser(tracking.viewer)
    running = member.get(f"{at}&running=1&q=vit").content.decode()
    assert "vit-2" in running and "vit-1" not in running and "2 running" in running
    assert "vit-2" in member.get(f"{at}&mine=1").content.decode()
    assert "No runs match" in viewer.get(f"{at}&mine=1").content.decode()
    answer = member.get(f"/experiments/runs.csv?project={tracking.project.public_id}&q=vit-3")
    (row,) = csv.DictReader(b"".join(answer.streaming_content).decode().splitlines())
    assert (row["name"], row["status"], row["params.lr"], row["metrics.loss"]) == (
        "vit-3",
        "RUNNING",
        "0.3",
        "0.005",
    )


def search(tracking: TrackingWorld, project: Project, metric: str, direction: str) -> None:
    Sweep.objects.create(
        name="s", owner=tracking.member, project=project, environment=factories.environment(tool=False),
        job={}, metric=metric, direction=direction, max_trials=1, seed=1,
    )  # fmt: skip


def test_the_best_value_is_marked_if_sweeps_agree_on_its_direction(
    tracking: TrackingWorld, runs: list[str]
) -> None:
    def marked() -> list[tuple[str, ...]]:
        at = f"/experiments/?project={tracking.project.public_id}"
        text = browser(tracking.viewer).get(at).content.decode()
        return re.findall(r'<span class="(fw-best.*?)">(.*?)<span class="fw-sr">, (.*?)</span>', text)

    search(tracking, tracking.project, "accuracy", "maximize")
    search(tracking, tracking.other, "loss", "maximize")
    assert marked() == []
    search(tracking, tracking.project, "loss", "minimize")
    found = ("fw-best fw-best--min", "0.001667", "best of the runs shown, lower is better")
    assert marked() == [found]
    search(tracking, tracking.project, "loss", "maximize")
    assert marked() == []


def test_a_comparison_says_what_makes_runs_unlike(tracking: TrackingWorld, runs: list[str]) -> None:
    factories.node(factories.pool(), gpus=4)
    for number, run in enumerate(runs[:2], start=1):
        job = factories.job(
            tracking.member, tracking.project, factories.environment(tool=False), gpus_per_task=number
        )
        tag = {"run_id": run, "key": JOB_TAG, "value": job.public_id}
        tracking_client.call(tracking.project.public_id, "POST", "runs/set-tag", tag)
    tracking.client().set_terminated(runs[0])
    tracking.client().set_terminated(runs[1], "FAILED")
    at = f"/experiments/?project={tracking.project.public_id}&run={runs[0]}&run={runs[1]}&run={runs[2]}"
    page = browser(tracking.viewer).get(at).content.decode().replace("\xa0", " ")
    assert "B is not like for like" in page and "Compared with A, it differs in: " in page
    assert "B did not complete" in page and "C has not ended" in page and "1 × GPU" in page
    assert "equal row" in page and 'data-axis="gpu_hours"' in page


def test_curves_have_the_steps_and_values_of_each_run(tracking: TrackingWorld, runs: list[str]) -> None:
    page = browser(tracking.viewer)
    found = page.get(
        f"/experiments/series/?project={tracking.project.public_id}&run={runs[0]}&run={runs[1]}"
    ).json()
    curve = found["metrics"]["loss"][runs[1]]
    assert [each["name"] for each in found["runs"]] == ["vit-1", "vit-2"]
    assert len(curve["hours"]) == len(curve["steps"]) and found["runs"][0]["gpus"] == 0
    assert curve["steps"][0] == 0 and curve["steps"][-1] == 599 and len(curve["steps"]) <= 800
    assert all(value == 2 / (step + 1) for step, value in zip(curve["steps"], curve["values"], strict=True))


def test_a_run_shows_its_files_and_members_edit_note_and_tags(
    tracking: TrackingWorld, runs: list[str]
) -> None:
    member, at = browser(tracking.member), f"/experiments/{tracking.project.public_id}/{runs[0]}/"
    assert "report/" in member.get(at).content.decode()
    assert "page.html" in member.get(f"{at}?path=report").content.decode()
    file = member.get(f"{at}file/?path=report/page.html")
    assert b"".join(file.streaming_content) == b"<script>alert(1)</script>"
    assert file["Content-Type"] == "application/octet-stream"
    assert file["Content-Disposition"] == 'attachment; filename="page.html"'
    for path in ("../../../../secret_key", "report//page.html", "report/page.html%23", "report/", ""):
        assert member.get(f"{at}file/?path={path}").status_code == 404, path
    deep = "/".join(letter * 200 for letter in "abc")
    tracking.client().log_text(runs[0], "deep", f"{deep}/{'f' * 255}")
    assert "f" * 255 in member.get(f"{at}?path={deep}").content.decode()
    assert member.get(f"{at}file/?path={deep}/{'f' * 255}").getvalue() == b"deep"
    for body in ({"note": "diverges\nat 400"}, {"tag": "h14", "value": "yes"}):
        assert member.post(f"{at}edit/", body).status_code == 302
    data = tracking.client().get_run(runs[0]).data
    assert data.tags[NOTE_TAG] == "diverges\nat 400" and data.tags["h14"] == "yes"
    member.post(f"{at}edit/", {"remove": "h14"})
    assert "h14" not in tracking.client().get_run(runs[0]).data.tags
    assert set(AuditEntry.objects.values_list("action", flat=True)) >= {"run.note", "run.tag", "run.untag"}
    refused = member.post(f"{at}edit/", {"tag": JOB_TAG, "value": "x"}, follow=True)
    assert "does not start with mlflow. or fairway." in refused.content.decode()
    viewer = browser(tracking.viewer)
    assert "Save note" not in viewer.get(at).content.decode()
    assert "lack the permission" in viewer.post(f"{at}edit/", {"note": "mine"}, follow=True).content.decode()
    stranger = browser(tracking.stranger)
    for path in (
        at,
        f"{at}file/?path=report/page.html",
        f"/experiments/?project={tracking.project.public_id}",
    ):
        assert stranger.get(path).status_code == 404
    own = f"/experiments/{tracking.other.public_id}/{runs[0]}/"
    assert stranger.get(own).status_code == 404, "another project's run under one's own project"


def test_chosen_runs_are_tagged_together(tracking: TrackingWorld, runs: list[str]) -> None:
    at = f"/experiments/{tracking.project.public_id}/tags/"
    back = f"project={tracking.project.public_id}&q=vit"
    member, viewer = browser(tracking.member), browser(tracking.viewer)

    def tagged() -> list[bool]:
        return [tracking.client().get_run(run).data.tags.get("h14") == "yes" for run in runs]

    def post(page: Client, **body: Any) -> str:
        answer = page.post(at, {"query": back, "tag": "h14", "value": "yes", **body}, follow=True)
        assert answer.redirect_chain == [(f"/experiments/?{back}", 302)]
        return str(answer.content.decode())

    assert "The tag h14 is added to 2 runs." in post(member, run=runs[:2])
    assert tagged() == [True, True, False]
    assert AuditEntry.objects.filter(action="run.tag").count() == 2
    assert "The tag h14 is added to 1 run." in post(member, run=runs)
    assert "The tag h14 is removed from 2 runs." in post(member, run=runs[1:], remove="1")
    assert tagged() == [True, False, False]
    assert "lack the permission" in post(viewer, run=runs)
    assert "Choose 1 to 50 runs." in post(member)
    assert "does not exist any more" in post(member, run=[runs[1], "0" * 32])
    assert "does not start with mlflow. or fairway." in post(member, run=runs, tag=JOB_TAG)
    assert "This tag cannot be removed." in post(member, run=runs, tag=JOB_TAG, remove="1")
    assert tagged() == [True, False, False]
    listed = f"/experiments/?{back}"
    assert "Tag selected runs" in member.get(listed).content.decode()
    assert "Tag selected runs" not in viewer.get(listed).content.decode()
    assert browser(tracking.stranger).post(at, {"tag": "h14", "run": runs}).status_code == 404


def test_models_show_versions_stages_and_lineage(tracking: TrackingWorld, runs: list[str]) -> None:
    client = tracking.client()
    client.create_registered_model("depth's", description="From one picture.")
    source = client.get_run(runs[0]).info.artifact_uri
    for run in runs[:2]:
        client.create_model_version(
            "depth's", f"{source}/report" if run == runs[0] else "s3://bucket/model", run
        )
    member, at = browser(tracking.member), f"/models/?project={tracking.project.public_id}"
    text = member.get(at).content.decode()
    assert "depth&#x27;s" in text and "v2" in text and "vit-2" in text
    change = f"/models/{tracking.project.public_id}/version/"
    member.post(change, {"model": "depth's", "version": "1", "stage": "Production"})
    member.post(change, {"model": "depth's", "version": "1", "alias": "champion"})
    version = client.get_model_version_by_alias("depth's", "champion")
    assert (version.version, version.current_stage) == ("1", "Production")
    refused = member.post(change, {"model": "depth's", "version": "1", "stage": "Best"}, follow=True)
    assert "One of None, Staging" in refused.content.decode()
    assert "vit-1" in member.get(f"{at}&model=depth%27s&version=1").content.decode()
    assert member.get(f"{at}&model=other").status_code == 404


def test_models_of_all_projects_are_those_that_the_user_may_see(
    tracking: TrackingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = factories.project(member=tracking.member)
    for number, (user, project, name) in enumerate(
        [
            (tracking.member, tracking.project, "depth"),
            (tracking.member, own, "depth"),
            (tracking.member, own, "grasp"),
            (tracking.stranger, tracking.other, "secret"),
        ]
    ):
        client = tracking.client(user, project)
        client.create_registered_model(name, description=f"number {number}")
        client.create_model_version(name, "s3://bucket/model")
        client.set_registered_model_alias(name, "champion", "1")
    tracking.client(tracking.member, own).set_registered_model_tag("grasp", "team", "robots")
    tracking.client(tracking.member, own).create_model_version("depth", "s3://bucket/model")
    member = browser(tracking.member)
    answer = member.get("/models/")
    assert answer.context["is_all"] and "secret" not in answer.content.decode()
    listed = [(row.project, row.model.name, row.model.newest) for row in answer.context["models"]]
    assert listed == [(own, "depth", "2"), (own, "grasp", "1"), (tracking.project, "depth", "1")]
    assert answer.context["models"][1].model.aliases == {"champion": "1"}
    assert [row.is_chosen for row in answer.context["models"]] == [True, False, False]
    assert f'<td data-l="Project">{tracking.project.name}</td>' in answer.content.decode()
    for search, expected in (
        ("GRA", ["grasp"]),
        ("Team rob", ["grasp"]),
        ("number 1", ["depth"]),
        (own.name, ["depth", "grasp"]),
        ("%", []),
        ("secret", []),
    ):
        found = member.get("/models/", {"q": search})
        assert [row.model.name for row in found.context["models"]] == expected, search
    assert "No such model" in found.content.decode()
    assert "team: robots" in member.get("/models/", {"q": "grasp"}).content.decode()
    chosen = {"project": "all", "model": "depth", "model_project": tracking.project.public_id}
    answer = member.get("/models/", chosen)
    assert answer.context["model"].description == "number 0" and answer.context["project"] == tracking.project
    hidden = {"project": "all", "model": "secret", "model_project": tracking.other.public_id}
    assert member.get("/models/", hidden).status_code == 404
    assert member.get("/models/", {"project": tracking.other.public_id}).status_code == 404
    assert member.get("/models/", {"project": "all", "model": "none"}).status_code == 404
    change = {"model": "depth", "version": "1", "stage": "Staging", "list": "all"}
    answer = member.post(f"/models/{tracking.project.public_id}/version/", change, follow=True)
    assert answer.context["is_all"] and answer.context["project"] == tracking.project
    only = browser(tracking.stranger).get("/models/")
    assert not only.context["is_all"] and "All projects" not in only.content.decode()
    monkeypatch.setattr("portal.web.experiments.models.PAGE_SIZE", 2)
    first = member.get("/models/")
    assert (first.context["newer"], first.context["older"]) == ("", "?page=2")
    second = member.get("/models/", {"page": "2", "model": "depth", "model_project": own.public_id})
    assert [row.model.name for row in second.context["models"]] == ["grasp"], "the changed model is the first"
    assert second.context["project"] == own, "the chosen model is on another page"
    assert second.context["older"] == "" and "page=1" in second.context["newer"]
    assert len(member.get("/models/?page=99").context["models"]) == 2


def test_versions_show_metrics_runs_and_what_changed(tracking: TrackingWorld, runs: list[str]) -> None:
    client = tracking.client()
    client.create_registered_model("depth")
    for run in runs[:2]:
        client.create_model_version("depth", "s3://bucket/model", run)
    member, at = browser(tracking.member), f"/models/?project={tracking.project.public_id}"
    text = member.get(at).content.decode()
    assert '<th class="fw-num">loss</th>' in text and "vit-1" in text and "vit-2" in text
    assert "Parameters that differ from those of v1: lr." in text and "not served" in text
    assert f"run={runs[1]}&amp;run={runs[0]}" in text or f"run={runs[1]}&run={runs[0]}" in text
    change = f"/models/{tracking.project.public_id}/version/"
    assert "To Staging" in text and "Promote" not in text
    member.post(change, {"model": "depth", "version": "1", "stage": "Staging"})
    staged = member.get(f"{at}&stage=Staging").content.decode()
    assert "Promote" in staged and "vit-2</a></td>" not in staged
    assert "No version of this model has this stage." in member.get(f"{at}&stage=Archived").content.decode()
    assert "Deploy" not in browser(tracking.viewer).get(at).content.decode()


def test_a_model_shows_the_service_that_serves_it(tracking: TrackingWorld, runs: list[str]) -> None:
    client = tracking.client()
    client.create_registered_model("depth")
    client.create_model_version("depth", "s3://bucket/model", runs[0])
    service = Service.objects.create(name="depth-api", owner=tracking.member, project=tracking.project)
    fields = {"environment": factories.environment(tool=False), "created_by": tracking.member, "job": {}}
    ServiceVersion.objects.create(
        service=service, number=1, model_name="depth", model_version="1", state="ACTIVE", **fields
    )
    text = browser(tracking.viewer).get(f"/models/?project={tracking.project.public_id}").content.decode()
    assert "Service depth-api" in text and "served by depth-api" in text and "Replicas and rollout" in text
    assert f"svc-{service.public_id}." in text


def test_an_artifact_is_registered_on_the_page_of_its_run(tracking: TrackingWorld, runs: list[str]) -> None:
    member, at = browser(tracking.member), f"/experiments/{tracking.project.public_id}/{runs[0]}/"
    assert "Register model" in member.get(at).content.decode()
    for number in ("1", "2"):
        answer = member.post(f"{at}register/", {"path": "report", "model": "depth"}, follow=True)
        assert f"Version {number} of depth is registered." in answer.content.decode()
    version = tracking.client().get_model_version("depth", "2")
    assert version.run_id == runs[0] and version.source.endswith(f"{runs[0]}/artifacts/report")
    refused = member.post(f"{at}register/", {"path": "report", "model": "a/b"}, follow=True)
    assert "without / and :" in refused.content.decode()
    viewer = browser(tracking.viewer)
    assert "Register model" not in viewer.get(at).content.decode()
    answer = viewer.post(f"{at}register/", {"path": "report", "model": "other"}, follow=True)
    assert "lack the permission" in answer.content.decode()
    assert [each.name for each in tracking.client().search_registered_models()] == ["depth"]


def test_a_job_page_shows_the_runs_of_the_job(tracking: TrackingWorld, runs: list[str]) -> None:
    factories.node(factories.pool())
    job = factories.job(tracking.member, tracking.project, factories.environment(tool=False))
    tag = {"run_id": runs[1], "key": JOB_TAG, "value": job.public_id}
    tracking_client.call(tracking.project.public_id, "POST", "runs/set-tag", tag)
    text = browser(tracking.viewer).get(f"/jobs/{job.public_id}/runs/").content.decode()
    assert "vit-2" in text and "vit-1" not in text and "data-run-charts" in text
    address = f"/experiments/?project={tracking.project.public_id}&run={runs[0]}"
    opener = f'<input type="hidden" name="job" value="{job.public_id}">'
    assert opener in browser(tracking.viewer).get(f"{address}&run={runs[1]}").content.decode()
    assert "/jobs/tensorboard/" not in browser(tracking.viewer).get(address).content.decode()


def test_a_refused_change_of_a_version_is_audited_and_no_transaction_waits_for_the_server(
    tracking: TrackingWorld, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[bool] = []
    real = experiments.call
    monkeypatch.setattr(
        experiments, "call", lambda *args: waiting.append(connection.in_atomic_block) or real(*args)
    )
    with pytest.raises(NotFound):
        experiments.do_set_stage(tracking.member, tracking.project, "none", "1", "Staging")
    assert waiting == [False]
    actions = AuditEntry.objects.filter(object_id=tracking.project.public_id).order_by("id")
    assert list(actions.values_list("action", flat=True))[-2:] == ["model.stage", "model.stage.failed"]


def test_a_url_of_the_mlflow_client_leads_to_the_runs_of_the_project(tracking: TrackingWorld) -> None:
    url = urlsplit(tracking_url(tracking.project.public_id)).path
    found = browser(tracking.viewer).get(f"{url}/")
    assert found.status_code == 302
    assert found["Location"] == f"/experiments/?project={tracking.project.public_id}"


def test_without_the_tracking_server_pages_report_it(
    tracking: TrackingWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAIRWAY_TRACKING_SOCKET", str(tmp_path / "none.sock"))
    page: Any = browser(tracking.member)
    for path in ("/experiments/", "/models/"):
        answer = page.get(path)
        assert answer.status_code == 200 and "does not respond" in answer.content.decode()
    assert page.get(f"/experiments/{tracking.project.public_id}/{'0' * 32}/").status_code == 503
