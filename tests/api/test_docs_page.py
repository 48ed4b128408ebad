"""The description's page in a real Chromium: it draws under its policy, and a request from it goes through."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.conf import settings
from django.test import Client

from portal.models import ApiToken
from tests import factories
from tests.chromium import chromium

pytestmark = [pytest.mark.browser, pytest.mark.heavy, pytest.mark.django_db(transaction=True)]


def look(address: str, cookie: str) -> tuple[list[str], int, str]:
    """What the console complained of, how many sections were drawn, and the answer to a token made there."""
    complaints: list[str] = []
    with chromium() as browser:
        context = browser.new_context()
        context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": cookie, "url": address}])
        page = context.new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{address}/api/docs/")
        page.wait_for_selector(".opblock-tag", timeout=60_000)
        drawn = page.locator(".opblock-tag").count()
        page.locator("#operations-tag-tokens").click()
        page.locator("#operations-tokens-tokens_create .opblock-summary-control").click()
        page.locator("#operations-tokens-tokens_create textarea").fill('{"name": "made", "scopes": ["read"]}')
        page.locator("#operations-tokens-tokens_create button.execute").click()
        answer = page.locator("#operations-tokens-tokens_create .live-responses-table .response-col_status")
        answer.last.wait_for(timeout=60_000)
        status = answer.last.inner_text()
    return complaints, drawn, status


def test_the_docs_page_renders_and_sends_requests_under_its_policy(live_server):
    client = Client()
    client.force_login(factories.user("ada"))
    cookie = client.cookies[settings.SESSION_COOKIE_NAME].value
    with ThreadPoolExecutor(1) as pool:  # a thread of its own: Playwright keeps an event loop
        complaints, drawn, status = pool.submit(look, live_server.url, cookie).result(170)
    assert complaints == []
    assert drawn > 8
    assert status.startswith("201")
    assert ApiToken.objects.get().name == "made"
