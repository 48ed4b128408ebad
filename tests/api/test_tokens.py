"""Tokens: shown once, kept as a hash, bounded in time and strength, and gone at once when revoked."""

from __future__ import annotations

import datetime as dt
import re

import pytest
from django.test import Client
from django.utils import timezone

from portal.errors import Conflict, Forbidden
from portal.models import ApiToken, AuditEntry
from portal.services.accounts import tokens
from portal.services.accounts.tokens import TOKEN_PATTERN, Scope, do_create_token, token_text
from portal.valkey import rate_limits
from tests import factories

pytestmark = pytest.mark.django_db
ME = "/api/v1/me/"


def ask(text: str, path: str = ME):
    return Client().get(path, headers={"Authorization": f"Bearer {text}"})


@pytest.fixture
def owner():
    return factories.user("ada")


def test_the_secret_is_shown_once_and_not_stored(owner):
    client = Client()
    client.force_login(owner)
    body = {"name": "laptop", "scopes": ["read", "jobs"]}
    made = client.post("/api/v1/tokens/", body, content_type="application/json")
    assert made.status_code == 201
    text = made.json()["token"]
    assert TOKEN_PATTERN.fullmatch(text)
    assert "token" not in client.get("/api/v1/tokens/").json()["items"][0]
    row = ApiToken.objects.get()
    secret = text.split("_")[2]
    assert len(secret) * 4 == 256
    assert secret not in str(ApiToken.objects.values()) + str(list(AuditEntry.objects.values()))
    assert (row.expires_at - row.created_at).days in {89, 90}
    me = ask(text).json()
    assert me["username"] == "ada"
    assert me["scopes"] == ["jobs", "read"]


def test_expiry_is_at_most_a_year(owner):
    client = Client()
    client.force_login(owner)
    for days in (0, 366, -1, "90", 1.5, True):
        body = {"name": "x", "scopes": ["read"], "days": days}
        assert client.post("/api/v1/tokens/", body, content_type="application/json").status_code == 400, days


def test_invalid_tokens_are_refused(owner):
    row, text = do_create_token(owner, name="t", scopes=[Scope.READ])
    assert ask(text).status_code == 200
    other_secret = token_text(row.public_id, "0" * 64)
    for wrong in (
        "",
        "fw_",
        text[:-1],
        text[:-1] + ("0" if text[-1] != "0" else "1"),
        other_secret,
        text + "x",
    ):
        answer = ask(wrong)
        assert answer.status_code == 401
        assert answer.json()["code"] == "invalid_token"
        assert answer["WWW-Authenticate"].startswith("Bearer")
    ApiToken.objects.update(expires_at=timezone.now())
    assert ask(text).json()["code"] == "token_expired"
    ApiToken.objects.update(expires_at=timezone.now() + dt.timedelta(days=1))
    owner.is_active = False
    owner.save()
    assert ask(text).json()["code"] == "account_deactivated"


def test_a_revoked_token_stops_working_at_once(owner):
    row, text = do_create_token(owner, name="t", scopes=[Scope.READ, Scope.TOKENS])
    path = f"/api/v1/tokens/{row.public_id}/"
    headers = {"Authorization": f"Bearer {text}"}
    assert Client().delete(path, headers=headers).status_code == 204
    assert ask(text).json()["code"] == "token_revoked"
    assert AuditEntry.objects.filter(action="token.revoke").count() == 1


def test_a_wrong_token_is_not_helped_by_a_session(owner):
    client = Client()
    client.force_login(owner)
    assert client.get(ME).status_code == 200
    assert client.get(ME, headers={"Authorization": "Bearer nonsense"}).status_code == 401
    assert client.get(ME, headers={"Authorization": "Basic YTpi"}).status_code == 401


def test_a_token_makes_none_that_is_stronger_or_lives_longer(owner):
    by, _ = do_create_token(owner, name="by", scopes=[Scope.TOKENS, Scope.READ], days=3)
    with pytest.raises(Forbidden) as refused:
        do_create_token(owner, name="x", scopes=[Scope.ADMIN], by=by)
    assert refused.value.code == "scope_not_permitted"
    child, _ = do_create_token(owner, name="x", scopes=[Scope.READ], days=300, by=by)
    assert child.expires_at == by.expires_at


