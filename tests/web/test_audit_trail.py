"""The audit trail names who came in, who failed to, who left, and who was refused what."""

from __future__ import annotations

import secrets

import pytest
from django.test import Client
from django.urls import reverse

from portal.domain.states import Role
from portal.models import AuditEntry, User
from portal.services import audit_denials
from portal.services.accounts import users
from portal.services.accounts.tokens import Scope, do_create_token
from portal.services.jobs.submission import do_hold_job
from portal.valkey import rate_limits
from portal.valkey.rate_limits import RateLimit
from portal.web.cluster.audit import changed_fields
from tests import factories

pytestmark = pytest.mark.django_db

ADDRESS = "10.1.2.3"


@pytest.fixture(autouse=True)
def fresh_rates(monkeypatch):
    monkeypatch.setattr(rate_limits, "PREFIX", f"test:rate:{secrets.token_hex(6)}")


@pytest.fixture
def user() -> User:
    return factories.user("ada-love", password=factories.PASSWORD)


def browser(user: User | None = None) -> Client:
    client = Client(REMOTE_ADDR=ADDRESS)
    if user is not None:
        client.force_login(user)
    return client


def rows(*acts: str) -> list[AuditEntry]:
    return list(AuditEntry.objects.filter(action__in=acts).order_by("id"))


def test_sign_in_and_sign_out_leave_rows(user):
    client = browser()
    client.post("/sign-in/", {"username": "ada-love", "password": factories.PASSWORD})
    client.post("/sign-out/")
    came, left = rows("user.sign_in", "user.sign_out")
    for row in (came, left):
        assert (row.actor, row.object_kind, row.object_id) == (user, "user", user.public_id)
        assert row.address == ADDRESS
    assert came.after == {"by": "password"}
    assert (came.action, left.action) == ("user.sign_in", "user.sign_out")


def test_ending_no_session_leaves_no_row():
    browser().post("/sign-out/")
    assert not AuditEntry.objects.exists()


def test_sign_in_by_link_and_invitation_leave_rows(user):
    browser().post("/sign-in/link/", {"code": users.do_create_magic_link(None, user)})
    admin = factories.user("boss", admin=True)
    _, code = users.do_create_invitation(admin, project=factories.project(), role=Role.MEMBER)
    fields = {"code": code, "username": "ben", "password": factories.PASSWORD, "timezone": "UTC"}
    browser().post("/invitation/", fields)
    assert [(row.actor_name, row.after) for row in rows("user.sign_in")] == [
        ("ada-love", {"by": "link"}),
        ("ben", {"by": "invitation"}),
    ]


def test_failed_sign_ins_leave_name_and_address_but_never_what_was_typed(user):
    for name, password in (
        ("ada-love", "guess one"),
        ("nobody-here", "guess two"),
        ("My Secret\x1b[31m", "x"),
    ):
        assert browser().post("/sign-in/", {"username": name, "password": password}).status_code == 403
    browser().post("/sign-in/link/", {"code": "not-a-code"})
    browser().post("/invitation/", {"code": "not-a-code"})
    found = rows("user.sign_in_failed")
    assert [(row.object_name, row.after["by"]) for row in found] == [
        ("ada-love", "password"),
        ("nobody-here", "password"),
        ("", "password"),
        ("", "link"),
        ("", "invitation"),
    ]
    assert {(row.actor, row.actor_name, row.address) for row in found} == {(None, "nobody", ADDRESS)}
    reported = str(list(AuditEntry.objects.values()))
    assert not any(word in reported for word in ("guess", "Secret", "not-a-code"))


def test_paused_sign_ins_leave_one_row(user):
    for _ in range(rate_limits.SIGN_IN.limit + 4):
        browser().post("/sign-in/", {"username": "ada-love", "password": "guess"})
    assert len(rows("user.sign_in_failed")) == rate_limits.SIGN_IN.limit
    (paused,) = rows("user.sign_in_paused")
    assert (paused.object_name, paused.address) == ("ada-love", ADDRESS)


@pytest.mark.parametrize("rate", ["SIGN_INS_OF_ADDRESS", "SIGN_INS"])
def test_flood_of_failures_leaves_a_bounded_number_of_rows(monkeypatch, rate):
    monkeypatch.setattr(audit_denials, rate, RateLimit(f"test_{rate}", 3, 3600))
    for _ in range(9):
        browser().post("/sign-in/link/", {"code": "not-a-code"})
    found = rows("user.sign_in_failed")
    assert len(found) == 4
    assert "further ones are only in the log" in found[-1].reason


