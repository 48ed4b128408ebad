"""The list and the page of a job: filters, pages, what each state says, and the acts on it."""

from __future__ import annotations

import datetime as dt
import html
import io
import json
import re
import time
import zipfile
from itertools import pairwise

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from portal.access import Permission, can, permitted_job_ids
from portal.domain.jobs.reasons import EndReason
from portal.domain.states import JobKind
from portal.models import Attempt, AttemptProgress, Forecast, Job, JobEvent, JobVerdict
from portal.selectors.jobs.logs.line_assembly import LogLine
from portal.selectors.jobs.logs.lines import displayed_text
from portal.selectors.jobs.progress import job_workload_fingerprint
from portal.services.jobs.task_reports import record_checkpoint, record_progress
from portal.services.lifecycle import job_control
from portal.web.display.formatting import NBSP, rate
from portal.web.display.job_rows import job_rows, verdict_label
from portal.web.jobs import job_list as job_list
from portal.web.jobs.job.failure import exit_name
from portal.web.jobs.job.overview import dedupe_events
from tests import factories
from tests.web.dataset import start


def words(answer) -> str:
    return " ".join(answer.content.decode().split())


def names(answer) -> list[str]:
    return [row.job.name for row in answer.context["rows"]]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("state=waiting", {"depth-anything-ft"}),
        ("state=failed", {"dino-abl-b128", "typo-in-command"}),
        ("kind=workspace", {"attn-probe", "label-qa", "depth-eda"}),
        ("q=vit-h", {"vit-h-pretrain", "vit-h-probe-in1k"}),
        ("q=vit-h&state=running", {"vit-h-pretrain"}),
        ("project=nlp", set()),
        ("state=nonsense&kind=workspace", {"attn-probe", "label-qa", "depth-eda"}),
    ],
)
def test_filters_are_in_the_url(client_of, query, expected):
    assert set(names(client_of("member").get(f"{reverse('jobs')}?{query}"))) == expected


def test_an_empty_list_explains_why_and_what_to_do(client_of):
    page = client_of("member").get(f"{reverse('jobs')}?project=nlp&state=failed").content.decode()
    assert "2\u00a0filters: state is failed, project is nlp." in page
    assert "Clear filters" in page


def test_pages_are_complete_and_link_back(dataset, client_of, monkeypatch):
    monkeypatch.setattr(job_list, "PAGE_SIZE", 4)
    client = client_of("member")
    everything = names(client.get(reverse("jobs") + "?state="))
    first = client.get(reverse("jobs"))
    assert names(first) == everything
    seen, older, trail = [], "?", []
    while older:
        answer = client.get(reverse("jobs") + older)
        trail.append(names(answer))
        seen += names(answer)
        older, newer = answer.context["older"], answer.context["newer"]
    assert len(seen) == len(set(seen)) == Job.objects.filter(project=dataset.projects["vision"]).count()
    back = client.get(reverse("jobs") + newer)
    assert names(back) == trail[-2]


def test_a_cursor_reveals_nothing_of_hidden_jobs(dataset, client_of):
    member = client_of("member")
    theirs = Job.objects.exclude(project=dataset.projects["vision"]).order_by("id")[2]
    for word in ("after", "before"):
        missing = names(member.get(reverse("jobs"), {word: "nosuchjob2"}))
        assert names(member.get(reverse("jobs"), {word: theirs.public_id})) == missing


def test_every_state_has_its_icon_its_label_and_its_text(dataset):
    user = dataset.people["r-castellan"]
    rows = {row.job.name: row for row in job_rows(user, Job.objects.all())}
    looks = {name: row.state_display for name, row in rows.items()}
    assert looks["vit-h-pretrain"] == ("running", "Running")
    assert looks["depth-anything-ft"] == ("waiting", "Waiting")
    assert looks["grasp-rl-eval"] == ("waiting", "Project limit")
    assert looks["depth-eda"] == ("starting", "Starting")
    assert looks["grasp-rl"] == ("unreachable", "Unreachable")
    assert looks["dino-abl-b128"] == ("failed", "Failed")
    assert looks["vit-h-probe-in1k"] == ("done", "Completed")
    assert all(row.summary for row in rows.values())
    assert "a100-1 does not answer" in rows["grasp-rl"].summary
    assert rows["vit-h-pretrain"].gpus.replace("\u00a0", " ") == "16 × H200"
    assert rows["attn-probe"].ready
    assert not rows["depth-eda"].ready


