"""The job list: order, columns, groups, saved views, CSV, and actions on several jobs."""

from __future__ import annotations

import csv
import datetime as dt
import io
import zoneinfo

import pytest
from django.urls import reverse
from django.utils import timezone

from portal.models import BulkOperation, Job, JobAnnotation, JobVerdict, SavedJobView, Sweep, Trial
from portal.services.jobs.bulk import advance_bulk
from portal.web.jobs import job_list
from tests import factories


def names(answer) -> list[str]:
    return [row.job.name for row in answer.context["rows"]]


def text(answer) -> str:
    return " ".join(answer.content.decode().replace("\u00a0", " ").split())


@pytest.fixture
def sweep(dataset) -> Sweep:
    """A sweep whose jobs are three of the member's project."""
    jobs = list(Job.objects.filter(project=dataset.projects["vision"], kind="training").order_by("pk")[:3])
    row = Sweep.objects.create(
        name="lr-search", owner=jobs[0].owner, project=jobs[0].project, environment=jobs[0].environment,
        job={"name": "t"}, max_trials=3, seed=1,
    )  # fmt: skip
    for number, job in enumerate(jobs):
        Trial.objects.create(sweep=row, number=number, parameters={}, job=job)
    return row


@pytest.mark.parametrize("sort", ["", "oldest", "name", "priority", "gpus"])
def test_each_sort_order_is_complete_and_links_back(dataset, client_of, monkeypatch, sort):
    client = client_of("member")
    whole = names(client.get(reverse("jobs"), {"sort": sort}))
    monkeypatch.setattr(job_list, "PAGE_SIZE", 4)
    trail, query = [], f"?sort={sort}"
    while query:
        answer = client.get(reverse("jobs") + query)
        trail.append(names(answer))
        query, newer = answer.context["older"], answer.context["newer"]
    assert [name for page in trail for name in page] == whole and len(trail) > 1
    assert names(client.get(reverse("jobs") + newer)) == trail[-2]
    jobs = Job.objects.filter(project=dataset.projects["vision"])
    if sort == "name":
        assert whole == sorted(whole)
    if sort == "gpus":
        assert whole[0] == max(jobs, key=lambda job: (job.total_gpus, job.pk)).name


def test_columns_are_chosen_in_the_address(client_of):
    client = client_of("member")
    assert ">Exit code</th>" not in text(client.get(reverse("jobs")))
    page = text(client.get(reverse("jobs"), {"col": ["exit", "priority"]}))
    assert ">Exit code</th>" in page and ">Priority</th>" in page and ">Project</th>" not in page


def test_a_sweep_is_one_row_that_opens(client_of, sweep):
    client = client_of("member")
    members = {trial.job.name for trial in sweep.trials.all()}
    answer = client.get(reverse("jobs"))
    assert len(members & set(names(answer))) == 1
    assert "3 jobs of" in text(answer) and "lr-search" in text(answer)
    opened = client.get(reverse("jobs"), {"open": sweep.public_id})
    assert members <= set(names(opened))
    assert {row.job.name for row in opened.context["rows"] if row.is_member} == members
    assert set(names(client.get(reverse("jobs"), {"sweep": sweep.public_id}))) == members
    assert members <= set(names(client.get(reverse("jobs"), {"group": "0"})))


def test_a_group_counts_only_matching_jobs(client_of, sweep):
    job = sweep.trials.first().job
    JobAnnotation.objects.create(job=job, tags=["only"])
    answer = client_of("member").get(reverse("jobs"), {"tag": "only"})
    assert names(answer) == [job.name] and answer.context["rows"][0].group is None
    members = {trial.job.name for trial in sweep.trials.all()}
    for single in ({"sort": "priority"}, {"q": sweep.trials.last().job.name}):
        assert not any(row.group for row in client_of("member").get(reverse("jobs"), single).context["rows"])
    assert members <= set(names(client_of("member").get(reverse("jobs"), {"sort": "priority"})))


def test_why_a_job_waits_and_when_it_starts_is_in_its_row(client_of):
    page = text(client_of("member").get(reverse("jobs"), {"q": "depth-anything-ft"}))
    assert "Why it waits" in page and "Insufficient resources" in page and "Largest free on a node" in page


def test_the_csv_has_all_matching_jobs_and_no_formula(dataset, client_of):
    Job.objects.filter(name="depth-anything-ft").update(name="=1+1")
    answer = client_of("member").get(reverse("jobs-csv"), {"state": "waiting"})
    rows = list(csv.DictReader(io.StringIO(b"".join(answer.streaming_content).decode())))
    assert [row["name"] for row in rows] == ["'=1+1"]
    assert rows[0]["project"] == "vision" and rows[0]["state"] == "PENDING"
    assert "nlp" not in b"".join(client_of("member").get(reverse("jobs-csv")).streaming_content).decode()


