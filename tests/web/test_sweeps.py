"""Sweeps in the browser: launched from the form, shown with trials and charts, changed, stopped and imported."""

from __future__ import annotations

import csv
import datetime as dt
import html
import re
from collections import Counter
from typing import Any

import pytest
from django.db import transaction
from django.urls import reverse
from django.utils import timezone

from portal.models import Gpu, Job, NodePool, Sweep, Trial, TrialReport, UsageInterval
from portal.services.lifecycle import job_control
from portal.services.sweeps.advance import advance_sweep
from portal.services.sweeps.reports import record_reports
from tests.web.test_pages import count

ASHA = {
    "command": "train --lr {lr} --opt {opt}",
    "searcher": "asha",
    "sweep_parameters": "lr = 1e-4..1e-1 log\nopt = sgd, adam",
    "metric": "loss",
    "max_trials": "30",
    "max_parallel": "25",
    "max_steps": "27",
}
EXPERIMENT = """
name: mnist
entrypoint: python3 train.py
hyperparameters: {lr: {type: double, minval: 0.1, maxval: 0.5}}
searcher: {name: random, metric: loss, max_trials: 3}
workspace: x
"""


@pytest.fixture
def sweep(dataset: Any, client_of: Any, typed: dict[str, str]) -> Sweep:
    """A sweep with 25 trials; those with an even number have reported, and four have ended."""
    answer = client_of("member").post(reverse("launch"), typed | ASHA)
    found = Sweep.objects.get()
    assert answer.status_code == 302 and answer["Location"] == reverse("sweep", args=[found.public_id])
    advance_sweep(found.public_id)
    for trial in found.trials.filter(number__in=range(0, 25, 2)):
        record_reports(trial.job_id, [(1.0, 0.9), (2.0, 0.5 + trial.number / 100)])
    Trial.objects.filter(number__in=(0, 2, 4, 6)).update(state="COMPLETED")
    Trial.objects.filter(number=8).update(state="PRUNED", message="Its loss is not among the best.")
    return found


def page_of(client: Any, address: str) -> str:
    answer = client.get(address)
    assert answer.status_code == 200
    return html.unescape(answer.content.decode())


def test_the_form_creates_a_sweep_as_typed(sweep: Sweep) -> None:
    assert (sweep.searcher, sweep.metric, sweep.max_trials, sweep.max_steps) == ("asha", "loss", 30, 27)
    assert sweep.parameters == {
        "lr": {"low": 1e-4, "high": 0.1, "log": True},
        "opt": {"choices": ["sgd", "adam"]},
    }
    job = sweep.trials.get(number=0).job
    assert job.command[:2] == ["train", "--lr"] and job.command[4] in ("sgd", "adam")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sweep_parameters": "lr"}, "“lr” is not NAME = LOW..HIGH"),
        ({"sweep_parameters": ""}, "Name at least one parameter."),
        ({"sweep_parameters": "lr = 1..2"}, "uses {opt}, which is no parameter of the sweep"),
        ({"max_steps": ""}, "needs the number of steps of a trial"),
        ({"max_parallel": "0"}, "Must be at least 1."),
        ({"searcher": "list", "sweep_parameters": "lr=1\nopt=2"}, "Point 1 does not have"),
    ],
)
def test_a_wrong_sweep_is_refused_on_the_form(
    client_of: Any, typed: dict[str, str], fields: dict[str, str], message: str
) -> None:
    answer = client_of("member").post(reverse("launch"), typed | ASHA | fields)
    assert answer.status_code == 400 and message in html.unescape(answer.content.decode())
    assert not Sweep.objects.exists() and not Job.objects.filter(name__startswith="my run").exists()


def test_the_preview_shows_the_sweep_for_scripts(client_of: Any, typed: dict[str, str]) -> None:
    answer = client_of("member").post(reverse("launch-check"), typed | ASHA)
    shown = html.unescape(answer.content.decode())
    assert (
        "$FAIRWAY_URL/api/v1/sweeps/" in shown and '"searcher": "asha"' in shown and "metric: loss" in shown
    )


