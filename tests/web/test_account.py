"""One's own account: time zone, password, tokens, sessions."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from portal.models import ApiToken
from tests import record

pytestmark = pytest.mark.django_db


@pytest.fixture
def user():
    return record.person("ada-love", password=record.PASSWORD)


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
    assert "not your present password" in wrong.content.decode()
    client.post(reverse("account-password"), {"old": record.PASSWORD, "password": "a longer new password"})
    assert client.get(reverse("home")).status_code == 200
    assert other.get(reverse("home")).status_code == 302


def test_other_sessions_are_listed_and_ended(client, user):
    other = Client()
    other.force_login(user)
    stranger = Client()
    stranger.force_login(record.person())
    assert len(client.get(reverse("account")).context["places"]) == 2
    client.post(reverse("account-sessions-end"))
    assert other.get(reverse("home")).status_code == 302
    assert client.get(reverse("home")).status_code == 200
    assert stranger.get(reverse("home")).status_code == 200


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
    other.force_login(record.person())
    client.post(reverse("account-token"), {"name": "laptop", "scopes": ["read"], "days": "30"})
    token = ApiToken.objects.get()
    assert other.post(reverse("account-token-revoke", args=[token.public_id])).status_code == 404
    token.refresh_from_db()
    assert token.revoked_at is None
