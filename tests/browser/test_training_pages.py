"""Sweeps, pipeline plans, runs and models in a browser: readable for everybody, in both themes and on a phone."""

from __future__ import annotations

import datetime as dt
import math
import random
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from portal.domain.experiments.tracking import JOB_TAG, USER_TAG
from portal.models import (
    Attempt,
    Job,
    PipelinePlan,
    Service,
    ServiceVersion,
    Sweep,
    Trial,
    TrialReport,
    UsageInterval,
)
from portal.models.public_id import new_public_id
from portal.tracking.client import call
from scheduler.pipeline_plans import answer_plan_query
from tests.browser.conftest import elsewhere
from tests.browser.test_accessibility import look_here
from tests.factories import layer_profile, pipeline_plan
from tests.tracking.conftest import tracking_server
from tests.web.dataset import Dataset

__all__ = ["tracking_server"]
pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

RUNGS = (1, 3, 9)
VIEWS = [(False, 360), *(pytest.param(dark, 1280, marks=pytest.mark.long) for dark in (False, True))]


@pytest.fixture
def sweep(dataset: Dataset) -> Sweep:
    """A search with pruning: trials of every state, with curves, values at rungs, and used GPU-hours."""
    owner, project, now = dataset.people["m-okafor"], dataset.projects["vision"], timezone.now()
    space = {"lr": {"low": 1e-5, "high": 1e-3, "log": True}, "layer_decay": {"low": 0.6, "high": 0.9},
             "drop_path": [0.0, 0.1, 0.2]}  # fmt: skip
    found = Sweep.objects.create(
        name="depth-lr-search", owner=owner, project=project, environment=dataset.environments["batch"],
        job={"name": "depth-lr-search", "command": ["python", "train.py", "--lr={lr}"], "gpus_per_task": 1},
        parameters=space, searcher="asha", metric="abs_rel", max_trials=40, max_parallel=8, max_steps=27,
        reduction_factor=3, seed=1,
    )  # fmt: skip
    dice = random.Random(7)
    states = ["COMPLETED"] * 9 + ["PRUNED"] * 13 + ["RUNNING"] * 5 + ["FAILED", "PAUSED"]
    for number, state in enumerate(states):
        values = {
            "lr": 10 ** dice.uniform(-4.5, -3.2),
            "layer_decay": dice.uniform(0.6, 0.9),
            "drop_path": 0.1,
        }
        start = dice.uniform(0.15, 0.2)
        steps = 27 if state == "COMPLETED" else dice.choice(RUNGS[1:]) if state != "FAILED" else 0
        curve = [0.05 + dice.uniform(0, 0.02) + start * math.exp(-step / 7) for step in range(1, steps + 1)]
        waits = number == 26
        job_state = ("PENDING" if waits else "RUNNING") if state == "RUNNING" else "COMPLETED"
        job = Job.objects.create(
            name=f"depth-lr-search-{number}", owner=owner, project=project, command=["true"],
            environment=found.environment, state=job_state,
            started_at=None if waits else now - dt.timedelta(minutes=100 - 2 * number),
        )  # fmt: skip
        trial = Trial.objects.create(
            sweep=found, number=number, parameters=values, state=state, job=job,
            step=None if waits or not curve else steps, value=None if waits or not curve else curve[-1],
            search_state={"rungs": [] if waits else [curve[rung - 1] for rung in RUNGS if rung <= steps]},
            message="Its abs_rel of 0.0893 at step 9 is not among the best 2 of 8." if state == "PRUNED" else "",
            ended_at=now - dt.timedelta(minutes=60 - 2 * number) if state in ("COMPLETED", "PRUNED") else None,
        )  # fmt: skip
        TrialReport.objects.bulk_create(
            TrialReport(trial=trial, step=step, value=value)
            for step, value in enumerate([] if waits else curve, 1)
        )
        if not waits:
            _use(dataset, job, now - dt.timedelta(minutes=70), dt.timedelta(minutes=3 * steps + 1))
    return found