def test_the_failure_box_names_the_exit_code_and_a_remedy(dataset, client_of):
    page = (
        client_of("member")
        .get(reverse("job", args=[dataset.jobs["dino-abl-b128"].public_id]))
        .content.decode()
    )
    for words in ("It ran out of memory", "exit 137 (SIGKILL)", "Request more memory, such as 96"):
        assert words in page
    (link,) = re.findall(r'href="(/launch/[^"]*memory_mib[^"]*)"', page)
    form = client_of("member").get(html.unescape(link)).context["form"]
    assert form["memory_gib"].value() == "96"
    assert form["name"].value() == "dino-abl-b128"
    page = (
        client_of("member")
        .get(reverse("job", args=[dataset.jobs["typo-in-command"].public_id]))
        .content.decode()
    )
    assert "The command was not found" in page
    assert "pyhton" in page


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, ""),
        (0, "exit 0"),
        (3, "exit 3"),
        (127, "exit 127 (the command was not found)"),
        (139, "exit 139 (SIGSEGV)"),
        (138, "exit 138 (SIGUSR1)"),
        (-6, "exit -6 (SIGABRT)"),
        (128, "exit 128"),
        (192, "exit 192 (SIGRTMIN+30)"),
        (255, "exit 255"),
    ],
)
def test_exit_codes_have_names(code, words):
    assert exit_name(code) == words


def test_a_waiting_job_explains_why_with_numbers(dataset, client_of):
    page = (
        client_of("member")
        .get(reverse("job", args=[dataset.jobs["depth-anything-ft"].public_id]))
        .content.decode()
    )
    assert "Needs 8 H200 on one node. The most that is free on one is 2." in page
    assert "<dt>Largest free on a node</dt><dd>2</dd>" in page
    assert "1\u00a0job, in projects you may not see" in page
    assert "llama-eval-suite" not in page  # of another project


def test_a_submitted_workspace_is_announced_once_with_the_next_steps(dataset, client_of):
    fresh = Job.objects.get(pk=dataset.jobs["depth-anything-ft"].pk)
    Job.objects.filter(pk=fresh.pk).update(kind=JobKind.WORKSPACE.value)
    JobVerdict.objects.filter(job=fresh).delete()
    page = client_of("member").get(reverse("job", args=[fresh.public_id]))
    assert [phase.name for phase in page.context["phases"]] == [
        "Queued",
        "Reserved",
        "Starting",
        "Server",
        "Running",
    ]
    assert page.content.decode().count("Just submitted; the next cycle considers it.") == 1


def test_cancelling_a_waiting_job_ends_it(dataset, client_of):
    job = dataset.jobs["depth-anything-ft"]
    answer = client_of("member").post(reverse("job-cancel", args=[job.public_id]), follow=True)
    job.refresh_from_db()
    assert job.state == "CANCELLED"
    assert "depth-anything-ft is stopped." in answer.content.decode()


def test_stopping_a_running_job_notifies_its_node(dataset, client_of):
    job = dataset.jobs["vit-h-pretrain"]
    answer = client_of("member").post(reverse("job-cancel", args=[job.public_id]), follow=True)
    job.refresh_from_db()
    assert (job.state, job.desired_state) == ("RUNNING", "cancelled")
    assert Attempt.objects.get(job=job).state == "COMPLETING"
    page = answer.content.decode()
    assert "is stopping" in page
    assert "Stopping</span>" in page


def test_each_of_several_jobs_is_stopped_with_its_own_permission(dataset, client_of):
    mine, theirs = dataset.jobs["depth-anything-ft"], dataset.jobs["llama-eval-suite"]
    chosen = {"job": [mine.public_id, theirs.public_id], "back": "/jobs/?state=waiting", "action": "stop"}
    page = words(client_of("member").post(reverse("jobs-bulk"), chosen))
    assert "Stop 1 of 2 selected jobs?" in page.replace("\u00a0", " ")
    mine.refresh_from_db()
    assert mine.state == "PENDING"
    page = words(client_of("member").post(reverse("jobs-bulk"), {**chosen, "confirmed": "1"}))
    assert "1 job stopped" in page.replace("\u00a0", " ") and "/jobs/?state=waiting" in page
    mine.refresh_from_db()
    theirs.refresh_from_db()
    assert (mine.state, theirs.state) == ("CANCELLED", "PENDING")


def test_after_several_were_stopped_one_stays_here(client_of):
    answer = client_of("member").post(
        reverse("jobs-bulk"), {"back": "https://evil.example/", "action": "stop"}
    )
    assert answer["Location"] == reverse("jobs")


def test_hold_and_release(dataset, client_of):
    job = dataset.jobs["depth-anything-ft"]
    client = client_of("member")
    page = client.post(reverse("job-hold", args=[job.public_id]), {"held": "1"}, follow=True).content.decode()
    assert "Held: it cannot start until it is released." in page
    client.post(reverse("job-hold", args=[job.public_id]), {"held": "0"})
    job.refresh_from_db()
    assert not job.held


def test_start_again_is_a_new_job_with_the_same_request(dataset, client_of):
    job = dataset.jobs["dino-abl-b128"]
    answer = client_of("member").post(reverse("job-resubmit", args=[job.public_id]))
    fresh = Job.objects.exclude(pk=job.pk).get(name=job.name)
    assert answer["Location"] == reverse("job", args=[fresh.public_id])
    assert (fresh.command, fresh.gpus_per_task, fresh.state) == (job.command, 4, "PENDING")


