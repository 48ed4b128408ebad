"""Every page of the researchers for every kind of person: who gets in, how many queries, nothing inline."""

from __future__ import annotations

import datetime as dt
import json
import re
from pathlib import Path

import pytest
from django.db import OperationalError, connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from portal.models import Job
from portal.valkey.topic_times import now_ms
from portal.web.display.navigation import NAVIGATION
from portal.web.middleware import error_pages
from portal.web.middleware.security_headers import STATIC_HEADERS
from tests import factories
from tests.web.dataset import start

COUNTS = {
    name.removeprefix("web."): count
    for name, count in json.loads((Path(__file__).parent.parent / "query_counts.json").read_text()).items()
    if name.startswith("web.")
}

OPEN_TO_ALL = {"home": [], "jobs": [], "approvals": [], "launch": [], "account": [], "search": []}
OF_A_JOB = ["job", "job-run", "job-metrics", "job-series", "job-logs", "job-log-lines"]
OF_A_JOB += ["job-checkpoints", "job-ranks"]
ACTS = ["job-cancel", "job-hold", "job-resubmit", "job-open", "job-suspend", "job-resume"]
ACTS += ["job-extend", "job-snooze", "job-exempt"]
PAGES = ["account"] + [item.view for group in NAVIGATION.values() for item in group if not item.admin_only]


def test_every_page_of_the_sidebar_has_its_own_key():
    keys = [item.key for group in NAVIGATION.values() for item in group]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("page", [*OPEN_TO_ALL, "jobs-bulk", "launch-check", "account-token"])
def test_signed_out_users_are_not_redirected_in_a_loop(client_of, page):
    answer = client_of().get(reverse(page))
    assert answer.status_code == 302
    assert answer["Location"].startswith("/sign-in/")


@pytest.mark.parametrize("kind", ["stranger", "member", "admin"])
@pytest.mark.parametrize("page", OPEN_TO_ALL)
def test_signed_in_users_see_their_own_pages(client_of, kind, page):
    assert client_of(kind).get(reverse(page)).status_code == 200


@pytest.mark.parametrize("page", OF_A_JOB)
@pytest.mark.parametrize(
    ("kind", "status"), [("anonymous", 302), ("stranger", 404), ("member", 200), ("admin", 200)]
)
def test_a_job_is_visible_to_its_project_only(dataset, client_of, page, kind, status):
    address = reverse(page, args=[dataset.jobs["vit-h-pretrain"].public_id])
    assert client_of(kind).get(address).status_code == status


@pytest.mark.parametrize("act", ACTS)
def test_a_stranger_cannot_act_on_a_job(dataset, client_of, act):
    job = dataset.jobs["attn-probe"]
    before = Job.objects.get(pk=job.pk).version
    answer = client_of("stranger").post(reverse(act, args=[job.public_id]))
    assert answer.status_code == 404
    assert Job.objects.get(pk=job.pk).version == before


@pytest.mark.parametrize("act", ACTS)
def test_reading_never_acts(dataset, client_of, act):
    assert (
        client_of("member").get(reverse(act, args=[dataset.jobs["attn-probe"].public_id])).status_code == 405
    )


def test_logs_of_a_workspace_are_its_owners(dataset, client_of):
    address = reverse("job-logs", args=[dataset.jobs["attn-probe"].public_id])
    assert client_of("member").get(address).status_code == 200
    assert client_of("s-varga").get(address).status_code == 403  # a manager of the project


def test_a_stranger_lists_and_finds_nothing(dataset, client_of):
    page = client_of("stranger").get(reverse("jobs")).content.decode()
    assert not [name for name in dataset.jobs if name in page]
    assert client_of("stranger").get(reverse("search"), {"q": "vit"}).json() == {"found": []}
    assert client_of("member").get(reverse("search"), {"q": "vit-h-p"}).json()["found"]


