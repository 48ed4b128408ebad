"""One story in a real Chromium: a workspace idles, counts down, is kept, is suspended, and is resumed."""

from __future__ import annotations

import pytest
from django.utils import timezone
from playwright.sync_api import expect

from portal.domain.jobs.reasons import EndReason
from portal.models import AttemptActivity, Job
from portal.services.jobs.idle import do_exempt_from_idle
from portal.services.lifecycle import job_control
from portal.services.scheduling.policy_settings import do_change_policy
from scheduler.idle_pass import run_idle_pass
from tests.browser.conftest import elsewhere
from tests.browser.test_accessibility import look_at
from tests.workspace_activity import expire_countdown, record_gpu_minutes, simulate_tool_activity

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def test_idle_countdown_keep_suspended_resume(open_as, dataset) -> None:
    job = dataset.jobs["label-qa"]
    attempt = job.attempts.get()
    settings = {"idle_action": "suspend", "idle_grace_s": 300}
    do_change_policy(dataset.people["r-castellan"], dataset.pools["ada"], settings, version=1)
    gpu = dataset.nodes["ada-1"].gpus.get(index=0)
    manager = open_as("r-castellan")
    manager.goto(f"/projects/{job.project.public_id}/#idle")
    manager.get_by_label("idle_after_s, s").fill("10 min")
    manager.locator("#idle").get_by_role("button", name="Save").click()
    expect(manager.locator("#idle")).to_contain_text("10 min by the project")
    page = open_as("m-okafor")
    page.goto(f"/jobs/{job.public_id}/")
    expect(page.locator("#job-side")).to_contain_text("Set by pool ada and the project.")
    expect(page.locator("[data-live-chip]")).to_have_text("live")

    record_gpu_minutes(gpu, *[0.0] * 13)
    simulate_tool_activity(attempt, used_ago_s=700)
    elsewhere(run_idle_pass)
    banner = page.get_by_role("alert")
    expect(banner).to_contain_text("Idle:")  # over the socket, without a reload
    left = banner.locator("time[data-left]")
    expect(left).to_contain_text("left")
    before = left.inner_text()
    expect(left).not_to_have_text(before, timeout=12_000)  # it counts
    expect(page.locator("#job-head")).to_contain_text("Idle, holds GPUs")

    page.goto("/")
    card = page.locator(".fw-ws", has_text="label-qa")
    expect(card).to_contain_text("not used for")
    do_exempt_from_idle(dataset.people["m-okafor"], dataset.jobs["attn-probe"], "A debugger waits in it")
    looked_at = ["/", f"/jobs/{job.public_id}/", "/approvals/", f"/projects/{job.project.public_id}/"]
    assert look_at(page, looked_at) == look_at(open_as("r-castellan", dark=True), looked_at[1:]) == ""
    page.goto(f"/jobs/{job.public_id}/")
    page.get_by_role("button", name="Snooze for 1").click()
    expect(page.get_by_text("label-qa is snoozed")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)

    AttemptActivity.objects.filter(pk=attempt.pk).update(snoozed_until=timezone.now())
    elsewhere(run_idle_pass)
    expect(page.get_by_role("alert")).to_contain_text("2 more times")
    expire_countdown(attempt)
    elsewhere(run_idle_pass)
    expect(page.locator("#job-head")).to_contain_text("Suspending")
    task = attempt.task_rows.get()
    elsewhere(lambda: job_control.record_task_ended(task.pk, exit_code=143, reason=EndReason.EXIT_CODE))
    expect(page.locator("#job-head")).to_contain_text("Suspended")
    expect(page.get_by_text("It holds no GPU; its files are kept.")).to_be_visible()
    gpu.refresh_from_db()
    assert gpu.used_milli == 0

    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#job-head")).to_contain_text("Waiting")
    row = Job.objects.get(pk=job.pk)
    assert (row.state, row.desired_state) == ("PENDING", "run")
