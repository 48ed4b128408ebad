"""Every page of the access table passes axe, in both themes, on a phone and on a wide screen."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from tests.access.conftest import with_more
from tests.access.pages import PAGES, Page
from tests.api.fixture_data import FixtureData
from tests.browser.test_accessibility import SQUEEZED, look_here

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.django_db(transaction=True)]

PUBLIC = [Page(name, "get", path, frozenset({"anonymous"})) for name, path in (
    ("sign-in", "/sign-in/"), ("sign-in-link", "/sign-in/link/"), ("invitation", "/invitation/"),
)]  # fmt: skip
NO_PAGES = {
    "api-docs", "api-docs-start", "help-section", "inbox-count", "job-alternatives", "job-environment-file",
    "job-files-list", "job-log-download", "job-log-lines", "job-log-search", "job-runs", "job-series",
    "job-terminal", "jobs-csv", "node-series", "plan-json", "plan-program", "quota-replay", "runs-csv",
    "search", "sweep-trials-csv", "terminal-state", "usage-csv",
}  # fmt: skip
"""Fragments, JSON and downloads; the API explorer, which Swagger UI draws; and terminals, which need a node."""


@pytest.fixture
def dataset(transactional_db, tmp_path, settings) -> FixtureData:
    settings.LOG_DIR = tmp_path / "logs"
    return with_more()


@pytest.mark.parametrize(("width", "language"), [(360, "en-US"), (360, "de-DE"), (1440, "en-US")])
@pytest.mark.parametrize("actor", ["anonymous", "member", "admin"])
def test_every_page_passes_axe(open_as, dataset, actor, width, language):
    page = open_as("" if actor == "anonymous" else actor, width=width, language=language)
    found = []
    for row in pages_of(actor):
        address = row.path.format(**dataset.names)
        page.goto(address)
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            found += [f"{address} {theme}: {line}" for line in look_here(page).splitlines()]
        found += [f"{address}: {cell!r} is covered" for cell in page.evaluate(SQUEEZED)]
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            found.append(f"{address}: wider than the screen")
    assert "\n".join(found) == ""


def pages_of(actor: str) -> list[Page]:
    """All pages that an administrator may open, and those that only the owner of a job may."""
    if actor == "anonymous":
        return PUBLIC
    return [
        row
        for row in PAGES
        if row.method == "get"
        and row.status == HTTPStatus.OK
        and row.name not in NO_PAGES
        and actor == ("admin" if "admin" in row.allowed else "member")
    ]
