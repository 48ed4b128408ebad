"""Roles in the browser: added and removed on the launch form, and told apart in the log."""

from __future__ import annotations

import datetime as dt

import pytest
from django.db import transaction
from playwright.sync_api import expect

from portal.domain.jobs.job_spec import JobRole
from portal.models import Job
from portal.services.jobs.logs import write_log_bytes
from tests import factories
from tests.web.dataset import start

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


@pytest.mark.parametrize("width", [1280, 390])
def test_roles_are_added_and_removed_on_the_form(open_as, width) -> None:
    page = open_as("m-okafor", width=width)
    page.goto("/launch/?kind=training&defaults=1")
    page.locator("[name=name]").fill("with roles")
    page.locator("[name=command]").fill("python train.py")
    page.locator("summary", has_text="Roles").click()
    for name in ("chief", "worker", "mistake"):
        page.get_by_role("button", name="Add a role").click()
        page.locator("[data-role]:not([hidden]) [name$=-name]").last.fill(name)
    page.locator("[name=roles-1-tasks]").fill("2")
    page.locator("[name=roles-0-ports]").fill("grpc")
    page.get_by_role("button", name="Remove").last.click()
    expect(page.locator("[data-role]:not([hidden])")).to_have_count(2)
    page.locator("[name=completion_role]").fill("chief")
    expect(page.locator("#rail")).to_contain_text("2 tasks with")
    expect(page.locator("#rail")).not_to_contain_text("mistake")
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0
    page.locator("#rail" if width > 1000 else ".fw-dock").get_by_role("button", name="Launch").click()
    page.wait_for_url("**/jobs/*/")
    job = Job.objects.get(name="with roles")
    assert [(role.name, role.tasks) for role in job.job_roles] == [("chief", 1), ("worker", 2)]


def test_lines_are_labelled_and_filtered_by_role(open_as, dataset) -> None:
    job = factories.job(
        dataset.people["m-okafor"], dataset.projects["vision"], dataset.environments["batch"],
        roles=(JobRole(name="chief"), JobRole(name="worker", tasks=2)), gpus_per_task=0, command=["train"],
    )  # fmt: skip
    with transaction.atomic():
        start(dataset, job, [(next(iter(dataset.nodes)), [])] * 3, ran=dt.timedelta(minutes=5))
    for rank in range(3):
        write_log_bytes(job.public_id, 1, rank, "raw", 0, b"line of %d\n" % rank)
    page = open_as("m-okafor")
    page.goto(f"/jobs/{job.public_id}/logs/")
    lines = page.locator("[data-log-lines] > li")
    expect(lines).to_have_count(3)
    assert set(page.locator("[data-log-lines] > li > b").all_text_contents()) == {
        "chief 0",
        "worker 0",
        "worker 1",
    }
    page.get_by_label("Role or task").select_option(label="Role worker")
    expect(lines).to_have_count(2)
    page.get_by_label("Role or task").select_option(label="Chief 0")
    expect(lines).to_have_count(1)
    expect(lines.first).to_contain_text("line of 0")
