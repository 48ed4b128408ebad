"""Tasks of users in a real Chromium, each from the page where they begin to the row that they leave."""

from __future__ import annotations

import datetime as dt
import re
import threading
from collections.abc import Iterator

import pytest
import redis
from django.conf import settings
from django.db import connections
from django.utils import timezone
from playwright.sync_api import expect

from portal.engine_client import HEARTBEAT_KEY
from portal.models import (
    EngineQuery,
    Job,
    NotebookListing,
    QuotaAddition,
    Schedule,
    Task,
    UserRequest,
    WorkspaceShare,
)
from portal.services.jobs.failures import identify_failures
from scheduler.what_if import answer_query

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

PATIENCE_MS = 20_000
FIELD_VALUE = "(form, name) => form.elements[name].value"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Answers queries as worker-ask does, from a thread of its own instead of a Celery worker."""
    monkeypatch.setattr("scheduler.what_if._cached_inputs", None)  # the snapshot of an earlier test
    stop = threading.Event()

    def answer() -> None:
        while not stop.wait(0.02):
            for query in EngineQuery.objects.filter(answer__isnull=True):
                answer_query(query.public_id)
        connections.close_all()

    thread = threading.Thread(target=answer)
    with redis.Redis.from_url(settings.REDIS_URL) as store:
        store.set(HEARTBEAT_KEY, "1", ex=60)
        thread.start()
        yield
        stop.set()
        thread.join(10)
        store.delete(HEARTBEAT_KEY)


def test_a_request_for_quota_is_approved(open_as) -> None:
    member, admin = open_as("m-okafor"), open_as("r-castellan")
    member.goto("/approvals/?new=quota")
    member.get_by_label("Pool").select_option(label="h200")
    member.get_by_label("More GPUs").fill("2")
    member.get_by_label("What for").fill("A deadline")
    week = timezone.now() + dt.timedelta(days=7)
    member.get_by_label("Until").fill(f"{week:%Y-%m-%dT%H:%M}")
    member.get_by_role("button", name="Request", exact=True).click()
    expect(member.get_by_text("Requested from the administrators.")).to_be_visible()
    admin.goto("/approvals/")
    asked = admin.get_by_role("article", name="Request of Mirembe Okafor")
    expect(asked).to_contain_text("2 GPUs more in h200")
    asked.get_by_label("Answer").fill("For one week")
    asked.get_by_role("button", name="Approve").click()
    expect(admin.get_by_text("The request of m-okafor is approved.")).to_be_visible()
    member.reload()
    answered = member.get_by_role("row", name=re.compile("A deadline"))
    expect(answered).to_contain_text("approved by Rosa Castellan")
    expect(answered).to_contain_text("For one week")
    assert QuotaAddition.objects.get().extra_milli == UserRequest.objects.get().extra_milli == 2000


def test_a_failed_job_is_retried_with_one_click(open_as, dataset) -> None:
    Task.objects.update(log_complete=True)
    identify_failures()
    failed = Job.objects.get(name="dino-abl-b128")
    page = open_as("m-okafor")
    page.goto(f"/jobs/{failed.public_id}/")
    expect(page.get_by_text("reached its memory limit")).to_be_visible()
    page.get_by_role("button", name="Retry with 96").click()
    page.wait_for_url(lambda url: "/jobs/" in url and failed.public_id not in url)
    expect(page.get_by_role("heading", name="dino-abl-b128")).to_be_visible()
    retried = Job.objects.order_by("-pk").first()
    assert retried is not None and retried.memory_mib == 96 * 1024 > failed.memory_mib


def test_a_notebook_becomes_a_batch_job(open_as, dataset) -> None:
    workspace = dataset.jobs["attn-probe"]
    NotebookListing.objects.create(
        job=workspace, node=dataset.nodes["h200-3"], listed_at=timezone.now(),
        notebooks=[{
            "path": "probe.ipynb", "modified_s": 0.0, "size_bytes": 9, "problem": "", "fixed": [],
            "parameters": [{"name": "lr", "type": "number", "default": 0.1, "label": "lr"}],
        }],
    )  # fmt: skip
    page = open_as("m-okafor")
    page.goto("/")
    page.get_by_role("link", name="attn-probe").first.click()
    page.get_by_role("link", name="Run as a job").click()
    page.get_by_role("button", name="Run as a job probe.ipynb").click()
    page.get_by_label("lr", exact=True).fill("0.5")
    page.locator("#rail").get_by_role("button", name="Launch").first.click()
    page.wait_for_url("**/jobs/*/", timeout=PATIENCE_MS)
    job = Job.objects.order_by("-pk").first()
    assert job is not None and job.kind == "training"
    assert "probe.ipynb" in job.program and "0.5" in job.command
    assert (job.environment_id, job.pool_id) == (workspace.environment_id, workspace.pool_id)


def test_a_phone_signs_out(open_as) -> None:
    page = open_as("m-okafor", width=360, touch=True)
    page.goto("/")
    page.get_by_role("link", name="Your account").tap()
    page.get_by_role("button", name="Sign out").tap()
    page.wait_for_url("**/sign-in/?out=1")
    page.goto("/jobs/")
    expect(page.get_by_role("button", name="Sign in", exact=True)).to_be_visible()


@pytest.mark.long
def test_a_job_is_scheduled_from_the_launch_page(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/schedules/")
    page.get_by_role("link", name="New schedule").click()
    page.get_by_label("Name", exact=True).fill("nightly-eval")
    page.get_by_label("Command", exact=True).fill("python evaluate.py")
    page.get_by_label("Cron expression").fill("0 2 * * *")
    page.locator("#rail button[type=submit]").first.click()
    page.wait_for_url("**/schedules/*/", timeout=PATIENCE_MS)
    expect(page.get_by_role("heading", name="nightly-eval")).to_be_visible()
    page.get_by_role("button", name="Disable").click()
    expect(page.get_by_role("button", name="Enable")).to_be_visible()
    schedule = Schedule.objects.get()
    assert (schedule.cron, schedule.enabled, schedule.next_at) == ("0 2 * * *", False, None)


@pytest.mark.long
def test_an_alternative_is_applied_on_the_launch_page(open_as, engine) -> None:
    page = open_as("m-okafor")
    page.goto("/launch/?kind=training&defaults=1")
    page.locator("[name=name]").fill("sooner")
    page.locator("[name=command]").fill("python train.py")
    page.locator("label", has_text="H200 141 GiB").click()
    page.get_by_label("GPUs", exact=True).fill("8")
    rail = page.locator("#rail")
    expect(rail).not_to_contain_text("It starts now", timeout=PATIENCE_MS)
    expect(rail.get_by_role("heading", name="Start sooner")).to_be_visible(timeout=PATIENCE_MS)
    expect(rail.get_by_role("button", name="Launch, waits in the queue")).to_be_visible()
    sooner = rail.locator(".fw-alt").first
    values = dict(pair.split("=") for pair in str(sooner.get_attribute("data-set")).split(";"))
    sooner.click()
    launched = {name: page.locator("#launch").evaluate(FIELD_VALUE, name) for name in values}
    assert values and launched == values
    expect(rail.get_by_role("button", name=re.compile("Launch"))).to_be_visible()


@pytest.mark.long
def test_a_guest_opens_a_shared_workspace_until_the_share_ends(open_as, dataset) -> None:
    workspace = dataset.jobs["attn-probe"]
    owner, guest = open_as("m-okafor"), open_as("s-varga")
    owner.goto(f"/jobs/{workspace.public_id}/")
    owner.get_by_role("link", name="Share", exact=True).click()
    owner.get_by_label("Member of vision").select_option(label="Sándor Varga (s-varga)")
    owner.get_by_role("button", name="Share", exact=True).click()
    expect(owner.get_by_role("row", name=re.compile("s-varga"))).to_be_visible()
    guest.goto(f"/jobs/{workspace.public_id}/")
    expect(guest.get_by_role("button", name=re.compile("Open")).first).to_be_visible()
    WorkspaceShare.objects.update(expires_at=timezone.now())
    guest.reload()
    expect(guest.get_by_role("heading", name="attn-probe")).to_be_visible()
    expect(guest.get_by_role("button", name=re.compile("Open"))).to_have_count(0)


@pytest.mark.long
def test_the_page_is_explained_by_a_key(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/queue/")
    page.keyboard.press("?")
    help_text = page.get_by_role("dialog", name="Keyboard shortcuts").locator("[data-about-summary]")
    expect(help_text).not_to_be_empty()
    page.get_by_role("link", name="Read more").click()
    page.wait_for_url("**/help/*/**")