def addresses(dataset) -> list[str]:
    jobs = [
        dataset.jobs[name].public_id
        for name in ("vit-h-pretrain", "depth-anything-ft", "dino-abl-b128", "attn-probe")
    ]
    of_jobs = [
        reverse(page, args=[job])
        for page in ("job", "job-run", "job-metrics", "job-logs", "job-checkpoints", "job-ranks")
        for job in jobs
    ]
    return [reverse(page) for page in PAGES] + of_jobs + ["/jobs/nothing9999/"]


def test_pages_have_no_inline_code_and_a_strict_policy(dataset, client_of):
    client = client_of("member")
    for address in addresses(dataset):
        answer = client.get(address)
        page = answer.content.decode()
        assert not re.search(r"<[^>]+\sstyle=", page), address
        assert not re.search(r"<[^>]+\son[a-z]+=", page), address
        assert "<style" not in page, address
        rules = dict(rule.split(" ", 1) for rule in answer["Content-Security-Policy"].split("; "))
        nonce = re.search(r"'nonce-([^']+)'", rules["script-src"])
        assert nonce and all(nonce[1] in tag for tag in re.findall(r"<script[^>]*>", page)), address
        assert "unsafe" not in answer["Content-Security-Policy"]
        assert rules["object-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
        assert answer["X-Content-Type-Options"] == "nosniff"
        assert answer["Referrer-Policy"] == "same-origin"
        assert answer["Cross-Origin-Opener-Policy"] == "same-origin"
        assert answer["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("address", "host", "status"),
    [
        ("/", "evil.example", 400),
        ("/api/v1/me/", "evil.example", 400),
        ("/nowhere/", "localhost", 404),
        ("/static/nowhere.js", "localhost", 404),
        ("/audit/", "localhost", 403),
        ("/jobs", "localhost", 301),
        ("/healthz", "localhost", 200),
    ],
)
def test_every_answer_carries_the_headers_also_a_refusal(client_of, caplog, address, host, status):
    answer = client_of("member").get(address, headers={"host": host})
    assert answer.status_code == status
    assert "frame-ancestors 'none'" in answer["Content-Security-Policy"]
    for name, value in STATIC_HEADERS.items():
        assert answer[name] == value
    assert answer["Cache-Control"] == "no-store"
    assert (status == 403) == ("refused GET '/audit/' to m-okafor from 127.0.0.1" in caplog.text)


def test_no_address_writes_a_line_into_the_log(client_of, caplog):
    client = Client(enforce_csrf_checks=True)
    assert client.post("/jobs/%0d%0a2026 CRITICAL all is lost/", {}).status_code in (403, 404)
    assert "\n2026 CRITICAL" not in caplog.text


def test_every_field_and_button_has_a_name(dataset, client_of):
    client = client_of("member")
    for address in addresses(dataset):
        page = client.get(address).content.decode()
        labelled = set(re.findall(r'<label[^>]*\sfor="([^"]+)"', page))
        wrapped = "".join(re.findall(r"<label.*?</label>", page, re.DOTALL))
        for tag in re.findall(r"<(?:input|select|textarea)[^>]*>", page):
            if 'type="hidden"' in tag or "aria-label" in tag or tag in wrapped:
                continue
            found = re.search(r'\sid="([^"]+)"', tag)
            assert found and found[1] in labelled, f"{address}: {tag} has no label"
        for inside, tag in re.findall(r"<button([^>]*)>(.*?)</button>", page, re.DOTALL):
            words = re.sub(r"<[^>]+>", "", tag).strip()
            assert words or "aria-label" in inside, f"{address}: a button says nothing"


def test_user_input_is_shown_as_text(dataset, client_of):
    job = dataset.jobs["depth-anything-ft"]
    Job.objects.filter(pk=job.pk).update(name="<script>alert(1)</script>")
    job.verdict.message = "<img src=x onerror=alert(1)>"
    job.verdict.save()
    for address in (reverse("home"), reverse("jobs"), reverse("job", args=[job.public_id])):
        page = client_of("member").get(address).content.decode()
        assert "<script>alert" not in page
        assert "<img src=x" not in page


@pytest.mark.parametrize("page", COUNTS)
def test_query_counts_do_not_grow(dataset, client_of, page):
    """Pinned in tests/query_counts.json under ``web.<page>``; the same with three times the rows."""
    node = dataset.nodes["h200-3"]
    client = client_of("admin" if page == "drain-node" else "member")
    subjects = {"job": dataset.jobs["vit-h-pretrain"], "drain-node": node}
    args = [subjects[page].public_id] if page in subjects else []
    before = count(client, reverse(page, args=args))
    owner, project, batch = (
        dataset.people["m-okafor"],
        dataset.projects["vision"],
        dataset.environments["batch"],
    )
    for number in range(25):
        factories.job(owner, project, batch, name=f"more-{number}")
    pool = dataset.pools["h200"]
    for number in range(3):
        factories.job(owner, factories.project(f"more-{number}", manager=owner), batch)
        factories.node(pool, name=f"more-{number}")
    for gpu in node.gpus.filter(used_milli=0):
        job = factories.job(owner, project, batch, name=f"on-{gpu.index}")
        start(dataset, job, [(node.name, [gpu.index])], ran=dt.timedelta(hours=1))
    assert count(client, reverse(page, args=args)) == before
    assert before == COUNTS[page]


def count(client, address: str) -> int:
    client.get(address)
    with CaptureQueriesContext(
        connection,
    ) as asked:
        assert client.get(address).status_code == 200
    return len(asked)


def test_simulated_gpus_are_never_shown_as_real(dataset, client_of):
    page = client_of("member").get(reverse("home")).content.decode()
    assert "simulated" not in page
    gpu = dataset.nodes["ada-1"].gpus.first()
    gpu.simulated = True
    gpu.save()
    page = client_of("member").get(reverse("home")).content.decode()
    assert '1 of 48 GPUs here are <b class="fw-medium">simulated</b>' in page
    assert 'data-x="sim"' in page


def test_a_database_failure_in_the_middleware_is_a_503_although_it_recovered(rf):
    try:
        raise OperationalError("the database system is starting up")
    except OperationalError:
        answer = error_pages.server_error(rf.get("/"))
    assert answer.status_code == 503 and answer.headers["Retry-After"] == "5"


def test_without_the_database_there_is_a_message_and_a_retry_time(rf, monkeypatch):
    def away(*args, **kwargs):
        raise OperationalError("no connection")

    monkeypatch.setattr(error_pages, "render", away)
    answer = error_pages.server_error(rf.get("/"))
    assert answer.status_code == 503
    assert answer["Retry-After"] == "5"
    assert "The database does not answer." in answer.content.decode()


def test_a_page_states_since_when_it_may_miss_messages(client_of):
    before = now_ms()
    page = client_of("member").get("/").content.decode()
    (made,) = re.findall(r'<body [^>]*data-rendered-at="(\d+)"', page)
    assert before <= int(made) <= now_ms()


def test_the_list_of_keys_is_on_every_page_and_opened_by_its_key(client_of):
    page = client_of("member").get("/").content.decode()
    dialog = page[page.index('<dialog id="shortcuts"') :].split("</dialog>")[0]
    assert 'aria-label="Help and keyboard shortcuts"' in dialog and 'method="dialog"' in dialog
    assert re.findall(r"<kbd>(.+?)</kbd>", dialog) == ["/", "Ctrl", "K", "?"]
    assert "data-pages" in dialog and "data-slash" in dialog


def test_the_cluster_is_shown_by_pages_and_counted_whole(dataset, client_of, monkeypatch):
    monkeypatch.setattr("portal.web.cluster.cluster.NODES_PER_PAGE", 2)
    client = client_of("member")
    first, last = (client.get(reverse("cluster"), {"page": number}).content.decode() for number in ("1", "9"))
    assert "page 1 of 3" in first and "page 3 of 3" in last
    assert first.count('<article class="fw-node"') == last.count('<article class="fw-node"') == 2
    assert "6 nodes" in first.replace("\u00a0", " ") and "48 GPUs" in last.replace("\u00a0", " ")