def test_a_running_job_cannot_start_again(dataset, client_of):
    answer = client_of("member").post(
        reverse("job-resubmit", args=[dataset.jobs["vit-h-pretrain"].public_id])
    )
    assert answer.status_code == 409
    assert "The job has not ended." in answer.content.decode()


def test_open_hands_over_a_ticket_to_the_workspaces_own_origin(dataset, client_of, settings):
    job = dataset.jobs["attn-probe"]
    client = client_of("member")
    answer = client.post(reverse("job-open", args=[job.public_id]))
    page = answer.content.decode()
    assert answer.status_code == 200
    assert f"ws-{job.public_id}.{settings.APPS_DOMAIN}" in page
    assert answer["Referrer-Policy"] == "strict-origin"
    assert f"*.{settings.APPS_DOMAIN}" in answer["Content-Security-Policy"]
    early = client.post(reverse("job-open", args=[dataset.jobs["depth-eda"].public_id]))
    assert early.status_code == 409
    admin = client_of("admin").post(reverse("job-open", args=[job.public_id]))
    assert admin.status_code == 403


def test_the_terminal_tab_follows_the_state_of_the_job(dataset, client_of):
    job = dataset.jobs["vit-h-pretrain"]
    terminal = f'href="{reverse("job-terminal", args=[job.public_id])}"'

    def tabs() -> str:
        part = client_of("member").get(reverse("job", args=[job.public_id]), headers={"HX-Request": "true"})
        page = part.content.decode()
        return page[page.index('<nav id="job-tabs" hx-swap-oob="innerHTML">') : page.index("</nav>")]

    assert terminal in tabs()
    Job.objects.filter(pk=job.pk).update(state="SUSPENDED")
    assert terminal not in tabs() and "Metrics" in tabs()


def test_log_lines_continue_from_their_cursor(dataset, client_of):
    job = dataset.jobs["vit-h-pretrain"]
    client = client_of("member")
    address = reverse("job-log-lines", args=[job.public_id])
    first = client.get(address, {"rank": "1"}).json()
    assert first["lines"][-1][1].startswith("step 66,198")
    assert client.get(address, {"rank": "1", "cursor": first["cursor"]}).json()["lines"] == []
    assert client.get(address, {"rank": "7"}).status_code == 404
    whole = client.get(reverse("job-log-download", args=[job.public_id]), {"rank": "1"})
    assert b"".join(whole.streaming_content).startswith(b"step 66,000")
    assert "attachment" in whole["Content-Disposition"]


def test_logs_of_all_ranks_are_one_zip_file(dataset, client_of):
    job = dataset.jobs["vit-h-pretrain"]
    client, address = client_of("member"), reverse("job-log-download", args=[job.public_id])
    answer = client.get(address, {"rank": ""})
    archive = zipfile.ZipFile(io.BytesIO(b"".join(answer.streaming_content)))
    assert archive.testzip() is None
    assert archive.namelist() == ["rank-0.log", "rank-1.log"]
    assert archive.read("rank-1.log").startswith(b"step 66,000")
    assert client.get(address, {"rank": "7,8"}).status_code == 404


def test_charts_contain_only_the_gpus_of_the_job(dataset, client_of):
    job = dataset.jobs["vit-h-pretrain"]
    data = client_of("member").get(reverse("job-series", args=[job.public_id]), {"span": "1h"}).json()
    assert len(data["lines"]["gpu"]) == 16
    assert {later - earlier for earlier, later in pairwise(data["at"])} == {60}
    assert 50 < len(data["at"]) < 62  # the samples end when the data set was made, which may be minutes ago
    assert data["limits"]["cpu"] == 9600
    none = (
        client_of("member")
        .get(reverse("job-series", args=[dataset.jobs["depth-anything-ft"].public_id]))
        .json()
    )
    assert none["at"] == []


def test_fragments_are_the_page_without_its_frame(dataset, client_of):
    client = client_of("member")
    for address in (
        reverse("home"),
        reverse("jobs"),
        reverse("job", args=[dataset.jobs["vit-h-pretrain"].public_id]),
    ):
        part = client.get(address, headers={"HX-Request": "true"}).content.decode()
        assert "<html" not in part
        assert "vit-h-pretrain" in part


def test_a_fragment_requested_after_sign_out_leads_to_sign_in(dataset, client_of):
    answer = client_of().get(reverse("home"), headers={"HX-Request": "true"})
    assert answer.status_code == 401
    assert answer["HX-Redirect"] == "/sign-in/"


def test_a_new_user_sees_the_first_steps(dataset, client_of):
    page = client_of("stranger").get(reverse("home")).content.decode()
    assert "No workspaces" in page
    assert "You are in no project yet." in page
    empty = factories.user("newcomer")
    dataset.people["newcomer"] = empty
    assert "Set a password" in client_of("newcomer").get(reverse("home")).content.decode()