@pytest.mark.parametrize("stronger", [scope for scope in Scope if scope is not Scope.TOKENS])
def test_a_token_neither_lists_nor_revokes_one_with_a_scope_it_lacks(owner, stronger):
    other, _ = do_create_token(owner, name="strong", scopes=[Scope.TOKENS, stronger])
    equal, _ = do_create_token(owner, name="equal", scopes=[Scope.TOKENS])
    by, text = do_create_token(owner, name="by", scopes=[Scope.TOKENS])
    headers = {"Authorization": f"Bearer {text}"}
    refused = Client().delete(f"/api/v1/tokens/{other.public_id}/", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "scope_not_permitted")
    assert refused.json()["details"] == {"scopes": [stronger.value]}
    other.refresh_from_db()
    assert other.revoked_at is None
    for weaker in (equal, by):
        assert Client().delete(f"/api/v1/tokens/{weaker.public_id}/", headers=headers).status_code == 204
    reader, text = do_create_token(owner, name="reader", scopes=[Scope.READ])
    listed = ask(text, "/api/v1/tokens/").json()["items"]
    assert {item["id"] for item in listed} == {reader.public_id}
    _, text = do_create_token(owner, name="all", scopes=[Scope.ADMIN])
    assert len(ask(text, "/api/v1/tokens/").json()["items"]) == 5
    client = Client()
    client.force_login(owner)
    assert len(client.get("/api/v1/tokens/").json()["items"]) == 5
    assert client.delete(f"/api/v1/tokens/{other.public_id}/").status_code == 204


def test_rate_limits_apply_per_token_and_per_user(owner, monkeypatch):
    monkeypatch.setattr(rate_limits, "REQUESTS", rate_limits.RateLimit("anything", 3, 3600))
    texts = [do_create_token(owner, name="t", scopes=[Scope.READ])[1] for _ in range(3)]
    session = Client()
    session.force_login(owner)
    assert [ask(texts[0]).status_code for _ in range(4)] == [200, 200, 200, 429]
    assert [session.get(ME).status_code for _ in range(2)] == [200, 200], "its owner's browser still works"
    assert ask(texts[1]).status_code == 200
    last = ask(texts[2])
    assert last.status_code == 429
    assert 0 < int(last["Retry-After"]) <= 3600
    _, other = do_create_token(factories.user(), name="t", scopes=[Scope.READ])
    assert ask(other).status_code == 200


def test_rights_are_the_owners_at_the_time_of_use(owner):
    project = factories.project("nlp", manager=owner)
    _, text = do_create_token(owner, name="t", scopes=[Scope.ADMIN])
    path = f"/api/v1/projects/{project.public_id}/"
    assert ask(text, path).status_code == 200
    project.memberships.all().delete()
    assert ask(text, path).status_code == 404


def test_the_number_of_tokens_is_limited(owner, monkeypatch):
    monkeypatch.setattr(tokens, "MAX_LIVE_TOKENS", 1)
    do_create_token(owner, name="a", scopes=[Scope.READ])
    with pytest.raises(Conflict):
        do_create_token(owner, name="b", scopes=[Scope.READ])


def test_the_last_use_is_stored_at_most_once_a_minute(owner, django_assert_num_queries):
    _, text = do_create_token(owner, name="t", scopes=[Scope.READ])
    tokens.get_token(text)
    used = ApiToken.objects.get().last_used_at
    assert used is not None
    with django_assert_num_queries(1):
        tokens.get_token(text)
    assert ApiToken.objects.get().last_used_at == used


def test_guessing_is_slowed(monkeypatch):
    monkeypatch.setattr(rate_limits, "INVALID_TOKENS", rate_limits.RateLimit("bad_tokens", 2, 60))
    answers = [ask("fw_no") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [401, 401, 429, 429]
    assert re.fullmatch(r"\d+", answers[-1]["Retry-After"])