def _use(dataset: Dataset, job: Job, since: dt.datetime, span: dt.timedelta) -> None:
    """Book a GPU for a job that has ended on it."""
    other = dataset.jobs["vit-h-pretrain"].attempts.get()
    gpu = other.task_rows.first().allocations.first().gpu
    attempt = Attempt.objects.create(
        job=job, number=1, pool=other.pool, leader_epoch=1, state="COMPLETED", ended_at=since + span
    )
    task = attempt.task_rows.create(rank=0, node=gpu.node, state="COMPLETED", container_removed=True)
    allocation = task.allocations.create(
        gpu=gpu, milli=1000, whole=True, started_at=since, ended_at=since + span, proof="exit"
    )
    UsageInterval.objects.create(
        allocation=allocation, project=job.project, user=job.owner, pool=other.pool, job=job, milli=1000,
        started_at=since, ended_at=since + span,
    )  # fmt: skip


@pytest.fixture
def plan(dataset: Dataset) -> PipelinePlan:
    """A division over two nodes with unequal layers."""
    profile = layer_profile(dataset.people["m-okafor"], dataset.projects["vision"], "convformer-xl")
    levels = {"profile": profile.content, "levels": [(2, 3e11), (2, 1.2e10)], "memory_bytes": None}
    return pipeline_plan(
        profile, nodes=2, gpus_per_node=2, link_bandwidth=1.2e10, answer=answer_plan_query("plan", levels)
    )


