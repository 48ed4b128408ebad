"""Sessions at rest: no table holds what signs somebody in, and what a table holds signs nobody in."""

from __future__ import annotations

import datetime as dt

import pytest
from django.conf import settings
from django.db import connection
from django.test import Client
from django.utils import timezone

from portal.models import BrowserSession, WorkspaceTicket
from portal.services.accounts.sessions import SessionStore, session_id, session_user
from portal.services.accounts.tokens import Scope, do_create_token
from portal.services.accounts.users import do_create_magic_link
from portal.services.workspaces.access import do_open_workspace, do_redeem_ticket
from portal.services.workspaces.terminals import do_open_terminal
from scheduler import periodic
from tests import factories
from tests.gateway.gateway_harness import running_workspace, sign_in

pytestmark = pytest.mark.django_db


def tables_with(text: str) -> list[str]:
    """The tables of the database that hold the text in any column of any row."""
    found = []
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            name = connection.ops.quote_name(table)
            cursor.execute(f"SELECT 1 FROM {name} AS a WHERE a::text LIKE %s LIMIT 1", [f"%{text}%"])
            if cursor.fetchone():
                found.append(table)
    return found


def test_no_table_contains_a_key_that_signs_in():
    owner = factories.user()
    workspace = running_workspace(owner, port=1)
    key = sign_in(owner)
    _, ticket = do_open_workspace(owner, workspace, key)
    cookie = do_redeem_ticket(ticket, workspace.public_id)
    do_open_terminal(owner, workspace, 0, key, cols=80, rows=24)
    _, token = do_create_token(owner, name="t", scopes=[Scope.READ])
    code = do_create_magic_link(None, owner)
    assert cookie is not None
    assert tables_with(workspace.public_id)
    for held_by_a_browser in (key, ticket, cookie, token.split("_")[2], code):
        assert tables_with(held_by_a_browser) == []


def test_a_stored_session_hash_signs_nobody_in():
    owner = factories.user()
    sign_in(owner)
    stored = BrowserSession.objects.get().session_key
    for key in (stored, stored[:32]):
        client = Client()
        client.cookies[settings.SESSION_COOKIE_NAME] = key
        assert client.get("/").status_code == 302


def test_a_session_is_kept_renewed_and_ended_by_its_key():
    owner = factories.user()
    key = sign_in(owner)
    client = Client()
    client.cookies[settings.SESSION_COOKIE_NAME] = key
    assert client.get("/").status_code == 200
    store = SessionStore(key)
    assert store.exists(key) and not store.exists(BrowserSession.objects.get().session_key)
    store.cycle_key()
    assert client.get("/").status_code == 302
    client.cookies[settings.SESSION_COOKIE_NAME] = str(store.session_key)
    assert client.get("/").status_code == 200
    assert BrowserSession.objects.count() == 1
    store.flush()
    assert not BrowserSession.objects.exists()
    assert client.get("/").status_code == 302


def test_an_earlier_secret_key_keeps_sessions_and_a_new_password_ends_them(settings):
    owner = factories.user(password=factories.PASSWORD)
    workspace = running_workspace(owner, port=1)
    do_open_workspace(owner, workspace, sign_in(owner))
    stored = WorkspaceTicket.objects.get().session_key
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "the next key, long enough", [settings.SECRET_KEY]
    assert session_user(stored) == owner
    assert session_user(stored) == owner, "asking must not renew the session"
    owner.set_password("another long password")
    owner.save()
    assert session_user(stored) is None


def test_expired_sessions_are_deleted():
    owner = factories.user()
    sign_in(owner)
    BrowserSession.objects.update(expire_date=timezone.now() - dt.timedelta(seconds=1))
    kept = sign_in(owner)
    periodic.delete_old_rows()
    assert session_user(session_id(kept)) == owner
    assert BrowserSession.objects.count() == 1
