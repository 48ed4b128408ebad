"""Launchers in the browser: options appear with their launcher, and variables of single ranks are a table."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from portal.models import Job, NodePool

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


@pytest.mark.parametrize("width", [1280, 390])
def test_options_and_ranks_are_edited_and_shown_before_the_launch(open_as, width) -> None:
    NodePool.objects.update(allow_host_network=True)
    page = open_as("m-okafor", width=width)
    page.goto("/launch/?kind=training&defaults=1")
    page.locator("[name=name]").fill("with ranks")
    page.locator("[name=command]").fill("python train.py")
    page.locator("[name=tasks]").fill("2")
    threshold = page.locator("[name=horovod-fusion_threshold_mb]")
    expect(threshold).to_be_hidden()
    page.locator("[name=launcher]").select_option("horovod")
    expect(threshold).to_be_visible()
    threshold.fill("32")
    page.locator("summary", has_text="Variables of single ranks").click()
    expect(page.locator("[name=rank_overrides]")).to_be_hidden()
    for rank, name, value in (("1", "DEBUG", "of rank 1"), ("0", "MISTAKE", "")):
        page.get_by_role("button", name="Add a variable").click()
        for label, text in (("Rank", rank), ("Variable", name), ("Value", value)):
            page.get_by_label(label, exact=True).last.fill(text)
    page.locator("[data-lines=rank_overrides] [data-line-remove]").last.click()
    if width > 1000:
        page.get_by_role("tab", name="Ranks").click()
        expect(page.locator("#v-ranks")).to_contain_text("HOROVOD_FUSION_THRESHOLD=33554432")
        expect(page.locator("#v-ranks")).to_contain_text("of rank 1")
        expect(page.locator("#v-ranks")).not_to_contain_text("MISTAKE")
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0
    page.locator("#rail" if width > 1000 else ".fw-dock").get_by_role("button", name="Launch").click()
    page.wait_for_url("**/jobs/*/")
    job = Job.objects.get(name="with ranks")
    assert job.launcher_options == {"fusion_threshold_mb": 32}
    assert job.rank_overrides == {"1": {"DEBUG": "of rank 1"}}
    page.goto(f"/launch/?like={job.public_id}")
    expect(page.get_by_label("Value", exact=True)).to_have_value("of rank 1")