def test_charts_and_log_appear_with_the_attempt(dataset, client_of):
    job = dataset.jobs["depth-anything-ft"]
    client = client_of("member")
    address = reverse("job", args=[job.public_id])
    assert "data-log-lines" not in client.get(address).content.decode()
    running = dataset.jobs["vit-h-pretrain"]
    address = reverse("job", args=[running.public_id])
    fresh = client.get(f"{address}?shown=0", headers={"HX-Request": "true"}).content.decode()
    assert 'id="job-work" hx-swap-oob' in fresh
    assert "data-log-lines" in fresh
    same = client.get(f"{address}?shown=1", headers={"HX-Request": "true"}).content.decode()
    assert "data-log-lines" not in same


def test_an_end_is_announced_once(dataset, client_of):
    page = client_of("member").get(reverse("job", args=[dataset.jobs["typo-in-command"].public_id]))
    reported = [event.message for event in page.context["events"]]
    assert reported.count("The command ended with exit code 127.") == 1


def test_the_rights_to_many_jobs_are_those_to_each(dataset):
    """And it takes two queries, however many projects the jobs are of."""
    jobs = list(Job.objects.select_related("project__parent"))
    child = factories.project("child-of-vision", parent=dataset.projects["vision"])
    jobs += [factories.job(dataset.people["m-okafor"], child, dataset.environments["batch"])]
    for user in dataset.people.values():
        for verb in Permission:
            with CaptureQueriesContext(connection) as seen:
                found = permitted_job_ids(user, verb, jobs)
            assert len(seen) <= 2
            assert found == {job.pk for job in jobs if can(user, verb, job)}, (user, verb)


def test_escape_sequences_are_removed_from_a_line_in_one_pass():
    def line(text: str) -> LogLine:
        return LogLine(at=None, stream="stdout", text=text, cursor=0)

    coloured = "\x1b[31mred\x1b[0m \x1b]0;title\x07and \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ <b>"
    assert displayed_text(line(coloured)) == "red and link <b>"
    assert displayed_text(line("50 %\r100 %\r")) == "100 %"
    assert displayed_text(line("50 %\x1b[1;3")) == "50 %"
    began = time.process_time()
    for _ in range(20):
        displayed_text(line("\x1b]" * 32_000))
    assert time.process_time() - began < 1


def test_the_preempting_job_is_named_only_to_those_who_may_see_it(dataset, client_of):
    victim, winner = dataset.jobs["moe-7b-sft"], dataset.jobs["depth-anything-ft"]
    stop = job_control.StopRequest(
        victim.attempts.get().pk, EndReason.RECLAIMED, for_job=Job.objects.get(pk=winner.pk)
    )
    job_control.request_stops([stop])

    def page(kind: str, job: Job) -> str:
        answer = client_of(kind).get(reverse("job", args=[job.public_id]))
        return " ".join(answer.content.decode().split())

    asked = page("admin", victim)
    assert f'It is being preempted by <a href="/jobs/{winner.public_id}/">depth-anything-ft</a>' in asked
    assert "Preempted jobs" in page("admin", winner) and "moe-7b-sft" in page("admin", winner)
    theirs = page("a-lindqvist", victim)  # of nlp, not of vision
    assert "It is being preempted by a job of a project that you may not see" in theirs
    assert "depth-anything" not in theirs and winner.public_id not in theirs and "vision" not in theirs
    ours = page("member", winner)  # of vision, not of nlp
    assert "Preempted jobs" in ours and "a job of a project that you may not see" in ours
    assert "moe-7b-sft" not in ours and victim.public_id not in ours


def test_rest_names_the_preempting_job_only_to_those_who_may_see_it(dataset, client_of):
    victim, winner = dataset.jobs["moe-7b-sft"], dataset.jobs["depth-anything-ft"]
    stop = job_control.StopRequest(
        victim.attempts.get().pk, EndReason.RECLAIMED, for_job=Job.objects.get(pk=winner.pk)
    )
    job_control.request_stops([stop])

    def reported(kind: str, job: Job) -> dict:
        return client_of(kind).get(f"/api/v1/jobs/{job.public_id}/").json()

    named = {
        "job": {"id": winner.public_id, "name": winner.name},
        "project": {"id": winner.project.public_id, "name": "vision"},
    }
    assert reported("admin", victim)["attempts"][0]["preempted_for"] == named
    assert reported("a-lindqvist", victim)["attempts"][0]["preempted_for"] == {"job": None, "project": None}
    (made,) = reported("admin", winner)["preempted_jobs"]
    assert (made["job"]["id"], made["reason"], made["ended_at"]) == (victim.public_id, "reclaimed", None)
    (hidden,) = reported("member", winner)["preempted_jobs"]
    assert (hidden["job"], hidden["project"], hidden["reason"]) == (None, None, "reclaimed")


