"""Access to every page and action for every kind of user, and that a refused request changes no row."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from django.contrib.messages import get_messages
from django.db import connection, transaction
from django.http import HttpResponse
from django.test.utils import CaptureQueriesContext
from django.urls import URLPattern, URLResolver, get_resolver, resolve

from portal.access import AccessPolicy
from portal.policy_middleware import policy_of
from tests.access.pages import PAGES, PUBLIC, Page
from tests.api.fixture_data import ACTORS, FixtureData
from tests.api.table import ADMIN, EVERYBODY, NOBODY

REFUSALS = re.compile(
    "You may view this, but you lack the permission for this action|Only (managers|administrators|its owner) |"
    "There is no such (secret|job|delivery|browser)"
    "|Administrators decide on this|Managers of the project and administrators cut"
)
"""How a page says that somebody lacks the right, where it goes back to a page to say it."""
NOT_COUNTED = ("portal_browsersession", "portal_apitoken")
"""Tables that a request may write on its way to the view: the session that lasts on, and a token's last use."""
REFUSED = '"portal_auditentry"'
"""What a refused request may write: the row of the audit trail about it."""


def ask(fixture_data: FixtureData, page: Page, actor: str) -> tuple[HttpResponse, list[str]]:
    """The answer, and the statements that changed a row."""
    names = fixture_data.names_of(actor)
    body = {key: str(value).format(**names) for key, value in (page.body or {}).items()}
    client = fixture_data.client(actor)
    with CaptureQueriesContext(connection) as seen:
        answer = getattr(client, page.method)(
            page.path.format(**names), body if page.method == "post" else None
        )
    texts = [query["sql"] for query in seen.captured_queries]
    writes = [text for text in texts if text.startswith(("INSERT", "UPDATE", "DELETE"))]
    return answer, [text for text in writes if not any(f'"{table}"' in text for table in NOT_COUNTED)]


def actors_of(page: Page) -> tuple[str, ...]:
    """Whom to try: for what everybody may look at, those with the least rights; for what only administrators may do,
    those with the most."""
    if page.allowed == ADMIN:
        return ("anonymous", "deactivated", "former", "manager", "admin")
    if page.allowed == EVERYBODY and page.method == "get":
        return ("anonymous", "deactivated", "stranger", "former", "viewer")
    return ("anonymous", *ACTORS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.name} {page.method}")
def test_who_may(page: Page, fixture_data: FixtureData) -> None:
    for actor in actors_of(page):
        with transaction.atomic():
            answer, writes = ask(fixture_data, page, actor)
            assert answer.status_code == page.expected(actor), (actor, answer)
            if actor in NOBODY:
                assert answer["Location"].startswith("/sign-in/"), actor
            may_write = page.method == "post" and page.writes and actor in page.allowed
            if may_write and page.name != "account-token":
                assert writes, f"{actor} may do this, and nothing was written"
            elif not may_write:
                assert [text for text in writes if REFUSED not in text] == [], actor
            if answer.status_code == 302 and actor not in NOBODY:
                shown = " ".join(str(each) for each in get_messages(answer.wsgi_request))
                assert bool(REFUSALS.search(shown)) == (actor not in page.allowed), (actor, shown)
            transaction.set_rollback(True)


def routes(patterns: list[URLPattern | URLResolver]) -> Iterator[URLPattern]:
    """The routes that are no REST: those that have a page's policy and a name."""
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            yield from routes(pattern.url_patterns)
        elif pattern.name and not hasattr(pattern.callback, "cls"):
            yield pattern


ROUTES = {str(route.name): route for route in routes(get_resolver().url_patterns)}


def test_the_table_names_every_page() -> None:
    assert {page.name for page in PAGES} | PUBLIC == set(ROUTES)
    public = {name for name, route in ROUTES.items() if policy_of(route.callback) is AccessPolicy.PUBLIC}
    assert public == PUBLIC


def test_pages_outside_the_table_return_404(fixture_data: FixtureData) -> None:
    client = fixture_data.client("admin")
    for page in {page.name: page for page in PAGES}.values():
        path = page.path.format(**fixture_data.names_of("admin"))
        assert resolve(path.partition("?")[0]).url_name == page.name
        known = {each.method for each in PAGES if each.name == page.name}
        for method in {"get", "post"} - known:
            assert getattr(client, method)(path).status_code == 405, (page.name, method)
