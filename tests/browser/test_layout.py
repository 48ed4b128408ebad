"""Layout of every page on wide, middle and narrow screens: no table is cut off, and what help texts name exists."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone
from playwright.sync_api import Page, expect

from portal.models import AttemptGpuDay, AttemptWork, ClusterSettings, Job
from portal.web.display.navigation import NAVIGATION
from tests.access.conftest import with_more
from tests.api.fixture_data import FixtureData
from tests.browser.test_accessibility import look_here
from tests.browser.test_every_page import pages_of

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

CUT_OFF = """() => {
  const found = [];
  const clipped = (cell, table) => {
    const right = cell.getBoundingClientRect().right;
    for (let box = table; box && box !== document.body; box = box.parentElement) {
      const clips = getComputedStyle(box).overflowX !== "visible";
      if (clips && right > box.getBoundingClientRect().right + 1) return true;
    }
    return right > innerWidth + 1;
  };
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page is wider than the window");
  for (const table of document.querySelectorAll("table")) {
    const cells = [...table.querySelectorAll("td, th")].filter((cell) => cell.checkVisibility());
    const cell = cells.find((each) => clipped(each, table));
    if (cell) found.push(`cut off: ${cell.innerText.trim().slice(0, 40)} of ${table.innerText.slice(0, 60)}`);
  }
  return found;
}"""
"""A table whose cells are beyond the edge of what clips it, which a mouse without a wheel cannot see."""
UNEXPLAINED = """() => {
  const shown = (each) => each.checkVisibility({ visibilityProperty: true });
  const labels = "button, a, label, legend, h1, h2, h3, summary, th, dt";
  const names = (without) => [...document.querySelectorAll(labels)]
    .filter((each) => shown(each) && !without.contains(each)).map((each) => each.innerText.trim());
  const found = [];
  for (const text of [...document.querySelectorAll(".fw-hint, .fw-cap")].filter(shown)) {
    const words = text.innerText;
    if (/\\bpage\\b/.test(words)) continue; // it says where else
    const explained = /(?:^|[.] )(?!Blank|Empty|Leer)([A-Z][a-z]+(?: [a-z]+)?): /g;
    const named = [...words.matchAll(/“([^”]{2,40})”/g), ...words.matchAll(explained)].map((match) => match[1]);
    const known = names(text);
    for (const name of named) if (!known.some((each) => each.includes(name))) found.push(`${name}: ${words}`);
  }
  return found;
}"""
"""What a visible help text names in quotation marks, or explains after its name and a colon, and nothing shows."""


UNMARKED = """() => {
  const found = [];
  for (const link of document.querySelectorAll("main a[href]")) {
    const style = getComputedStyle(link);
    if (!link.checkVisibility() || style.display !== "inline" || style.textDecorationLine === "underline") continue;
    let block = link.parentElement;
    while (["inline", "contents"].includes(getComputedStyle(block).display)) block = block.parentElement;
    if (getComputedStyle(link.parentElement).color === style.color) continue;
    const beside = (box) => [...box.childNodes].map((node) => {
      if (node.nodeType === 3) return node.data;
      if (node.nodeType !== 1 || node.matches("a, button, svg, .fw-sr")) return "";
      return ["inline", "contents"].includes(getComputedStyle(node).display) ? beside(node) : "";
    }).join("");
    const text = beside(block).trim();
    if (/\\p{L}{2}/u.test(text)) found.push(`${link.innerText} in ${text.slice(0, 60)}`);
  }
  return found;
}"""
"""Links that only their colour tells from the text around them (axe: link-in-text-block)."""
MIXED_UNITS = """() => {
  const found = [];
  const own = (cell) => [...cell.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data).join(" ");
  for (const table of document.querySelectorAll("main table")) {
    for (const index of [...table.rows[0].cells].keys()) {
      const cells = [...table.tBodies[0].rows].map((row) => row.cells[index]);
      const numbers = cells.filter((cell) => cell?.classList.contains("fw-num"));
      const figures = numbers.map(own).filter((text) => /\\d/.test(text));
      const units = new Set(figures.map((text) => text.replaceAll(/[<\\d.,\\s]/g, "")));
      if (units.size > 1) found.push([...units].join(" and "));
    }
  }
  return found;
}"""
"""Columns of figures with more than one unit."""
WIDTHS = (1440, 1024, 390)


class TestEveryPage:
    @pytest.fixture
    def dataset(self, transactional_db, tmp_path, settings) -> FixtureData:
        settings.LOG_DIR = tmp_path / "logs"
        return with_more()

    @pytest.mark.parametrize("actor", ["member", "admin"])
    def test_no_table_is_cut_off_and_help_names_what_is_there(self, open_as, dataset, actor) -> None:
        addresses = [row.path.format(**dataset.names) for row in pages_of(actor)]
        assert faults(open_as(actor, width=1440), addresses) == ""


@pytest.mark.parametrize("language", ["en-US", "de-DE"])
def test_no_page_of_the_navigation_is_cut_off_with_jobs_of_a_month(open_as, dataset, language) -> None:
    ClusterSettings.objects.update(
        policy={"gpu_hour_price": 2.5, "price_currency": "EUR", "grid_co2_g_per_kwh": 380}
    )
    with_days(dataset)
    items = [item for group in NAVIGATION.values() for item in group]
    addresses = [item.url for item in items] + ["/usage/?by=user", "/usage/?by=day"]
    assert faults(open_as("r-castellan", width=1440, language=language), addresses) == ""


def test_a_column_of_a_report_has_one_unit(open_as, dataset) -> None:
    with_days(dataset)
    page = open_as("r-castellan", width=1440)
    for by in ("project", "user", "day"):
        page.goto(f"/usage/?by={by}")
        assert page.locator("main tbody tr").count() > 2
        assert page.evaluate(MIXED_UNITS) == []


def test_more_on_a_phone_reaches_every_page_that_the_bar_lacks(open_as, dataset) -> None:
    for name, dark in (("m-okafor", False), ("r-castellan", True)):
        page = open_as(name, width=390, dark=dark, language="en-US")
        page.goto("/")
        side = page.locator(".fw-side nav a").evaluate_all("links => links.map((link) => link.pathname)")
        bar = page.locator(".fw-tabbar > a").evaluate_all("links => links.map((link) => link.pathname)")
        page.get_by_role("button", name="More").click()
        sheet = page.get_by_role("dialog", name="More")
        expect(sheet).to_be_visible()
        more = sheet.locator("section a").evaluate_all("links => links.map((link) => link.pathname)")
        assert {*bar, *more} == set(side) and not set(bar) & set(more)
        assert look_here(page) == ""
        page.keyboard.press("Escape")
        expect(sheet).to_be_hidden()
        for entry in ("Queue", "Experiments", "Sweeps", "Reports", "Templates", "Models"):
            page.get_by_role("button", name="More").click()
            sheet.get_by_role("link", name=entry).click()
            expect(page.locator("h1")).to_contain_text(entry)
            page.get_by_role("button", name="More").click()
            expect(sheet.locator("[aria-current=page]")).to_contain_text(entry)
            page.keyboard.press("Escape")


def test_a_tip_that_a_tap_shows_is_on_the_screen(open_as, dataset) -> None:
    page = open_as("m-okafor", width=390, touch=True)
    tips = 0
    for address in ("/", f"/jobs/{dataset.jobs['depth-anything-ft'].public_id}/", "/usage/"):
        page.goto(address)
        for element in page.locator("main [title]:visible").all()[:8]:
            if element.evaluate("each => Boolean(each.closest('a, button, summary, label'))"):
                continue
            element.scroll_into_view_if_needed()
            element.tap(force=True)
            tip = page.locator(".fw-tip")
            expect(tip).to_have_text(str(element.get_attribute("title")))
            box = tip.bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390, (address, box)
            assert box["y"] >= 0 and box["y"] + box["height"] <= 844, (address, box)
            tips += 1
    assert tips > 3


def with_days(dataset) -> None:
    """Attempts of very different length, which ended: their hours, energy and waits need other units alone."""
    now = timezone.now()
    jobs = [job for job in dataset.jobs.values() if job.attempts.exists()]
    for number, job in enumerate(jobs):
        attempt = job.attempts.first()
        size, yesterday = 40.0 ** (number % 4), now.date() - dt.timedelta(days=1)
        who = {"attempt": attempt, "pool": attempt.pool, "project": job.project, "user": job.owner}
        if not hasattr(attempt, "work"):
            AttemptWork.objects.create(
                ended_at=now, cause="preemption",
                useful_gpu_s=60 * size, startup_gpu_s=size, lost_gpu_s=9 * size, **who,
            )  # fmt: skip
        AttemptGpuDay.objects.create(
            job=job, day=yesterday, is_continued=False, measured_gpu_s=60 * size, busy_gpu_s=40 * size,
            idle_gpu_s=10 * size, joules=9000 * size, **who,
        )  # fmt: skip
        started = Job.objects.get(pk=job.pk).started_at or now
        Job.objects.filter(pk=job.pk).update(
            started_at=started, submitted_at=started - dt.timedelta(seconds=size)
        )


def faults(page: Page, addresses: list[str]) -> str:
    found = []
    for address in addresses:
        page.goto(address)
        found += [f"{address}: only coloured: {link}" for link in page.evaluate(UNMARKED)]
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            found += [f"{address} at {width}: {fault}" for fault in page.evaluate(CUT_OFF)]
            found += [f"{address} at {width}: unexplained {name}" for name in page.evaluate(UNEXPLAINED)]
    return "\n".join(found)