def test_a_waiting_job_shows_nodes_by_free_gpus_and_the_places_of_jobs_ahead(dataset, client_of):
    job, hidden = dataset.jobs["depth-anything-ft"], dataset.jobs["llama-eval-suite"]
    first = factories.job(job.owner, job.project, job.environment, pool=job.pool, name="probe")
    now = timezone.now()
    JobVerdict.objects.create(
        job=first,
        code="insufficient_resources",
        message="None is free.",
        decided_at=now,
        code_since=now,
        p10_at=now + dt.timedelta(hours=1),
        p50_at=now + dt.timedelta(hours=2),
        p90_at=now + dt.timedelta(hours=3),
    )
    details = {"needed_gpus": 8.0, "free_gpus": 5, "nodes_with_0_free": 1, "nodes_with_1_free": 3}
    JobVerdict.objects.filter(job=job).update(
        details=details, jobs_ahead=[hidden.public_id, first.public_id], p10_at=None
    )
    shown = words(client_of("member").get(reverse("job", args=[job.public_id])))
    plain = shown.replace("\xa0", " ").replace("&nbsp;", " ")
    rows = re.findall(r'(\d) free</span><i data-css="p:(\d+)"[^>]*></i><span>(\d) nodes?<', plain)
    assert rows == [("1", "75", "3"), ("0", "25", "1")] and "it needs 8 GPUs on one node" in plain
    assert "Nodes with" not in shown and "Free GPUs</dt><dd>5<" in shown
    (ahead,) = re.findall(r'<tr><td class="fw-num" data-l="Position">(.*?)</tr>', shown)
    assert ahead.startswith("2<") and "probe" in ahead and hidden.name not in shown
    assert "Insufficient resources" in ahead and ahead.count("<time") == 3  # waits since; starts from, to


def test_a_training_run_shows_its_last_checkpoint_or_that_none_was_reported(dataset, client_of):
    job, client = dataset.jobs["vit-h-pretrain"], client_of("member")

    def page(tab: str = "job") -> str:
        return words(client.get(reverse(tab, args=[job.public_id])))

    def reported() -> str | None:
        return client.get(f"/api/v1/jobs/{job.public_id}/").json()["attempts"][0]["checkpoint_at"]

    running_at = timezone.now() - dt.timedelta(minutes=30)
    Attempt.objects.filter(job=job).update(running_at=running_at)
    assert re.search(
        r"Last checkpoint</dt><dd>none<span [^>]*>8\.0 GPU-h lost if it stopped now\. A program reports one",
        page(),
    )
    assert reported() is None
    attempt = Attempt.objects.select_related("job").get(job=job)
    now = timezone.now()
    assert record_checkpoint(attempt, 360.0, polled_at=now)
    shown_page = page()
    lost = r"1\.6\d? GPU-h lost if it stopped now"  # 16 GPUs for six minutes
    assert re.search(
        rf"Last checkpoint</dt><dd><time [^>]*>6 min( \d+ s)? ago</time><span [^>]*>{lost}", shown_page
    ), shown_page
    assert "A program reports one" not in shown_page
    saved_at = now - dt.timedelta(seconds=360)
    assert reported() == saved_at.isoformat().replace("+00:00", "Z")
    assert saved_at.isoformat(timespec="seconds") in page("job-run")


def test_a_job_shows_progress_and_rate(dataset, client_of):
    job, client = dataset.jobs["vit-h-pretrain"], client_of("member")

    def page(tab: str = "job") -> str:
        return words(client.get(reverse(tab, args=[job.public_id])))

    def reported() -> dict | None:
        return client.get(f"/api/v1/jobs/{job.public_id}/").json()["attempts"][0]["progress"]

    def report(done: float, ago_s: float) -> None:
        rows = Attempt.objects.select_related("progress", "job__project", "job__environment")
        assert record_progress(rows.get(job=job), 0, done, ago_s, polled_at=now)

    now = timezone.now()
    assert "Completed units" not in page() and reported() is None
    report(60_000, 120.0)
    assert re.search(
        r"Completed units</dt><dd>60,000<span [^>]*>the rate follows after a minute of reports, "
        r"reported <time [^>]*>2 min( \d+ s)? ago</time>",
        page(),
    )
    assert reported()["per_s"] is None
    report(66_000, 20.0)
    assert re.search(r"66,000<span [^>]*>60 a second, reported <time [^>]*>\d+ s ago</time>", page())
    assert "60 a second" in page("job-run")
    said = reported()
    assert (said["done"], said["previous_done"], said["per_s"], said["gpus"]) == (66_000, 60_000, 60.0, 16)
    assert said["layout"] == {"gpu_model": "NVIDIA H200", "nodes": 2, "islands": 2, "levels": 0}