# -- saved views -----------------------------------------------------------------------------------


def test_a_view_is_saved_shared_and_deleted(dataset, client_of):
    client = client_of("member")
    form = {"name": "my failures", "query": "?state=failed&col=exit&after=x", "project": "vision"}
    answer = client.post(reverse("save-job-view"), form)
    assert answer["Location"] == "/jobs/?state=failed&col=exit"
    view = SavedJobView.objects.get()
    assert (view.query, view.owner.username) == ("state=failed&col=exit", "m-okafor")
    for person in ("member", "s-varga"):
        assert (
            'href="/jobs/?state=failed&amp;col=exit"'
            in client_of(person).get(reverse("jobs")).content.decode()
        )
    assert "my failures" not in text(client_of("a-lindqvist").get(reverse("jobs")))
    assert "You have a view called my failures." in text(
        client.post(reverse("save-job-view"), form, follow=True)
    )
    assert client_of("a-lindqvist").post(reverse("delete-job-view", args=[view.public_id])).status_code == 404
    client_of("s-varga").post(reverse("delete-job-view", args=[view.public_id]))  # manages the project
    assert not SavedJobView.objects.exists()


def test_a_view_links_only_to_the_job_list(client_of):
    answer = client_of("member").post(reverse("save-job-view"), {"name": "x", "query": "//evil.example/?a=b"})
    assert answer["Location"].startswith("/jobs/?")


# -- several at once -------------------------------------------------------------------------------


def test_a_confirmation_counts_changeable_jobs_and_explains_the_others(dataset, client_of):
    chosen = [
        dataset.jobs[name].public_id for name in ("depth-anything-ft", "dino-abl-b128", "llama-eval-suite")
    ]
    client = client_of("member")
    page = text(client.post(reverse("jobs-bulk"), {"job": chosen, "action": "priority"}))
    assert "Set the priority of 1 of 3 selected jobs?" in page
    assert "It no longer waits; only a waiting job can be changed." in page
    assert "1 selected job cannot be found, or you may not see it." in page
    confirmed = {"job": chosen, "action": "priority", "confirmed": "1"}
    answer = client.post(reverse("jobs-bulk"), confirmed | {"priority": "lots"})
    assert answer.status_code == 400 and "is not a whole number" in text(answer)
    assert "1 job changed" in text(client.post(reverse("jobs-bulk"), confirmed | {"priority": "-5"}))
    assert Job.objects.get(name="depth-anything-ft").priority == -5
    page = text(client.post(reverse("jobs-bulk"), confirmed | {"priority": "5"}))
    assert "Only managers of the project may raise a priority above 0." in page


def test_an_action_that_goes_on_shows_its_progress_until_it_is_complete(dataset, client_of, monkeypatch):
    chosen = [dataset.jobs[name].public_id for name in ("depth-anything-ft", "dino-abl-b128")]
    client = client_of("member")
    with monkeypatch.context() as patched:
        patched.setattr(
            "portal.web.jobs.job_list.advance_in_request", lambda act: act
        )  # the request's time is over
        answer = client.post(
            reverse("jobs-bulk"), {"job": chosen, "action": "priority", "confirmed": "1", "priority": "-5"}
        )
    act = BulkOperation.objects.get()
    assert answer.status_code == 302 and answer["Location"] == reverse("bulk-operation", args=[act.public_id])
    page = client.get(answer["Location"])
    assert "0 of 2 jobs processed, 0 changed." in text(page) and "every 1s" in page.content.decode()
    advance_bulk(act)
    live = client.get(answer["Location"], headers={"HX-Request": "true"})
    assert "2 of 2 jobs processed, 1 changed." in text(live)
    assert "It no longer waits; only a waiting job can be changed." in text(live)
    assert "every 1s" not in live.content.decode() and "<html" not in live.content.decode()
    assert client_of("a-lindqvist").get(answer["Location"]).status_code == 404


# -- one job ---------------------------------------------------------------------------------------


def test_a_waiting_job_is_changed_on_its_page(dataset, client_of):
    job, client = Job.objects.get(name="depth-anything-ft"), client_of("member")
    address = reverse("job-change", args=[job.public_id])
    form = client.get(address).context["form"]
    data = {name: form[name].value() for name in form.fields if form[name].value() not in (None, False)}
    preview = client.post(address, data | {"priority": "3"}, headers={"HX-Request": "true"})
    assert "Only managers of the project may raise a priority above 0." in text(preview)
    answer = client.post(address, data | {"time_limit_s": "90 min", "priority": "1000"})
    assert answer.status_code == 400 and answer.context["form"].errors.keys() == {"priority"}
    assert answer.context["form"]["time_limit_s"].value() == "90 min"
    client.post(address, data | {"time_limit_s": "90 min"})
    job.refresh_from_db()
    assert job.time_limit_s == 5400
    stale = client.post(address, data | {"time_limit_s": "2 h"}, follow=True)
    assert "The job was changed meanwhile" in text(stale)
    runs = reverse("job-change", args=[dataset.jobs["vit-h-pretrain"].public_id])
    assert "Not changed. It has started" in text(client.post(runs, data, follow=True))


