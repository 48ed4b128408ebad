"""One's own account: time zone, password, tokens, sessions."""

from __future__ import annotations

import secrets

import pytest
from django.test import Client
from django.urls import reverse

from portal.models import ApiToken, User
from portal.valkey import rate_limits
from portal.web.accounts import account
from tests import factories

pytestmark = pytest.mark.django_db


@pytest.fixture
def user():
    return factories.user("ada-love", password=factories.PASSWORD)


@pytest.fixture(autouse=True)
def rates_of_this_test(monkeypatch):
    monkeypatch.setattr(rate_limits, "PREFIX", f"test:rate:{secrets.token_hex(6)}")


@pytest.fixture
def client(user):
    client = Client()
    client.force_login(user)
    return client


def test_times_follow_the_zone_of_the_person(client, user):
    fields = {"full_name": "Ada Love", "email": "", "timezone": "Asia/Tokyo"}
    assert client.post(reverse("account-name"), fields).status_code == 302
    assert 'data-zone="Asia/Tokyo"' in client.get(reverse("home")).content.decode()
    wrong = client.post(reverse("account-name"), fields | {"timezone": "Mars/Olympus"})
    assert wrong.status_code == 400


def test_a_new_password_ends_the_other_sessions(client, user):
    other = Client()
    other.force_login(user)
    wrong = client.post(reverse("account-password"), {"old": "wrong", "password": "a longer new password"})
    assert wrong.status_code == 400
    assert "not your current password" in wrong.content.decode()
    client.post(reverse("account-password"), {"old": factories.PASSWORD, "password": "a longer new password"})
    assert client.get(reverse("home")).status_code == 200
    assert other.get(reverse("home")).status_code == 302


def try_password(client, old, password="a longer new password"):
    return client.post(reverse("account-password"), {"old": old, "password": password})


def test_guesses_of_the_current_password_are_paused(client, user):
    limit = rate_limits.SIGN_IN.limit
    assert [try_password(client, f"guess {i}").status_code for i in range(limit)] == [400] * limit
    paused = try_password(client, factories.PASSWORD)
    assert paused.status_code == 429
    assert 0 < int(paused["Retry-After"]) <= rate_limits.SIGN_IN.period_s
    assert "Too many attempts. Wait " in paused.content.decode()
    assert User.objects.get().check_password(factories.PASSWORD)
    elsewhere = Client(REMOTE_ADDR="10.1.1.1")
    elsewhere.force_login(user)
    assert try_password(elsewhere, factories.PASSWORD).status_code == 302


def test_guesses_of_the_current_password_from_many_addresses_are_paused(user, monkeypatch):
    monkeypatch.setattr(account, "SIGN_IN_NAME", rate_limits.RateLimit("sign_in_name", 3, 3600))
    browsers = [Client(REMOTE_ADDR=f"10.1.1.{i}") for i in range(5)]
    for browser in browsers:
        browser.force_login(user)
    assert [try_password(browser, "guess").status_code for browser in browsers] == [400, 400, 400, 429, 429]


def test_the_correct_password_does_not_count_as_a_guess(client):
    for _ in range(rate_limits.SIGN_IN.limit + 1):
        assert try_password(client, factories.PASSWORD, "short").status_code == 400
    assert try_password(client, factories.PASSWORD).status_code == 302


def test_failed_sign_ins_do_not_pause_a_signed_in_user(client, user):
    for _ in range(rate_limits.SIGN_IN.limit + 1):
        guess = Client().post("/sign-in/", {"username": user.username, "password": "guess"})
    assert guess.status_code == 429
    assert try_password(client, factories.PASSWORD).status_code == 302


def test_other_sessions_are_listed_and_ended(client, user):
    other = Client()
    other.force_login(user)
    outsider = Client()
    outsider.force_login(factories.user())
    assert len(client.get(reverse("account")).context["sessions"]) == 2
    client.post(reverse("account-sessions-end"))
    assert other.get(reverse("home")).status_code == 302
    assert client.get(reverse("home")).status_code == 200
    assert outsider.get(reverse("home")).status_code == 200


def test_a_token_is_shown_once_and_revoked(client, user):
    page = client.post(reverse("account-token"), {"name": "laptop", "scopes": ["read"], "days": "30"})
    token = ApiToken.objects.get(owner=user)
    assert f"fw_{token.public_id}_" in page.context["new_text"]
    assert page.context["new_text"] in page.content.decode()
    assert page.context["new_text"] not in client.get(reverse("account")).content.decode()
    client.post(reverse("account-token-revoke", args=[token.public_id]))
    token.refresh_from_db()
    assert token.revoked_at is not None


def test_a_strangers_token_cannot_be_revoked(client):
    other = Client()
    other.force_login(factories.user())
    client.post(reverse("account-token"), {"name": "laptop", "scopes": ["read"], "days": "30"})
    token = ApiToken.objects.get()
    assert other.post(reverse("account-token-revoke", args=[token.public_id])).status_code == 404
    token.refresh_from_db()
    assert token.revoked_at is None