def test_a_job_shows_where_jobs_like_it_ran_faster(dataset, client_of):
    job, client = dataset.jobs["vit-h-pretrain"], client_of("member")

    def faster() -> tuple[bool, list[dict]]:
        reported = client.get(f"/api/v1/jobs/{job.public_id}/").json()["layouts"]
        return "Faster layouts for similar jobs" in words(
            client.get(reverse("job", args=[job.public_id]))
        ), reported

    now, row = timezone.now(), job.attempts.get()
    for number in range(6):
        alike = Job.objects.create(
            project=job.project,
            owner=job.owner,
            environment=job.environment,
            command=job.command,
            state="COMPLETED",
        )
        attempt = Attempt.objects.create(
            job=alike, number=1, pool=row.pool, leader_epoch=1, state="COMPLETED"
        )
        model, per_s = (("NVIDIA H200", 12.0), ("NVIDIA A100-SXM4-80GB", 0.1))[number % 2]
        AttemptProgress.objects.create(
            attempt=attempt, rank=0, start_units=0, start_at=now - dt.timedelta(seconds=100),
            completed_units=100 * per_s, reported_at=now,
            workload_fingerprint=job_workload_fingerprint(job), gpus=16, gpu_model=model, nodes=2,
            islands=4, levels=1,
        )  # fmt: skip
        assert faster() == (False, [])  # they have not ended
    Attempt.objects.filter(job__name="").update(ended_at=now)
    shown_there, layouts = faster()
    assert shown_there
    assert [(one["layout"]["gpu_model"], one["percent"], one["attempts"]) for one in layouts] == [
        ("NVIDIA H200", 100, 3),
        ("NVIDIA A100-SXM4-80GB", 5, 3),
    ]
    assert layouts[0]["per_s"] == 12.0
    page = words(client.get(reverse("job", args=[job.public_id])))
    assert "H200 on 2 nodes, 4 NVLink islands, 1 fabric level apart" in page
    assert "12 a second" in page and "6 a minute, 5&nbsp;% of the fastest" in page


@pytest.mark.parametrize(
    ("per_s", "said"),
    [(340, "340 a second"), (12_345.6, "12,346 a second"), (0.5, "0.5 a second"), (0.04, "2.4 a minute"),
     (0.0001, "0.36 an hour"), (0.0, "0 an hour")],
)  # fmt: skip
def test_a_rate_reads_in_the_unit_that_suits_it(per_s: float, said: str) -> None:
    assert rate(per_s).replace(NBSP, " ") == said


def test_a_job_that_cannot_be_preempted_has_no_checkpoint_hint(dataset, client_of):
    client = client_of("member")
    Job.objects.filter(name="vit-h-pretrain").update(preemptible=False)
    for name in ("vit-h-pretrain", "attn-probe", "depth-anything-ft", "vit-h-probe-in1k"):
        page = words(client.get(reverse("job", args=[dataset.jobs[name].public_id])))
        assert "A program reports one" not in page, name


def test_a_waiting_job_shows_its_start_interval_and_reliability(dataset, client_of):
    job = dataset.jobs["depth-anything-ft"]
    address = reverse("job", args=[job.public_id])
    assert "No estimate yet" in words(client_of("member").get(address))
    now = timezone.now()
    times = {
        "p10_at": now + dt.timedelta(minutes=20),
        "p50_at": now + dt.timedelta(minutes=35),
        "p90_at": now + dt.timedelta(minutes=70),
    }
    JobVerdict.objects.filter(job=job).update(forecast_at=now, **times)
    made = Forecast.objects.create(job=job, made_at=now - dt.timedelta(hours=1), is_first=True, **times)
    page = words(client_of("member").get(address))
    assert "Forecasts should hold in 8 of 10 cases" in page and "None was scored in the last 30 days" in page
    assert "Forecast history" not in page  # there is only the first
    Forecast.objects.create(
        job=dataset.jobs["moe-7b-sft"],
        made_at=now,
        is_first=True,
        started_at=now,
        covered=True,
        score_s=9,
        **times,
    )
    Forecast.objects.create(job=job, made_at=now, **times | {"p90_at": now + dt.timedelta(hours=2)})
    page = words(client_of("member").get(address))
    assert '<b class="fw-medium">100&nbsp;%</b> held' in page and "Forecast history" in page
    assert "The first forecast." in page
    JobVerdict.objects.filter(job=job).update(p90_at=made.made_at)
    assert "The forecast interval has passed" in words(client_of("member").get(address))