def test_the_suggested_change_can_be_made_in_place_while_a_job_has_not_run(dataset, client_of):
    job, client = Job.objects.get(name="depth-anything-ft"), client_of("member")
    page, form = (reverse(name, args=[job.public_id]) for name in ("job", "job-change"))
    assert f'href="{form}?suggested=1"' in text(client.get(page))
    assert f'href="{form}?suggested=1"' not in text(client_of("a-lindqvist").get(page))  # may not change it
    shown = client.get(f"{form}?suggested=1").context["form"]
    values = {name: shown[name].value() for name in shown.fields}
    assert values["gpus_per_task"] == 4 and values["gpu_model"] == "NVIDIA A100-SXM4-80GB"
    names = dict(shown.fields["gpu_model"].choices)
    assert {"", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"} <= names.keys() and names[""] == "Any"
    assert client.get(form).context["form"]["gpus_per_task"].value() == 8
    client.post(form, {name: value for name, value in values.items() if value not in (None, False)})
    job.refresh_from_db()
    assert (job.gpus_per_task, job.gpu_model) == (4, "NVIDIA A100-SXM4-80GB")
    assert "Changed by m-okafor" in text(client.get(reverse("job-scheduling", args=[job.public_id])))
    anything = {"kind": "other_model", "message": "It would start now.", "fields": {"gpu_model": None}}
    JobVerdict.objects.filter(job=job).update(suggestion=anything)
    assert client.get(f"{form}?suggested=1").context["form"]["gpu_model"].value() == ""
    Job.objects.filter(pk=job.pk).update(attempt_count=1)  # it has run: its GPUs stay
    assert "suggested=1" not in text(client.get(page))
    assert client.get(f"{form}?suggested=1").context["form"].initial["gpu_model"] == "NVIDIA A100-SXM4-80GB"


def test_the_queue_has_buttons_that_move_own_jobs(dataset, client_of):
    job, client = Job.objects.get(name="depth-anything-ft"), client_of("member")
    page = text(client.get(reverse("queue")))
    assert 'aria-label="Move depth-anything-ft up"' in page and "To front" not in page
    answer = client.post(reverse("job-move", args=[job.public_id]), {"to": "up", "query": "?show=mine"})
    assert answer["Location"] == f"/queue/?show=mine#job-{job.public_id}"
    assert f"To front of vision: {job.name}" in text(client_of("admin").get(reverse("queue")))
    factories.job(job.owner, job.project, job.environment, name="other")
    client_of("admin").post(reverse("job-move", args=[job.public_id]), {"to": "front"})
    job.refresh_from_db()
    assert job.priority > 0


@pytest.mark.parametrize(
    ("p10_min", "p90_min", "expected"),
    [(-5, 30, ">by <"), (-30, -5, "overdue since"), (10, 30, "</time> – <time")],
)
def test_a_forecast_does_not_start_in_the_past(client_of, p10_min, p90_min, expected):
    now = timezone.now()
    p10, p90 = (now + dt.timedelta(minutes=minutes) for minutes in (p10_min, p90_min))
    verdicts = JobVerdict.objects.filter(job__name="depth-anything-ft")
    verdicts.update(p10_at=p10, p50_at=p10, p90_at=p90, forecast_at=now - dt.timedelta(hours=1))
    client = client_of("member")
    assert expected in text(client.get(reverse("jobs"), {"q": "depth-anything-ft"}))
    answer = client.get(reverse("queue"))
    assert expected in text(answer)
    (bar,) = [bar for lane, *_ in answer.context["plot"]["lanes"] if lane.gpus is None for bar in lane.bars]
    assert bar.since >= now and bar.low >= now


def test_times_of_a_verdict_are_in_the_zone_of_the_reader(client_of):
    now = timezone.now()
    message = f"Not before {now:%Y-%m-%d %H:%M} UTC <b>."
    JobVerdict.objects.filter(job__name="depth-anything-ft").update(message=message)
    page = text(client_of("member").get(reverse("queue")))
    local = now.astimezone(zoneinfo.ZoneInfo("Europe/Berlin"))
    assert f"{local:%H:%M}</time> &lt;b&gt;." in page
