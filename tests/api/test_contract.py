"""Access to every operation for every kind of user, and what a refusal discloses."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from django.db import transaction
from django.http import HttpResponse
from django.urls import URLPattern, URLResolver

from portal.api import urls
from portal.api.framework.views import ApiView
from portal.api.schema import openapi_document
from portal.services.accounts.tokens import Scope
from tests.api import fixture_data as worlds
from tests.api import table
from tests.api.fixture_data import ACTORS, FixtureData
from tests.api.table import BY_KIND, NOBODY, ROWS, Row

ROOT = "/api/v1/"


@pytest.fixture(scope="module")
def make_world() -> Callable[[], FixtureData]:
    """One with every kind of actor."""
    return worlds.make_wide


def call(
    fixture_data: FixtureData, row: Row, actor: str, headers: dict[str, str] | None = None
) -> HttpResponse:
    """The answer to one request."""
    path = "/api/schema/" if row.name == "schema" else row.path.format(**fixture_data.names_of(actor))
    path = path if path.startswith("/") else ROOT + path
    sent = dict(headers or {})
    if row.if_match:
        sent["If-Match"] = row.if_match if isinstance(row.if_match, str) else worlds.etag(fixture_data)
    client = fixture_data.client("anonymous" if headers else actor)
    text = json.dumps(row.body)
    for name, value in fixture_data.names_of(actor).items():
        text = text.replace(f"{{{name}}}", value)
    body = {} if row.body is None else {"data": text, "content_type": "application/json"}
    return getattr(client, row.method)(path, headers=sent, **body)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_who_may(row: Row, fixture_data: FixtureData) -> None:
    for actor in ("anonymous", *ACTORS):
        with transaction.atomic():
            answer = call(fixture_data, row, actor)
            assert answer.status_code == row.expected(actor), (actor, answer)
            if answer.status_code >= 400:
                assert answer["Content-Type"] == "application/problem+json"
            if answer.streaming:
                assert b"".join(answer.streaming_content)
            transaction.set_rollback(True)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_tokens_need_the_scope_and_lend_no_right(row: Row, fixture_data: FixtureData) -> None:
    wanted = Scope.JOBS if row.scopes == BY_KIND else next(iter(row.scopes))
    best = "member" if "member" in row.allowed else next(a for a in ACTORS if a in row.allowed)
    status = 200 if row.name == "workspaces_open" else row.status  # a token gets the page's address
    for scopes, expected in (
        ([wanted], status),
        ([Scope.ADMIN], status),
        ([scope for scope in Scope if scope not in {*row.scopes, Scope.ADMIN}], 403),
    ):
        with transaction.atomic():
            answer = call(fixture_data, row, best, fixture_data.bearer(best, *scopes))
            assert answer.status_code == expected, (scopes, answer)
            if expected == 403:
                assert json.loads(answer.content)["code"] == "scope_missing"
            transaction.set_rollback(True)
    for actor in sorted({"deactivated", "former", "viewer", "manager"} - row.allowed):
        with transaction.atomic():
            answer = call(fixture_data, row, actor, fixture_data.bearer(actor, Scope.ADMIN))
            assert answer.status_code == row.expected(actor), (actor, answer.content)
            transaction.set_rollback(True)


@pytest.mark.parametrize("row", [row for row in ROWS if row.scopes == BY_KIND], ids=lambda row: row.name)
def test_an_act_on_a_job_needs_the_scope_of_its_kind(row: Row, fixture_data: FixtureData) -> None:
    best = "member" if "member" in row.allowed else "admin"
    kinds = {"job": "workspace", "running": "running_workspace", "ended": "ended_workspace"}
    workspaces = {key: fixture_data.names[of] for key, of in kinds.items()}
    for names, right, wrong in (
        (fixture_data.names, Scope.JOBS, Scope.WORKSPACES),
        (fixture_data.names | workspaces, Scope.WORKSPACES, Scope.JOBS),
    ):
        fixture_data.names = names
        for scopes, refused in (([right], False), ([wrong], True), ([Scope.ADMIN], False)):
            with transaction.atomic():
                answer = call(fixture_data, row, best, fixture_data.bearer(best, *scopes))
                assert (answer.status_code == 403) == refused, (scopes, answer.content)
                if refused:
                    assert json.loads(answer.content)["code"] == "scope_missing"
                transaction.set_rollback(True)


def test_the_scopes_of_the_table_are_those_that_are_described() -> None:
    for row in ROWS:
        text = next(
            operation["description"]
            for operations_of in openapi_document()["paths"].values()
            for operation in operations_of.values()
            if operation["operationId"] == row.name
        ).rsplit("A token needs the scope", 1)[1]
        assert {scope for scope in Scope if f"`{scope}`" in text} == row.scopes, row.name


def test_the_table_names_every_operation() -> None:
    named = {
        operation["operationId"]
        for operations_of in openapi_document()["paths"].values()
        for operation in operations_of.values()
    }
    assert named == {row.name for row in ROWS}


def test_every_method_of_every_view_is_declared() -> None:
    def walk(patterns: list[URLPattern | URLResolver]) -> None:
        for pattern in patterns:
            if isinstance(pattern, URLResolver):
                walk(pattern.url_patterns)
                continue
            view = getattr(pattern.callback, "cls", None)
            if view is None:
                continue
            assert issubclass(view, ApiView), pattern
            for method in ("get", "post", "put", "patch", "delete"):
                handler = getattr(view, method, None)
                assert handler is None or hasattr(handler, "operation"), (view, method)

    walk(urls.urlpatterns)


def test_lists_contain_only_visible_rows(fixture_data: FixtureData) -> None:
    for path in ("projects/", "jobs/", "workspaces/", "quotas/"):
        signed_in = [actor for actor in ACTORS if actor not in NOBODY]
        seen = {actor: fixture_data.client(actor).get(ROOT + path).json()["items"] for actor in signed_in}
        for actor in table.OUTSIDE:
            assert [item for item in seen[actor] if item.get("name") != "elsewhere"] == [], actor
        assert seen["viewer"] and seen["admin"]


def test_variables_are_shown_to_those_who_control_the_job(fixture_data: FixtureData) -> None:
    path = ROOT + f"jobs/{fixture_data.names['job']}/"
    for actor in table.INSIDE:
        environ = fixture_data.client(actor).get(path).json()["env"]
        assert environ == ({"WORD": "hidden"} if actor in table.CONTROLLERS else None), actor