@pytest.mark.parametrize(
    ("code", "foreseen", "heading", "words_of_it"),
    [
        ("unsatisfiable", True, "No forecast", "This cluster cannot satisfy its request."),
        ("volume_unavailable", True, "No forecast", "The node of its home volume accepts no jobs"),
        ("dependency", False, "After its dependencies", "is predicted after its dependencies have ended"),
        ("project_limit", True, "No forecast", "No start is known"),
        ("project_limit", False, "No estimate yet", "too few of them have ended so far"),
    ],
)
def test_a_missing_forecast_has_a_reason(dataset, client_of, code, foreseen, heading, words_of_it):
    job = dataset.jobs["depth-anything-ft"]
    now = timezone.now()
    stale = (
        {} if code == "project_limit" else {"p10_at": now, "p50_at": now, "p90_at": now}
    )  # of another verdict
    JobVerdict.objects.filter(job=job).update(code=code, forecast_at=now if foreseen else None, **stale)
    page = words(client_of("member").get(reverse("job", args=[job.public_id])))
    assert heading in page and words_of_it in page and "Forecasts should hold" not in page
    assert ("no forecast" in words(client_of("member").get("/queue/"))) is (heading != "No estimate yet")
    reported = client_of("member").get(f"/api/v1/jobs/{job.public_id}/").json()
    assert reported["interval"] is None
    assert (reported["interval_missing"] is None) is (heading == "No estimate yet")


def test_a_job_without_gpus_has_no_forecast(dataset, client_of):
    job = dataset.jobs["depth-anything-ft"]
    Job.objects.filter(pk=job.pk).update(gpus_per_task=0)
    assert "It requests no GPU" in words(client_of("member").get(reverse("job", args=[job.public_id])))


def test_an_elastic_job_shows_its_current_size(dataset, client_of):
    owner, project = dataset.people["m-okafor"], dataset.projects["vision"]
    job = factories.job(owner, project, dataset.environments["batch"], tasks=4, min_tasks=1, name="grows")
    page = reverse("job", args=[job.public_id])
    assert "needs 1, grows up to 4" in words(client_of("member").get(page))
    node = factories.node(factories.pool(), gpus=4)
    gpus = list(node.gpus.order_by("index"))
    slots = [job_control.RankPlacement(node, [(gpu.pk, 1000)]) for gpu in gpus[:2]]
    job_control.start_attempt(job, node.pool, slots, epoch=1)
    assert "2 of 4 tasks; needs 1, grows up to 4" in words(client_of("member").get(page))
    (row,) = job_rows(owner, [Job.objects.get(pk=job.pk)])
    assert row.size_text == "2 of 4 tasks" and row.gpus.startswith("2\u00a0")
    task = job.attempts.get().task_rows.get(rank=1)
    job_control.mark_task_sent(task)
    job_control.record_task_ended(task.pk, exit_code=1, reason=EndReason.EXIT_CODE)
    (row,) = job_rows(owner, [Job.objects.get(pk=job.pk)])
    assert row.size_text == "1 of 4 tasks"
    assert "1 of 4 tasks keep running." in words(client_of("member").get(page))


def test_the_scheduling_tab_shows_how_the_forecast_moved_and_each_decision(dataset, client_of):
    job = dataset.jobs["depth-anything-ft"]
    Forecast.objects.filter(job=job).delete()
    empty = client_of("member").get(reverse("job-scheduling", args=[job.public_id])).content.decode()
    assert "How the forecast moved" not in empty
    assert verdict_label(JobVerdict.objects.get(job=job).code) in empty
    now = timezone.now()
    for minutes in (60, 20):
        Forecast.objects.create(
            job=job,
            made_at=now - dt.timedelta(minutes=minutes),
            p10_at=now + dt.timedelta(minutes=minutes),
            p50_at=now + dt.timedelta(minutes=2 * minutes),
            p90_at=now + dt.timedelta(minutes=3 * minutes),
            code="no_fit_now",
        )
    page = client_of("member").get(reverse("job-scheduling", args=[job.public_id]))
    assert len(json.loads(page.context["chart"])["p50"]) == 2
    assert "1\u00a0h 20\u00a0min sooner" in page.content.decode()


def test_a_row_names_the_gpus_of_the_newest_attempt(dataset):
    job = factories.job(dataset.people["m-okafor"], dataset.projects["vision"], dataset.environments["batch"])
    first = start(dataset, job, [("h200-3", [6])], ran=dt.timedelta(hours=2))
    (row,) = job_rows(job.owner, [Job.objects.get(pk=job.pk)])
    assert row.gpus == "1\u00a0×\u00a0H200"
    job_control.record_task_ended(first.task_rows.get().pk, exit_code=None, reason=EndReason.NODE_REBOOTED)
    start(dataset, job, [("a100-2", [6])], ran=dt.timedelta(hours=1))
    (row,) = job_rows(job.owner, [Job.objects.get(pk=job.pk)])
    assert row.gpus == "1\u00a0×\u00a0A100"


