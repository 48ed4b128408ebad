"""``python -m tests.pictures``: takes the pictures of README from a fresh demo, in both themes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from tests.chromium import chromium
from tests.stories.portal import StoryPortal

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
SIZE = {"width": 1440, "height": 1000}
THEMES = ("light", "dark")
DEMO_LIMIT_S = 300
CHARTS_S = 90
"""The demo's run is older than this, so that its charts have a curve."""


def main() -> None:
    """Replace the pictures; prints their paths."""
    with StoryPortal("--demo") as portal, chromium() as browser:
        page = browser.new_context(base_url=portal.url).new_page()
        page.goto(portal.sign_in_link)
        page.wait_for_url(lambda url: "sign-in" not in url)
        job = _running_gang(page)
        time.sleep(CHARTS_S)
        addresses = {
            "job": f"/jobs/{job}/",
            "cluster": "/cluster/",
            "launch": "/launch/?kind=training&defaults=1",
        }
        for theme in THEMES:
            for name, address in addresses.items():
                path = FOLDER / f"{name}-{theme}.png"
                _take(browser, page, theme, address, path)
                print(path)


def _running_gang(page: Page) -> str:
    """Return a training run that has run on several GPUs for a while."""
    until = time.monotonic() + DEMO_LIMIT_S
    while time.monotonic() < until:
        listed: Any = page.request.get("/api/v1/jobs/?state=RUNNING&limit=100").json()
        gangs = [row for row in listed["items"] if row["kind"] == "training" and row["tasks"] > 1]
        if gangs:
            return str(max(gangs, key=lambda row: row["tasks"])["id"])
        time.sleep(2)
    raise TimeoutError("no gang of the demo is running")


def _take(browser: Browser, signed_in: Page, theme: str, address: str, path: Path) -> None:
    context = browser.new_context(
        base_url=signed_in.url,
        storage_state=signed_in.context.storage_state(),
        color_scheme="dark" if theme == "dark" else "light",
        viewport={"width": SIZE["width"], "height": SIZE["height"]},
    )
    page = context.new_page()
    page.goto(address)
    page.wait_for_timeout(3000)  # the first live samples
    page.screenshot(path=path)
    context.close()


if __name__ == "__main__":
    main()
