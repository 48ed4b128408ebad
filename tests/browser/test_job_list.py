"""The job list in a browser: filters and columns in the address, saved views; and own jobs ordered by keyboard."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from portal.models import Job, SavedJobView
from tests import factories

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def test_a_view_of_the_present_filters_is_saved_and_back_restores_them(open_as):
    page = open_as("m-okafor")
    page.goto("/jobs/")
    page.get_by_label("State", exact=True).select_option("failed")
    expect(page).to_have_url(re.compile(r"\?state=failed&col=project"))
    page.locator("summary", has_text="Columns").click()
    page.get_by_label("Exit code").check()
    expect(page.get_by_role("columnheader", name="Exit code")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("columnheader", name="Exit code")).to_be_hidden()
    expect(page.get_by_label("State", exact=True)).to_have_value("failed")
    page.get_by_text("Save view", exact=True).click()
    page.get_by_label("Name", exact=True).fill("failures")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("The view failures is saved.")).to_be_visible()
    assert "state=failed" in SavedJobView.objects.get().query
    page.get_by_role("link", name="All jobs").click()
    expect(page.get_by_label("State", exact=True)).to_have_value("")
    page.get_by_role("link", name="failures").click()
    expect(page.get_by_label("State", exact=True)).to_have_value("failed")


def test_own_jobs_are_ordered_by_keyboard(open_as, dataset):
    job = Job.objects.get(name="depth-anything-ft")
    factories.job(job.owner, job.project, job.environment, name="second-thought")
    page = open_as("m-okafor")
    page.goto("/queue/?show=mine")
    button = page.get_by_role("button", name="Move second-thought up")
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/queue/?show=mine#job-*")
    assert list(
        Job.objects.filter(queue_rank__lt=0).order_by("queue_rank").values_list("name", flat=True)
    ) == [
        "second-thought",
        "depth-anything-ft",
    ]
    moves = page.get_by_role("button", name=re.compile("^Move .* up"))
    assert [each.get_attribute("aria-label") for each in moves.all()] == [
        "Move second-thought up",
        "Move depth-anything-ft up",
    ]