@pytest.fixture
def runs(dataset: Dataset, tracking_server: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Four runs with curves, two of them versions of a model that a service serves."""
    monkeypatch.setenv("FAIRWAY_TRACKING_SOCKET", str(tracking_server / "tracking.sock"))
    owner, project = dataset.people["m-okafor"], dataset.projects["vision"]
    # MLflow's rows outlive a test, and the project of the data set has the same id in each.
    project.public_id = new_public_id()
    project.save(update_fields=["public_id"])
    now_ms = round(timezone.now().timestamp() * 1000)

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return dict(call(project.public_id, "POST", path, body))

    experiment = post("experiments/create", {"name": "vit-h"})["experiment_id"]
    found, names = [], ("vit-h-pretrain", "dino-abl-b128")
    for number, name in enumerate(("vit-h-pretrain", "vit-h-lr3", "vit-h-mask60", "vit-h-drop30")):
        tags = [{"key": USER_TAG, "value": owner.username}]
        if number < len(names):
            tags.append({"key": JOB_TAG, "value": dataset.jobs[names[number]].public_id})
        body = {
            "experiment_id": experiment,
            "run_name": name,
            "start_time": now_ms - 36_000_000,
            "tags": tags,
        }
        run = post("runs/create", body)["run"]["info"]["run_id"]
        params = [
            {"key": "lr", "value": "3e-4" if number == 1 else "2.5e-4"},
            {"key": "batch_size", "value": "4096"},
        ]
        metrics = [
            {"key": key, "value": base + slope * math.exp(-step / 20), "step": step * 1000,
             "timestamp": now_ms - 36_000_000 + step * 350_000}
            for step in range(100)
            for key, base, slope in (("val_loss", 0.58 + number / 50, 0.4), ("top1", 86.0 - number, -20.0))
        ]  # fmt: skip
        post("runs/log-batch", {"run_id": run, "params": params, "metrics": metrics})
        if number:
            status = "KILLED" if number == 3 else "FINISHED"
            post("runs/update", {"run_id": run, "status": status, "end_time": now_ms})
        found.append(run)
    post("registered-models/create", {"name": "depth-anything-ft", "description": "Depth from one picture."})
    for run in found[1:3]:
        post(
            "model-versions/create",
            {"name": "depth-anything-ft", "source": "s3://models/depth", "run_id": run},
        )
    service = Service.objects.create(name="depth-api", owner=owner, project=project)
    ServiceVersion.objects.create(
        service=service, number=1, model_name="depth-anything-ft", model_version="1", state="ACTIVE", job={},
        environment=dataset.environments["batch"], created_by=owner,
    )  # fmt: skip
    return found


def problems(page: Any, addresses: list[str]) -> str:
    found = []
    for address in addresses:
        page.goto(address)
        page.wait_for_load_state("networkidle")
        found += [f"{address}: {line}" for line in look_here(page).splitlines()]
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            found.append(f"{address}: wider than the screen")
    return "\n".join(found)


@pytest.mark.parametrize(("dark", "width"), VIEWS)
def test_sweeps_and_plans_pass_axe(open_as, sweep: Sweep, plan: PipelinePlan, dark: bool, width: int) -> None:
    page = open_as("m-okafor", dark=dark, width=width)
    assert (
        problems(page, [f"/sweeps/{sweep.public_id}/", f"/plan/{plan.public_id}/?choice=straight&m=8"]) == ""
    )


@pytest.mark.parametrize(("dark", "width"), VIEWS)
def test_runs_and_models_pass_axe(open_as, runs: list[str], dark: bool, width: int) -> None:
    page = open_as("m-okafor", dark=dark, width=width)
    compared = "&".join(f"run={run}" for run in runs)
    assert problems(page, [f"/experiments/?{compared}", "/models/"]) == ""


def test_a_trial_is_cancelled_with_a_click(open_as, sweep: Sweep) -> None:
    page = open_as("m-okafor")
    page.goto(f"/sweeps/{sweep.public_id}/?order=-number")
    page.get_by_role("button", name="Cancel trial 26").click()
    page.get_by_text("Stopped by m-okafor.").first.wait_for()


def test_curves_are_drawn_over_hours(open_as, runs: list[str]) -> None:
    page = open_as("m-okafor")
    page.goto(f"/experiments/?run={runs[0]}&run={runs[1]}")
    plot = page.get_by_role("img", name="val_loss by step of vit-h-pretrain, vit-h-lr3")
    plot.hover()
    page.get_by_text("at step").first.wait_for()
    page.get_by_role("button", name="Hours", exact=True).click()
    plot.hover()
    page.get_by_text("after", exact=False).first.wait_for()


def test_a_range_on_an_axis_fades_the_other_runs(open_as, runs: list[str]) -> None:
    page = open_as("m-okafor")
    page.goto(f"/experiments/?run={runs[0]}")
    drawing = page.locator(".fw-par__p")
    page.get_by_label("Axis", exact=True).select_option("top1")
    page.get_by_label("From", exact=True).select_option(index=1)
    page.get_by_label("To", exact=True).select_option(index=2)
    page.get_by_text("top1 83.86 to 84.86: 2 runs").wait_for()
    assert drawing.locator("[data-out]").count() == 2
    page.get_by_role("button", name="Clear the ranges").click()
    assert drawing.locator("[data-out]").count() == 0
    drawing.scroll_into_view_if_needed()
    box = drawing.bounding_box()
    right, top = box["x"] + box["width"] - 2, box["y"]
    page.mouse.move(right, top + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(right, top + 1)
    page.mouse.up()
    page.locator("[data-range-chip]").get_by_text(": 2 runs").wait_for()
    page.mouse.click(right, top + 20)
    page.locator("[data-range-chip]").wait_for(state="hidden")


def test_selected_runs_are_tagged(open_as, runs: list[str]) -> None:
    page = open_as("m-okafor")
    page.goto("/experiments/")
    for name in ("vit-h-lr3", "vit-h-mask60"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_text("Tag selected runs").click()
    page.get_by_placeholder("Tag", exact=True).fill("h14")
    page.get_by_role("button", name="Add tag").click()
    page.get_by_text("The tag h14 is added to 2 runs.").wait_for()


def test_the_page_of_a_sweep_follows_its_trials(open_as, sweep: Sweep) -> None:
    page = open_as("m-okafor")
    page.goto(f"/sweeps/{sweep.public_id}/?state=FAILED")
    page.get_by_text("Rungs as a table").click()
    elsewhere(
        lambda: Trial.objects.filter(sweep=sweep, number__in=(22, 23)).update(
            state="FAILED", message="Lost its node."
        )
    )
    page.get_by_text("3 failed", exact=True).wait_for()
    page.get_by_role("cell", name="Lost its node.").first.wait_for()
    assert page.get_by_role("columnheader", name="Cut now").is_visible()