def test_a_form_without_a_searcher_submits_one_job(client_of: Any, typed: dict[str, str]) -> None:
    client_of("member").post(reverse("launch"), typed | {"command": "train {lr}"})
    assert Job.objects.get(name="my run").command == ["train", "{lr}"] and not Sweep.objects.exists()


def test_the_page_shows_trials_charts_and_importance(sweep: Sweep, client_of: Any) -> None:
    page = page_of(client_of("member"), reverse("sweep", args=[sweep.public_id]))
    assert re.search(r"5 <span[^>]*>of 30 ended", page) and "20 of at most 25" in page
    for heading in ("Best so far", "Learning curves", "Parameters and loss", "Importance", "page 1 of 2"):
        assert heading in page
    assert len(re.findall(r'class="dot"><title>Trial \d+: 0\.', page)) == 13
    assert "1e-4" not in page and "0.0001..0.1 log" in page
    assert "Its loss is not among the best." in page and "best so far" in page


def test_the_page_shows_the_best_trial_rungs_and_the_bar_of_trials(sweep: Sweep, client_of: Any) -> None:
    page = page_of(client_of("member"), reverse("sweep", args=[sweep.public_id])).replace("\xa0", " ")
    assert "Best, trial 0" in page and "No better since" in page and "Saved by pruning" in page
    assert "4 completed" in page and "1 pruned" in page and "5 to come" in page and "0 of 30 started" in page
    assert "rung 1" in page and "Rungs as a table" in page and "known once three trials have ended" in page
    assert "second best" in page and "third best" in page and "GPUs and quota" in page
    assert "ASHA: minimize" in page and "2 × GPU a trial" in page


def test_the_end_is_forecast_once_trials_have_ended(sweep: Sweep, client_of: Any) -> None:
    hour = timezone.now() - dt.timedelta(hours=1)
    Job.objects.filter(trial__number__in=(0, 2, 4, 10)).update(started_at=hour)
    page = page_of(client_of("member"), reverse("sweep", args=[sweep.public_id]))
    assert "known once three trials have ended" not in page and "4 of 30 started" in page
    assert "Forecasts are p10 to p90" in page


def test_a_trial_is_stopped_and_repeated_on_the_page(sweep: Sweep, client_of: Any) -> None:
    client, address = client_of("member"), reverse("sweep", args=[sweep.public_id])
    page = page_of(client, address)
    assert "Use values" in page and "Cancel" in page and "Resume" in page
    client.post(reverse("stop-trial", args=[sweep.public_id, 1]))
    assert sweep.trials.get(number=1).state == "STOPPED" and "Retry" in page_of(client, address)
    client.post(reverse("repeat-trial", args=[sweep.public_id, 1]))
    assert sweep.trials.get(number=25).parameters == sweep.trials.get(number=1).parameters
    answer = client.post(reverse("resume-trial", args=[sweep.public_id, 0]), follow=True)
    assert "Trial 0 is completed, not paused." in html.unescape(answer.content.decode())
    assert "Stopping trial" not in page_of(client_of("admin"), f"{address}?state=COMPLETED")


def test_a_similar_sweep_is_launched_and_only_in_the_best_region(sweep: Sweep, client_of: Any) -> None:
    Trial.objects.filter(number__in=(10, 12)).update(state="COMPLETED")
    for number, lr in ((0, 0.0012), (2, 0.0034), (4, 0.0021), (6, 0.05), (10, 0.06), (12, 0.07)):
        Trial.objects.filter(number=number).update(parameters={"lr": lr, "opt": "sgd"})
    client = client_of("member")
    page = page_of(client, reverse("sweep", args=[sweep.public_id]))
    assert "0.0012..0.0034 log" in page and "Search only there" in page
    where = f"{reverse('launch')}?kind=training&from_sweep={sweep.public_id}"
    similar = page_of(client, where)
    assert "lr = 0.0001..0.1 log" in similar and "train --lr {lr} --opt {opt}" in similar
    narrow = page_of(client, f"{where}&narrow=1")
    assert "lr = 0.0012..0.0034 log\nopt = sgd" in narrow
    assert client_of("stranger").get(where).status_code == 404


