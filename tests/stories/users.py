"""Users at a browser, and what administrators set up by the pages."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.rig.node import RigNode
from tests.stories.portal import StoryPortal
from tests.time_budget import budget_ms, budget_s

PASSWORD = "a phrase nobody guesses"
POOL = "pretend"


def eventually(check: Callable[[], Any], within_s: float = 40, what: str = "") -> Any:
    """What ``check`` gives as soon as that is true; ``within_s`` is scaled by ``budget_s``."""
    deadline, last = time.monotonic() + budget_s(within_s), None
    while time.monotonic() < deadline:
        last = check()
        if last:
            return last
        time.sleep(0.2)
    raise AssertionError(f"not within {within_s} s: {what} (last: {last})")


class Person:
    """Somebody at a browser, with an API token of their own."""

    def __init__(self, browser: Browser, portal: StoryPortal) -> None:
        self.portal = portal
        self.context: BrowserContext = browser.new_context(viewport={"width": 1280, "height": 900})
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.api = httpx.Client()

    def go(self, path: str) -> Page:
        """Opens a page of the portal."""
        self.page.goto(path if path.startswith("http") else self.portal.url + path)
        return self.page

    def take_token(self) -> None:
        """Makes an API token on the account page, and uses it from then on."""
        page = self.go("/account/")
        form = page.locator("form", has=page.locator("input[name=scopes]"))
        form.get_by_label("Name", exact=True).fill("story")
        for scope in page.locator("input[name=scopes]").all():
            scope.check()
        page.get_by_role("button", name=re.compile("token", re.I)).first.click()
        found = eventually(lambda: re.search(r"fw_\w+", page.content()), what="the token is shown")
        self.api = httpx.Client(
            base_url=self.portal.url + "/api/v1", headers={"Authorization": f"Bearer {found[0]}"}, timeout=20
        )

    def submit(self, body: dict[str, Any], **more: Any) -> str:
        """Submits a job by REST and gives its id."""
        answer = self.api.post("/jobs/", json=body | more)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def reaches(self, job: str, *states: str, within_s: float = 40) -> None:
        """Waits until a job is in one of these states."""
        eventually(
            lambda: self.api.get(f"/jobs/{job}/").json()["state"] in states, within_s, f"{job} is {states}"
        )

    def log_of(self, job: str) -> str:
        """The lines of a job's log as text, once there are any."""
        return json.dumps(
            eventually(lambda: self.api.get(f"/jobs/{job}/logs/").json().get("text"), what="its log")
        )


def add_node(admin: Person, node: RigNode, name: str) -> None:
    """Adds one machine by the page: address, host key, script in its root shell, live test."""
    page = admin.go("/nodes/add/")
    page.get_by_label("Host or address").fill(node.address)
    page.get_by_label("Node name").fill(name)
    pool = page.locator("#id_pool")
    if POOL in pool.inner_text():
        pool.select_option(label=POOL)
    else:
        page.get_by_label("New pool optional").fill(POOL)
    page.get_by_role("button", name="Show its host key").click()
    shown = page.locator("#fingerprint").inner_text()
    on_node = node.execute("ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub").stdout
    assert shown in on_node
    node.execute("sh", "-s", text_in=page.locator("#script").input_value(), timeout_s=120)
    page.get_by_label("Yes, this is its key").check()
    page.get_by_role("button", name="Add it and test the connection").click()
    expect(page.get_by_text("Everything works")).to_be_visible(timeout=budget_ms(40))


def invite(admin: Person, browser: Browser, project: str, username: str) -> Person:
    """Invites somebody into a project by a link, which they open and accept."""
    page = admin.go("/projects/")
    page.get_by_role("link", name=project, exact=True).click()
    page.get_by_role("button", name="Create link").click()
    link = page.locator("#once-link").input_value()
    person = Person(browser, admin.portal)
    person.go(link)
    person.page.get_by_label("Username").fill(username)
    for field in person.page.locator("input[type=password]").all():
        field.fill(PASSWORD)
    name = person.page.get_by_label(re.compile("name", re.I))
    if name.count() > 1:
        name.nth(1).fill(username.title())
    person.page.get_by_role("button", name="Create account").click()
    expect(person.page.get_by_role("heading", name="My work")).to_be_visible(timeout=budget_ms(15))
    return person


def set_quota(admin: Person, **projects: dict[str, str]) -> None:
    """Edits quotas in the table and saves them together."""
    page = admin.go(f"/quotas/?pool={POOL}")
    for project, cells in projects.items():
        for cell, value in cells.items():
            page.get_by_label(f"{cell.title()} of {project}").fill(value)
    page.get_by_label("Why (recorded").fill("the story")
    page.get_by_role("button", name="Save changes").click()
    expect(page.get_by_text("It takes effect with the next cycle")).to_be_visible()
