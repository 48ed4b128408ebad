"""Coming in: password, one-time link, invitation; and out again."""

from __future__ import annotations

import datetime as dt
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.conf import settings
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from portal import policy_middleware
from portal.domain.states import Role
from portal.errors import InvalidRequest
from portal.models import AuditEntry, BrowserSession, Membership, User
from portal.services.accounts import sessions, users
from portal.services.accounts.sessions import session_id
from portal.valkey import rate_limits
from portal.web.accounts import sign_in
from tests import factories

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def fresh_rates(monkeypatch):
    monkeypatch.setattr(rate_limits, "PREFIX", f"test:rate:{secrets.token_hex(6)}")


def test_a_password_signs_in_and_returns_to_the_requested_page():
    user = factories.user("ada-love", password=factories.PASSWORD)
    client = Client()
    answer = client.post(
        "/sign-in/?next=/jobs/", {"username": "ada-love", "password": factories.PASSWORD, "next": "/jobs/"}
    )
    assert answer.status_code == 302
    assert answer["Location"] == "/jobs/"
    assert client.session["_auth_user_id"] == str(user.pk)


@pytest.mark.parametrize(
    "away", ["https://evil.example/", "//evil.example/", "javascript:alert(1)", "jobs", "/\\evil.example"]
)
def test_signing_in_never_redirects_to_another_host(away):
    factories.user("ada-love", password=factories.PASSWORD)
    answer = Client().post(
        "/sign-in/", {"username": "ada-love", "password": factories.PASSWORD, "next": away}
    )
    assert answer["Location"] == "/"


def test_a_wrong_password_and_an_unknown_name_give_the_same_answer():
    factories.user("ada-love", password=factories.PASSWORD)
    known = Client().post("/sign-in/", {"username": "ada-love", "password": "wrong"})
    unknown = Client().post("/sign-in/", {"username": "nobody", "password": "wrong"})
    assert known.status_code == unknown.status_code == 403
    message = "The username or the password is wrong."
    assert message in known.content.decode()
    assert message in unknown.content.decode()


@pytest.mark.parametrize("typed", ["ada", "Ada", "ADA", " ada ", "\uff21\uff44\uff41", "a\uff24a"])
def test_case_and_width_of_a_typed_name_do_not_matter(typed):
    user = factories.user("ada", password=factories.PASSWORD)
    client = Client()
    answer = client.post("/sign-in/", {"username": typed, "password": factories.PASSWORD})
    assert answer.status_code == 302 and client.session["_auth_user_id"] == str(user.pk)
    assert Client().post("/sign-in/", {"username": typed, "password": "wrong"}).status_code == 403


def test_names_that_differ_in_case_alone_are_typed_exactly():
    """Such rows are older than the rule: a new one is refused."""
    for name in ("Bea", "bea"):
        factories.user(name, password=f"{name} {factories.PASSWORD}")
    for name in ("Bea", "bea"):
        fields = {"username": name, "password": f"{name} {factories.PASSWORD}"}
        assert Client().post("/sign-in/", fields).status_code == 302
    other = {"username": "BEA", "password": f"bea {factories.PASSWORD}"}
    assert Client().post("/sign-in/", other).status_code == 403
    factories.user("Cleo")
    _, code = users.do_create_invitation(factories.user("boss", admin=True))
    with pytest.raises(InvalidRequest, match="Another user has this name"):
        users.do_accept_invitation(code, username="cleo", full_name="", password=factories.PASSWORD)


def test_attempts_are_counted_by_the_name_without_case_and_width():
    factories.user("ada", password=factories.PASSWORD)
    forms = ["ada", "ADA", "Ada", " ada", "\uff21da", "aDa"]
    answers = [Client().post("/sign-in/", {"username": name, "password": "x"}).status_code for name in forms]
    assert answers == [403] * rate_limits.SIGN_IN.limit + [429]


def test_guessing_is_paused_for_the_guesser_only():
    factories.user("ada-love", password=factories.PASSWORD)
    for number in range(rate_limits.SIGN_IN.limit):
        wrong = Client().post("/sign-in/", {"username": "ada-love", "password": f"guess {number}"})
        assert wrong.status_code == 403
    right = {"username": "ada-love", "password": factories.PASSWORD}
    paused = Client().post("/sign-in/", right)
    assert paused.status_code == 429
    assert 0 < int(paused["Retry-After"]) <= rate_limits.SIGN_IN.period_s
    assert "Too many attempts. Wait " in paused.content.decode()
    assert Client(REMOTE_ADDR="10.1.1.1").post("/sign-in/", right).status_code == 302