def test_trials_are_sorted_filtered_and_paged(sweep: Sweep, client_of: Any) -> None:
    address, client = reverse("sweep", args=[sweep.public_id]), client_of("member")

    def numbers(query: str) -> list[int]:
        page = page_of(client, f"{address}?{query}")
        return [
            int(each) for each in re.findall(r'<td class="fw-num">(\d+)</td><td><span class="fw-state', page)
        ]

    assert numbers("") == list(range(20)) and numbers("page=2") == list(range(20, 25))
    assert numbers("order=value")[:3] == [0, 2, 4] and numbers("order=-value")[:2] == [24, 22]
    assert numbers("state=COMPLETED") == [0, 2, 4, 6] and numbers("state=nothing&page=x&order=y")[:2] == [
        0,
        1,
    ]


def test_a_sweep_without_values_reports_what_is_missing(client_of: Any, typed: dict[str, str]) -> None:
    client_of("member").post(reverse("launch"), typed | ASHA)
    page = page_of(client_of("member"), reverse("sweep", args=[Sweep.objects.get().public_id]))
    assert "No values yet" in page and "No trials here" in page


def test_the_number_of_queries_does_not_depend_on_the_trials(sweep: Sweep, client_of: Any) -> None:
    address, client = reverse("sweep", args=[sweep.public_id]), client_of("member")
    few = Trial.objects.filter(number__gt=8)
    before = count(client, address)
    TrialReport.objects.filter(trial__in=few).delete()
    few.delete()
    assert count(client, address) == before


def test_the_owner_pauses_resumes_changes_and_stops_a_sweep(sweep: Sweep, client_of: Any) -> None:
    client = client_of("member")
    for act, state in (("pause", "PAUSED"), ("resume", "RUNNING"), ("stop", "STOPPED")):
        if act == "stop":
            client.post(
                reverse("change-sweep", args=[sweep.public_id]), {"max_parallel": "3", "max_trials": "40"}
            )
        client.post(reverse(f"{act}-sweep", args=[sweep.public_id]))
        sweep.refresh_from_db()
        assert sweep.state == state
    assert (sweep.max_parallel, sweep.max_trials) == (3, 40)
    answer = client.post(
        reverse("change-sweep", args=[sweep.public_id]), {"max_parallel": "many"}, follow=True
    )
    assert "Must be between 1 and 1000." in answer.content.decode()
    page = page_of(client, reverse("sweep", args=[sweep.public_id]))
    assert "Stop all trials" not in page and "Stopped by m-okafor." in page


def test_the_list_shows_active_and_ended_sweeps_of_the_project(sweep: Sweep, client_of: Any) -> None:
    assert "No sweeps yet" in page_of(client_of("stranger"), reverse("sweeps"))
    client = client_of("member")
    assert "5 of 30" in page_of(client, reverse("sweeps"))
    assert sweep.public_id in page_of(client, reverse("sweeps") + "?state=active")
    assert "No such sweeps" in page_of(client, reverse("sweeps") + "?state=ended")


