"""The launch form in a browser: what is wrong is said at its field while the form is filled in."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

OPEN_FOLDS = "() => document.querySelectorAll('#launch details').forEach((fold) => { fold.open = true; })"
PATIENCE_MS = 20_000


def test_an_invalid_time_limit_is_marked_at_its_field_until_it_is_corrected(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/launch/?kind=training")
    page.evaluate(OPEN_FOLDS)
    field, note = page.locator("[name=time_limit_s]"), page.locator("#id_time_limit_s_error")
    field.fill("a while")
    expect(field).to_have_attribute("aria-invalid", "true", timeout=PATIENCE_MS)
    expect(note).to_be_visible()
    assert "id_time_limit_s_error" in (field.get_attribute("aria-describedby") or "")
    assert note.inner_text()
    field.fill("4h")
    expect(note).to_be_hidden(timeout=PATIENCE_MS)
    expect(field).not_to_have_attribute("aria-invalid", "true")


def test_a_job_is_launched_with_few_tabs(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/launch/")
    skip = page.get_by_role("link", name="Skip to preview and launch")
    tabs = 0
    while not skip.evaluate("(link) => link === document.activeElement"):
        page.keyboard.press("Tab")
        tabs += 1
        assert tabs < 5
    page.keyboard.press("Enter")
    launch = page.locator("#rail button[type=submit]").first
    while not launch.evaluate("(button) => button === document.activeElement"):
        page.keyboard.press("Tab")
        tabs += 1
        assert tabs < 15


def test_a_draft_survives_navigation_until_it_is_launched_or_discarded(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/launch/?kind=training&defaults=1")
    page.locator("[name=name]").fill("half written")
    page.locator("[name=command]").fill("python train.py")
    page.locator("[name=launcher]").select_option("torchrun")
    page.goto("/jobs/")
    page.goto("/launch/?kind=training&defaults=1")
    note = page.locator("[data-draft]")
    expect(note).to_be_visible(timeout=PATIENCE_MS)
    expect(page.locator("[name=name]")).to_have_value("half written")
    expect(page.locator("[name=command]")).to_have_value("python train.py")
    expect(page.locator("[name=launcher]")).to_have_value("torchrun")
    note.get_by_role("button").click()
    expect(page.locator("[name=name]")).not_to_have_value("half written", timeout=PATIENCE_MS)
    page.locator("[name=name]").fill("sent")
    page.locator("[name=command]").fill("true")
    page.locator("[name=launcher]").select_option("none")
    page.locator("#rail button[type=submit]").first.click()
    page.wait_for_url("**/jobs/*/", timeout=PATIENCE_MS)
    page.goto("/launch/?kind=training&defaults=1")
    expect(page.locator("[name=name]")).not_to_have_value("sent", timeout=PATIENCE_MS)
    expect(note).to_be_hidden()


def test_amounts_follow_the_gpus_until_they_are_edited(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/launch/?kind=training&defaults=1")
    cores, memory = page.locator("[name=cores]"), page.locator("[name=memory_gib]")
    before = float(memory.input_value())
    page.locator("#size_presets button").nth(1).click()
    expect(memory).not_to_have_value(str(before), timeout=PATIENCE_MS)
    assert float(memory.input_value()) >= 2 * before
    cores.fill("3")
    page.locator("#size_presets button").nth(0).click()
    expect(page.locator("#sum-limits")).to_contain_text("no time limit", timeout=PATIENCE_MS)
    expect(cores).to_have_value("3")