def test_one_password_for_many_names_is_paused_by_address(monkeypatch):
    monkeypatch.setattr(sign_in, "SIGN_IN_ADDRESS", rate_limits.RateLimit("sign_in_address", 3, 300))
    factories.user("ada-love", password=factories.PASSWORD)
    for name in ("ben", "cleo", "dora"):
        assert Client().post("/sign-in/", {"username": name, "password": "Sommer2026"}).status_code == 403
    right = {"username": "ada-love", "password": factories.PASSWORD}
    assert Client().post("/sign-in/", right).status_code == 429
    assert Client(REMOTE_ADDR="10.1.1.1").post("/sign-in/", right).status_code == 302


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("10.1.1.1", "10.1.1.1"),
        ("2001:db8:1:2:aaaa::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:bbbb::9", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::9", "2001:db8:1:3::/64"),
        ("::ffff:10.1.1.1", "10.1.1.1"),
        ("", "unknown"),
    ],
)
def test_addresses_that_one_machine_may_have_count_as_one(address, counted):
    assert rate_limits.rate_limit_address(address) == counted


def test_guessing_from_many_addresses_of_one_network_is_paused(monkeypatch):
    monkeypatch.setattr(sign_in, "SIGN_IN_ADDRESS", rate_limits.RateLimit("sign_in_address", 3, 300))
    answers = [
        Client(REMOTE_ADDR=f"2001:db8::{number}")
        .post("/sign-in/", {"username": f"name{number}", "password": "guess"})
        .status_code
        for number in range(1, 6)
    ]
    assert answers == [403, 403, 403, 429, 429]


def test_guessing_from_many_addresses_is_paused_but_not_for_a_known_browser(monkeypatch):
    monkeypatch.setattr(sign_in, "SIGN_IN_NAME", rate_limits.RateLimit("sign_in_name", 3, 3600))
    factories.user("ada-love", password=factories.PASSWORD)
    right = {"username": "ada-love", "password": factories.PASSWORD}
    own = Client()
    assert own.post("/sign-in/", right).status_code == 302
    own.post("/sign-out/")
    for number in range(4):
        Client(REMOTE_ADDR=f"10.1.1.{number}").post("/sign-in/", right | {"password": "guess"})
    assert Client(REMOTE_ADDR="10.9.9.9").post("/sign-in/", right).status_code == 429
    assert own.post("/sign-in/", right).status_code == 302


def test_guessing_from_the_same_address_does_not_lock_out_a_known_browser(caplog):
    factories.user("ada-love", password=factories.PASSWORD)
    right = {"username": "ada-love", "password": factories.PASSWORD}
    own = Client()
    assert own.post("/sign-in/", right).status_code == 302
    own.post("/sign-out/")
    for _ in range(rate_limits.SIGN_IN.limit + 1):
        guess = Client().post("/sign-in/", right | {"password": "a guess of mine"})
    assert guess.status_code == 429
    assert own.post("/sign-in/", right).status_code == 302
    assert "sign-in refused for ada-love from 127.0.0.1" in caplog.text
    assert "a guess of mine" not in caplog.text
    Client().post("/sign-in/", {"username": "my secret Phrase\r\n", "password": "x"})
    assert "Phrase" not in caplog.text
    own.post("/sign-out/")
    for _ in range(rate_limits.SIGN_IN.limit):  # and it is no way around the pause
        own.post("/sign-in/", right | {"password": "guess"})
    assert own.post("/sign-in/", right).status_code == 429


def test_many_successful_sign_ins_are_not_guessing():
    factories.user("ada-love", password=factories.PASSWORD)
    right = {"username": "ada-love", "password": factories.PASSWORD}
    for _ in range(rate_limits.SIGN_IN.limit + 2):
        assert Client().post("/sign-in/", right).status_code == 302


def test_an_inactive_person_stays_outside():
    user = factories.user("ada-love", password=factories.PASSWORD)
    user.is_active = False
    user.save()
    assert (
        Client().post("/sign-in/", {"username": "ada-love", "password": factories.PASSWORD}).status_code
        == 403
    )


def test_a_one_time_link_works_once_and_then_asks_for_a_password():
    code = users.do_create_magic_link(None, factories.user("first-admin", admin=True))
    page = Client().get("/sign-in/link/")
    assert page.status_code == 200
    assert code not in page.content.decode()
    client = Client()
    assert client.post("/sign-in/link/", {"code": code})["Location"] == reverse("account")
    assert client.get("/").status_code == 200
    again = Client().post("/sign-in/link/", {"code": code})
    assert again.status_code == 404
    assert "is no longer valid" in again.content.decode()