def test_an_experiment_file_is_checked_and_then_imported(dataset: Any, client_of: Any) -> None:
    client, where = client_of("member"), reverse("import-sweep")
    rows = {
        "project": dataset.projects["vision"].public_id,
        "environment": dataset.environments["batch"].public_id,
        "experiment": EXPERIMENT,
    }
    checked = html.unescape(client.post(where, rows | {"check": "1"}).content.decode())
    assert "workspace" in checked and "The project is chosen at the import." in checked
    assert not Sweep.objects.exists()
    answer = client.post(where, rows, follow=True)
    sweep = Sweep.objects.get()
    assert (sweep.name, sweep.max_trials) == ("mnist", 3) and sweep.reads_environment
    assert "mnist is created. Ignored: workspace." in answer.content.decode()
    assert sweep.job["max_attempts"] == 6
    wrong = client.post(where, rows | {"experiment": "name: x"})
    assert wrong.status_code == 400 and "It has no entrypoint" in html.unescape(wrong.content.decode())


def test_rest_says_what_an_experiment_file_becomes_and_200_if_nothing_is_created(
    dataset: Any, client_of: Any
) -> None:
    NodePool.objects.update(allow_host_network=True)
    largest = max(Counter(Gpu.objects.values_list("node_id", flat=True)).values())
    file = f"{EXPERIMENT}resources: {{slots_per_trial: {2 * largest}, shm_size: 4g}}\n"
    file = file.replace("python3 train.py", "python3 -m determined.launch.torch_distributed python3 train.py")
    environment = dataset.environments["batch"].public_id
    rows = {"project": "vision", "environment": environment, "experiment": file}
    client = client_of("member")
    checked = client.post("/api/v1/sweeps/import/", rows | {"submit": False}, content_type="application/json")
    body = checked.json()
    assert checked.status_code == 200, body
    job = body["request"]["job"]
    assert (job["tasks"], job["gpus_per_task"], job["launcher"]) == (2, largest, "torchrun")
    assert job["shm_mib"] == 4096 and job["memory_mib"] >= 6144
    assert {each["key"] for each in body["changed"]} == {"resources.slots_per_trial"}
    assert body["sweep"] is None and not Sweep.objects.exists()
    made = client.post("/api/v1/sweeps/import/", rows, content_type="application/json")
    assert made.status_code == 201 and Sweep.objects.get().job["tasks"] == 2


def test_trials_show_their_gpu_hours_and_are_downloaded_as_a_table(sweep: Sweep, client_of: Any) -> None:
    job = sweep.trials.get(number=2).job
    gpu = Gpu.objects.filter(used_milli=0, node__state="ready").first()
    with transaction.atomic():
        row = Job.objects.select_for_update().get(pk=job.pk)
        slot = job_control.RankPlacement(gpu.node, [(gpu.pk, 500)])
        job_control.start_attempt(row, gpu.node.pool, [slot], epoch=1)
    UsageInterval.objects.filter(job=job).update(
        started_at=timezone.now() - dt.timedelta(hours=4), ended_at=timezone.now() - dt.timedelta(hours=1)
    )
    Trial.objects.filter(number=8).update(message="=HYPERLINK(1)")
    client, address = client_of("member"), reverse("sweep", args=[sweep.public_id])
    shown = page_of(client, f"{address}?order=-gpu_hours")
    assert "1.5 GPU-h" in shown.replace("\xa0", " ")
    assert re.search(r'<tbody><tr>\s*<td class="fw-num">2</td>', shown)
    answer = client.get(reverse("sweep-trials-csv", args=[sweep.public_id]))
    assert answer["Content-Disposition"] == f'attachment; filename="{sweep.public_id}-trials.csv"'
    rows = list(csv.DictReader(b"".join(answer.streaming_content).decode().splitlines()))
    assert [row["trial"] for row in rows] == [str(number) for number in range(25)]
    assert (rows[2]["gpu_hours"], rows[2]["loss"], rows[2]["step"]) == ("1.5000", "0.52", "2.0")
    assert (rows[2]["job"], rows[3]["gpu_hours"]) == (job.public_id, "0.0000")
    assert rows[8]["message"] == "'=HYPERLINK(1)"
    assert rows[2]["lr"] == str(sweep.trials.get(number=2).parameters["lr"])
