"""Filters of the lists of jobs in a browser: they apply without a key, and stand in the address."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def test_filters_apply_as_they_are_changed_and_back_restores_them(open_as) -> None:
    page = open_as("r-castellan")
    page.goto("/queue/")
    rows = page.locator("#queue tr[data-d='2']")
    before = rows.count()
    assert before > 1
    page.get_by_label("Search pending jobs by name or user").fill("llama")
    expect(rows).to_have_count(1, timeout=20_000)
    expect(page).to_have_url(re.compile(r"q=llama"))
    page.get_by_role("link", name="Clear filters").first.click()
    expect(rows).to_have_count(before, timeout=20_000)
    page.go_back()
    expect(rows).to_have_count(1, timeout=20_000)


def test_job_list_filters_are_in_the_url(open_as) -> None:
    page = open_as("r-castellan")
    page.goto("/jobs/")
    page.get_by_label("State").select_option("ended")
    expect(page).to_have_url(re.compile(r"state=ended"), timeout=20_000)
    page.reload()
    expect(page.get_by_label("State")).to_have_value("ended")
    page.go_back()
    expect(page.get_by_label("State")).not_to_have_value("ended", timeout=20_000)