@pytest.mark.parametrize("lost", [1, 3])
def test_a_one_time_link_whose_answer_was_lost_works_until_a_session_of_it_is_used(lost):
    user = factories.user("first-admin", admin=True)
    code = users.do_create_magic_link(None, user)
    for _ in range(lost):  # the answer with the cookie never arrives
        assert Client().post("/sign-in/link/", {"code": code}).status_code == 302
    client = Client()
    assert client.post("/sign-in/link/", {"code": code}).status_code == 302
    assert client.get("/").status_code == 200
    assert client.post("/sign-in/link/", {"code": code}).status_code == 302  # the same browser again
    assert Client().post("/sign-in/link/", {"code": code}).status_code == 404
    assert BrowserSession.objects.get(session_key=session_id(client.session.session_key)).expire_date > (
        timezone.now() + dt.timedelta(seconds=sessions.PENDING_SESSION_S)
    )
    assert AuditEntry.objects.filter(action="user.sign_in_by_magic_link").count() == 1


@pytest.mark.parametrize("first_use", ["/", "/api/v1/me/", "/sign-in/"])
def test_of_two_browsers_with_one_link_the_first_that_is_used_signs_in(first_use):
    code = users.do_create_magic_link(None, factories.user("first-admin", admin=True))
    one, two = Client(), Client()
    for browser in (one, two):
        assert browser.post("/sign-in/link/", {"code": code}).status_code == 302
    key = two.cookies[settings.SESSION_COOKIE_NAME].value
    assert sessions.session_user(session_id(key)) is None  # no workspace or socket before a page
    two.get(first_use)
    assert [two.get("/account/").status_code, one.get("/account/").status_code] == [200, 302]
    assert sessions.session_user(session_id(key)) is not None
    assert BrowserSession.objects.count() == 1