def test_the_decisions_about_a_job_can_be_searched_and_have_pages(dataset, client_of):
    job, member = dataset.jobs["depth-anything-ft"], client_of("member")
    for number in range(60):
        JobEvent.objects.create(
            job=job, kind="verdict", reason="project_limit" if number else "dependency",
            message=f"Decision {number} at 2026-11-28 03:00 UTC.", details={"free_gpus": number},
        )  # fmt: skip

    def decisions(query: str) -> list[str]:
        page = words(member.get(reverse("job-scheduling", args=[job.public_id]) + query))
        (listed,) = re.findall(r'id="ex-h">.*?</ol>', page)
        return re.findall(r"Decision \d+ at <time", listed)

    assert decisions("") == [f"Decision {number} at <time" for number in range(59, 9, -1)]
    assert decisions("?page=2") == [f"Decision {number} at <time" for number in range(9, -1, -1)]
    assert decisions("?q=decision+59+") == ["Decision 59 at <time"]
    assert decisions("?q=Dependency") == ["Decision 0 at <time"]  # by the label of its reason
    nothing = words(member.get(reverse("job-scheduling", args=[job.public_id]) + "?q=%3Cnonsense%3E"))
    assert "No decision matches." in nothing and "&lt;nonsense&gt;" in nothing


def test_the_audit_tab_names_who_changed_the_job_and_hides_addresses(dataset, client_of):
    job = dataset.jobs["depth-anything-ft"]
    client_of("admin").post(reverse("job-hold", args=[job.public_id]), {"held": "1"})
    page = client_of("member").get(reverse("job-audit", args=[job.public_id])).content.decode()
    assert "job.hold" in page and "127.0.0.1" not in page
    assert "127.0.0.1" in client_of("admin").get(reverse("job-audit", args=[job.public_id])).content.decode()


def test_a_command_of_several_lines_keeps_them(dataset, client_of):
    job = dataset.jobs["vit-h-pretrain"]
    Job.objects.filter(pk=job.pk).update(command=["sh", "-c", "cd /data\ntrain --lr 1"])
    page = client_of("member").get(reverse("job", args=[job.public_id])).content.decode()
    assert "sh -c &#x27;cd /data\ntrain --lr 1&#x27;" in page


def test_the_time_to_start_is_shown_by_pool_and_phase(dataset, client_of):
    attempt = Attempt.objects.filter(job=dataset.jobs["vit-h-pretrain"]).get()
    now = timezone.now()
    Attempt.objects.exclude(pk=attempt.pk).update(running_at=None)
    times = {"queued_at": 900, "created_at": 300, "image_pull_started_at": 290, "image_pulled_at": 100}
    Attempt.objects.filter(pk=attempt.pk).update(
        running_at=now - dt.timedelta(seconds=80),
        **{name: now - dt.timedelta(seconds=ago_s) for name, ago_s in times.items()},
    )
    (pool,) = client_of("member").get("/api/v1/usage/start-phases/").json()["pools"]
    assert {each["phase"]: each["median_s"] for each in pool["phases"] if each["attempts"]} == {
        "queued": 600, "reserved": 10, "pulling": 190, "starting": 20,
    }  # fmt: skip
    page = client_of("member").get(reverse("usage")).content.decode()
    assert "Time to start" in page and "Image, min" in page and "Starting, s" in page
    assert re.search(r"<td[^>]*>3\.2<span", page), "190 s of the pull in minutes"


def test_of_equal_events_one_is_shown_for_each_attempt():
    events = [JobEvent(message="It ended.", attempt_id=number) for number in (2, 2, 1, 1)]
    shown = dedupe_events([*events, JobEvent(), JobEvent()])
    assert [event.attempt_id for event in shown] == [2, 1, None, None]


def test_numbers_of_a_verdict_have_no_ids(dataset, client_of):
    job = Job.objects.get(name="depth-anything-ft")
    details = {"project": job.project.public_id, "pool": "p4x", "needed_gpus": 8.0, "free_gpus": 2.0}
    JobVerdict.objects.filter(job=job).update(details=details)
    shown = client_of("member").get(reverse("job", args=[job.public_id])).context["verdict_details"]
    assert set(shown) == {("Needed GPUs", "8"), ("Free GPUs", "2")}


def test_changes_that_start_it_sooner_are_shown_as_long_as_it_waits(dataset, client_of):
    """Also if the page was opened before its first verdict, and no longer once it has started."""
    client, job = client_of("member"), Job.objects.get(name="depth-anything-ft")
    page, ways = (reverse(name, args=[job.public_id]) for name in ("job", "job-alternatives"))
    loads = f'hx-get="{ways}"'
    verdict = JobVerdict.objects.get(job=job)
    verdict.delete()
    opened = words(client.get(page))
    assert loads not in opened and "sooner=1" not in opened
    verdict.save(force_insert=True)
    live = {"HX-Request": "true"}
    decided = words(client.get(f"{page}?shown=0", headers=live))
    assert (
        loads in decided and 'id="job-alternatives" hx-swap-oob="true"' in decided and "sooner=1" in decided
    )
    assert loads not in words(client.get(f"{page}?shown=0&sooner=1", headers=live))
    Job.objects.filter(pk=job.pk).update(state="RUNNING", attempt_count=1)
    ended = words(client.get(f"{page}?shown=0&sooner=1", headers=live))
    assert '<div id="job-alternatives" hx-swap-oob="true" hidden></div>' in ended
    assert words(client.get(ways)) == '<div id="job-alternatives" hidden></div>'