def test_ended_sessions_leave_a_row(user):
    client = browser(user)
    client.post(reverse("account-sessions-end"))
    assert not rows("user.end_sessions"), "there was no other"
    browser(user), browser(user)
    client.post(reverse("account-sessions-end"))
    (row,) = rows("user.end_sessions")
    assert (row.actor, row.after, row.object_kind) == (user, {"sessions": 2}, "user")


def test_refused_requests_to_administration_pages_leave_rows(user):
    client = browser(user)
    assert client.get(reverse("users")).status_code == 403
    assert client.post(reverse("save-quotas")).status_code == 403
    found = rows("request.refused")
    assert [(row.object_id, row.object_name) for row in found] == [
        ("users", f"GET {reverse('users')}"),
        ("save-quotas", f"POST {reverse('save-quotas')}"),
    ]
    assert {(row.actor, row.address, row.object_kind) for row in found} == {(user, ADDRESS, "route")}


def test_refused_administrative_requests_to_rest_leave_rows_by_session_and_token(user):
    body = {"name": "vision"}
    assert browser(user).post("/api/v1/projects/", body, "application/json").status_code == 403
    assert browser(user).get("/api/v1/alerts/").status_code == 403
    _, text = do_create_token(user, name="t", scopes=[Scope.READ, Scope.ADMIN], days=7)
    by_token = browser().post(
        "/api/v1/projects/", body, "application/json", headers={"Authorization": f"Bearer {text}"}
    )
    assert by_token.status_code == 403
    found = rows("request.refused")
    assert [(row.actor, row.object_name) for row in found] == [
        (user, "POST /api/v1/projects/"),
        (user, "GET /api/v1/alerts/"),
        (user, "POST /api/v1/projects/"),
    ]


def test_accepted_and_read_only_requests_leave_no_row(user):
    client = browser(user)
    assert client.get(reverse("home")).status_code == 200
    assert client.get("/jobs/nothing-here/").status_code == 404
    assert not rows("request.refused")


def test_flood_of_refused_requests_leaves_a_bounded_number_of_rows(user, monkeypatch):
    monkeypatch.setattr(audit_denials, "REQUESTS_OF_USER", RateLimit("test_requests", 2, 3600))
    client = browser(user)
    for _ in range(6):
        assert client.get(reverse("users")).status_code == 403
    assert len(rows("request.refused")) == 3


def test_holding_and_releasing_jobs_of_others_leaves_rows(user):
    dataset = factories.basic_cluster()
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    do_hold_job(dataset["owner"], job, True)
    do_hold_job(dataset["owner"], job, False)
    assert not rows("job.hold", "job.release"), "one's own job"
    admin = factories.user("boss", admin=True)
    for held in (True, True, False):
        do_hold_job(admin, job, held)
    found = rows("job.hold", "job.release")
    assert [(row.action, row.actor, row.object_id) for row in found] == [
        ("job.hold", admin, job.public_id),
        ("job.release", admin, job.public_id),
    ]


def test_page_shows_and_narrows_the_rows(user):
    admin = factories.user("boss", admin=True)
    browser(user).get(reverse("users"))
    browser().post("/sign-in/", {"username": "nobody-here", "password": "guess"})
    browser().post("/sign-in/", {"username": "ada-love", "password": factories.PASSWORD})
    client = browser(admin)

    def acts(**query: str) -> list[str]:
        return [row.action for row, _ in client.get(reverse("audit"), query).context["rows"]]

    assert acts() == ["user.sign_in", "user.sign_in_failed", "request.refused"]
    assert acts(kind="sign-ins") == ["user.sign_in", "user.sign_in_failed"]
    assert acts(kind="refused") == ["user.sign_in_failed", "request.refused"]
    assert acts(kind="workspaces") == []
    assert acts(q=ADDRESS) == acts(kind="no such kind") == acts()
    assert acts(q="10.9.9.9") == []
    page = client.get(reverse("audit"), {"kind": "workspaces"}).content.decode()
    assert "Nothing matches" in page and "Clear the search" in page


def test_values_have_units_and_times_of_the_reader():
    after = {
        "memory_mib": 8192,
        "cpu_milli": 2000,
        "drain_s": 600,
        "ends_at": "2027-02-27T19:24:54.058219+00:00",
    }
    entry = AuditEntry(before={"memory_mib": 23552}, after=after | {"seen_at": "soon", "name_s": "x"})
    shown = {name: new.replace("\N{NO-BREAK SPACE}", " ") for name, _, new in changed_fields(entry)}
    assert shown == {
        "memory": "8 GiB", "cpu": "2 cores", "drain": "10 min", "ends at": "2027-02-27 19:24",
        "seen at": "soon", "name": "x",
    }  # fmt: skip