def test_a_pending_session_ends_with_its_link():
    user = factories.user("first-admin", admin=True)
    client = Client()
    client.post("/sign-in/link/", {"code": users.do_create_magic_link(None, user)})
    users.do_create_magic_link(None, user)
    assert client.get("/").status_code == 302


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("browsers", [1, 4])
def test_concurrent_first_requests_of_a_link_sign_in_one_browser(browsers):
    code = users.do_create_magic_link(None, factories.user("first-admin", admin=True))
    keys = []
    for _ in range(browsers):
        client = Client()
        client.post("/sign-in/link/", {"code": code})
        keys.append(client.cookies[settings.SESSION_COOKIE_NAME].value)
    start = threading.Barrier(4)

    def first_request(key):
        client = Client()
        client.cookies[settings.SESSION_COOKIE_NAME] = key
        start.wait(30)
        try:
            return client.get("/api/v1/me/").status_code
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        answers = sorted(pool.map(first_request, keys * (4 // browsers)))
    assert answers == ([200] * 4 if browsers == 1 else [200, 401, 401, 401])


def test_an_invitation_whose_answer_was_lost_signs_its_user_in():
    _, code = users.do_create_invitation(factories.user("boss", admin=True))
    fields = {"code": code, "username": "ada-love", "password": factories.PASSWORD, "timezone": "UTC"}
    assert Client().post("/invitation/", fields).status_code == 302
    again = Client()
    assert again.post("/invitation/", fields).status_code == 302
    assert again.get("/").status_code == 200
    assert Client().post("/invitation/", fields | {"password": "another phrase"}).status_code == 404
    assert Client().post("/invitation/", {"code": code}).status_code == 404


def test_an_invitation_makes_the_account_it_promises():
    admin = factories.user("boss", admin=True)
    project = factories.project("vision")
    _, code = users.do_create_invitation(admin, full_name="Ada Love", project=project, role=Role.MEMBER)
    client = Client()
    form = client.post("/invitation/", {"code": code}).content.decode()
    assert "invites you" in form
    assert 'value="Ada Love"' in form
    fields = {"code": code, "username": "ada-love", "full_name": "Ada Love", "timezone": "Europe/Berlin"}
    weak = client.post("/invitation/", fields | {"password": "short"})
    assert weak.status_code == 400
    assert not User.objects.filter(username="ada-love").exists()
    assert client.post("/invitation/", fields | {"password": factories.PASSWORD})["Location"] == "/"
    user = User.objects.get(username="ada-love")
    assert Membership.objects.get(user=user).project == project
    assert client.get("/").status_code == 200
    used = Client().post("/invitation/", fields | {"password": factories.PASSWORD, "username": "other"})
    assert used.status_code == 404


def test_leaving_ends_the_session():
    client = Client()
    client.force_login(factories.user())
    assert client.get("/").status_code == 200
    assert client.get("/sign-out/").status_code == 405
    left = client.post("/sign-out/")
    assert left["Clear-Site-Data"] == '"storage"' and left["Location"].startswith("/sign-in/")
    assert client.get("/").status_code == 302


@pytest.mark.parametrize("how", ["sign-out elsewhere", "deactivated"])
def test_a_session_that_ends_during_a_request_leads_to_sign_in(monkeypatch, how):
    user = factories.user("ada-love")

    def end(session):
        session["seen"] = 1  # so that the request writes it
        if how == "deactivated":
            users.do_change_user(factories.user(admin=True), user, is_active=False)
        BrowserSession.objects.all().delete()

    monkeypatch.setattr(policy_middleware, "renew_session", end)
    client = Client()
    for path in ("/jobs/", "/account/"):
        user.is_active = True
        user.save()
        client.force_login(user)
        answer = client.get(path)
        assert answer.status_code == 302 and answer["Location"].startswith("/sign-in/")
        client.force_login(user)
        assert client.get(path, headers={"HX-Request": "true"}).status_code == 401


def test_a_form_from_elsewhere_is_refused():
    factories.user("ada-love", password=factories.PASSWORD)
    client = Client(enforce_csrf_checks=True)
    answer = client.post("/sign-in/", {"username": "ada-love", "password": factories.PASSWORD})
    assert answer.status_code == 403
    assert "came from elsewhere" in answer.content.decode()


def test_a_session_lasts_while_it_is_used_and_never_longer_than_its_longest_life(settings, monkeypatch):
    settings.SESSION_COOKIE_AGE, settings.SESSION_MAX_AGE_S = 1000, 2500
    factories.user("ada-love", password=factories.PASSWORD)
    client = Client()
    client.post("/sign-in/", {"username": "ada-love", "password": factories.PASSWORD})
    begun_s, now_s = time.time(), [time.time()]
    monkeypatch.setattr("time.time", lambda: now_s[0])
    monkeypatch.setattr("django.utils.timezone.now", lambda: dt.datetime.fromtimestamp(now_s[0], dt.UTC))

    def at(seconds):
        now_s[0] = begun_s + seconds
        return client.get("/account/").status_code

    assert [at(900), at(1800), at(2400)] == [200, 200, 200]
    assert at(2501) == 302  # in use, but too old
    now_s[0] = begun_s
    client.post("/sign-in/", {"username": "ada-love", "password": factories.PASSWORD})
    assert [at(900), at(1901)] == [200, 302]  # a thousand seconds without use


def test_work_in_a_workspace_extends_the_session(settings, monkeypatch):
    settings.SESSION_COOKIE_AGE, settings.SESSION_MAX_AGE_S = 1000, 2500
    factories.user("ada-love", password=factories.PASSWORD)
    client = Client()
    client.post("/sign-in/", {"username": "ada-love", "password": factories.PASSWORD})
    began, key = timezone.now(), session_id(client.session.session_key)
    for seconds, left in ((900, 1000), (1800, 700)):
        now = began + dt.timedelta(seconds=seconds)
        monkeypatch.setattr("django.utils.timezone.now", lambda now=now: now)
        sessions.renew_workspace_session(key)
        end = BrowserSession.objects.get(session_key=key).expire_date
        assert abs((end - now).total_seconds() - left) < 2


@pytest.mark.parametrize("key", ['"\\000aaaaaaaaaaaaaaaa"', "x" * 5000, "../../etc/passwd", "\xff" * 32])
def test_an_invalid_session_cookie_is_anonymous(client, key):
    answer = client.get("/", headers={"cookie": f"fairway_session={key}"})
    assert answer.status_code == 302 and answer["Location"].startswith("/sign-in/")


def test_over_https_every_cookie_is_bound_to_this_host():
    reported = (
        "import json, django; django.setup(); from django.conf import settings as s\n"
        "from portal.web.accounts import sign_in\n"
        "print(json.dumps([s.SESSION_COOKIE_NAME, s.CSRF_COOKIE_NAME, sign_in.KNOWN_BROWSER_COOKIE,"
        " s.SESSION_COOKIE_SECURE,"
        " s.CSRF_COOKIE_SECURE, s.SECURE_HSTS_SECONDS >= 31536000, s.SECURE_HSTS_INCLUDE_SUBDOMAINS]))"
    )
    environment = {**os.environ, "FAIRWAY_PORTAL_URL": "https://portal.example.org"}
    done = subprocess.run(
        [sys.executable, "-c", reported], env=environment, capture_output=True, text=True, check=True
    )
    *names, session_secure, csrf_secure, year, below = json.loads(done.stdout.splitlines()[-1])
    assert all(name.startswith("__Host-fairway_") for name in names)
    assert session_secure and csrf_secure and year and below


def test_messages_of_a_page_use_no_cookie(client):
    user = factories.user("ada-love", password=factories.PASSWORD)
    client.force_login(user)
    answer = client.post("/account/name/", {"full_name": "Ada", "email": "", "timezone": "UTC"})
    assert answer.status_code == 302
    assert not [name for name in answer.cookies if not name.startswith("fairway_")]
    assert "Saved." in client.get("/account/").content.decode()
    assert "Saved." not in client.get("/account/").content.decode()
