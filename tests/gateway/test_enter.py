"""Entering a workspace: tickets work once, briefly, for one person, attempt and session."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import re
import threading

import pytest
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.errors import Conflict, NotFound
from portal.models import Attempt, AuditEntry, BrowserSession, WorkspaceSession, WorkspaceTicket
from portal.services.jobs.attempt_secrets import decrypt_attempt_secret
from portal.services.lifecycle import job_control
from portal.services.workspaces.access import do_open_workspace, do_redeem_ticket
from tests import factories
from tests.gateway.gateway_harness import attempt_of, running_workspace, sign_in


def test_a_ticket_hands_over_to_the_workspace(testbed, owner, workspace, session):
    address, ticket = do_open_workspace(owner, workspace, session)
    assert address == f"http://ws-{workspace.public_id}.localhost:8000/.fairway/enter"
    answer = testbed.enter(workspace, ticket)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    crumb = answer.headers["set-cookie"]
    assert crumb.startswith("fairway_workspace=")
    assert "HttpOnly" in crumb and "SameSite=Lax" in crumb and "Domain" not in crumb
    with testbed.browser(workspace) as browser:
        page = browser.get("/lab?x=1", headers={"Cookie": crumb.partition(";")[0]})
    assert page.text == "tool at /lab?x=1"


def test_a_ticket_works_once(testbed, owner, workspace, session):
    _, ticket = do_open_workspace(owner, workspace, session)
    assert testbed.enter(workspace, ticket).status_code == 303
    again = testbed.enter(workspace, ticket)
    assert again.status_code == 403
    assert "valid once" in again.text
    assert WorkspaceSession.objects.count() == 1


def test_of_many_concurrent_uses_one_succeeds(testbed, owner, workspace, session):
    _, ticket = do_open_workspace(owner, workspace, session)
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(testbed.enter(workspace, ticket).status_code))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [303] + [403] * 11


def test_a_ticket_lives_thirty_seconds(testbed, owner, workspace, session):
    _, ticket = do_open_workspace(owner, workspace, session)
    row = WorkspaceTicket.objects.get()
    assert row.expires_at - row.created_at <= dt.timedelta(seconds=30.5)
    WorkspaceTicket.objects.update(expires_at=timezone.now())
    assert testbed.enter(workspace, ticket).status_code == 403


def test_a_ticket_is_for_one_workspace(testbed, owner, workspace, session):
    other = running_workspace(owner, port=testbed.tool.port)
    _, ticket = do_open_workspace(owner, workspace, session)
    assert testbed.enter(other, ticket).status_code == 403
    assert testbed.enter(workspace, ticket).status_code == 303


def test_a_ticket_dies_with_its_session(testbed, owner, workspace, session):
    _, ticket = do_open_workspace(owner, workspace, session)
    BrowserSession.objects.all().delete()
    assert testbed.enter(workspace, ticket).status_code == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:8000.evil.example"])
def test_only_the_portal_may_hand_over(testbed, owner, workspace, session, origin):
    _, ticket = do_open_workspace(owner, workspace, session)
    assert testbed.enter(workspace, ticket, Origin=origin).status_code == 403
    assert testbed.enter(workspace, ticket).status_code == 303


def test_a_ticket_does_not_work_by_get(testbed, owner, workspace, session):
    _, ticket = do_open_workspace(owner, workspace, session)
    with testbed.browser(workspace) as browser:
        refused = browser.get("/.fairway/enter", params={"ticket": ticket})
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert testbed.enter(workspace, ticket).status_code == 303


def test_opening_a_workspace_leaves_an_audit_row(owner, workspace, session):
    do_open_workspace(owner, workspace, session)
    (row,) = AuditEntry.objects.filter(action="workspace.open")
    assert (row.actor, row.object_id, row.after) == (owner, workspace.public_id, {"attempt": 1})


def test_strangers_get_no_ticket(owner, workspace):
    outsider = factories.user()
    with pytest.raises(NotFound):
        do_open_workspace(outsider, workspace, sign_in(outsider))


def test_no_ticket_for_the_session_of_another_user(owner, workspace):
    with pytest.raises(Conflict):
        do_open_workspace(owner, workspace, sign_in(factories.user()))


def test_there_is_no_ticket_before_the_server_answers(testbed, owner, session):
    starting = running_workspace(owner, port=testbed.tool.port, ready=False)
    with pytest.raises(Conflict):
        do_open_workspace(owner, starting, session)


def test_strangers_cannot_learn_whether_a_workspace_exists(testbed, workspace, cookie):
    answers = []
    for name in [workspace.public_id, "abcdefghjk"]:
        for crumbs in ["", cookie.replace("=", "=x"), "fairway_workspace="]:
            with testbed.browser(name) as browser:
                answer = browser.get("/lab", headers={"Cookie": crumbs} if crumbs else {})
            answers.append((answer.status_code, answer.text, sorted(answer.headers.items())))
    assert answers[0][0] == 403
    assert all(answer == answers[0] for answer in answers)


def test_a_cookie_opens_its_own_workspace_only(testbed, owner, workspace, cookie):
    other = running_workspace(owner, port=testbed.tool.port)
    with testbed.browser(other) as browser:
        assert browser.get("/", headers={"Cookie": cookie}).status_code == 403


def test_names_that_cannot_be_ids_never_reach_web(testbed):
    for name in ["UPPER", "a_b", "x" * 40, "9abc", "a.b"]:
        with testbed.browser(name) as browser:
            answer = browser.get("/")
        assert answer.status_code in (403, 200)
        if answer.status_code == 200:
            assert name == "a.b", name


def test_gateway_pages_have_all_headers_and_nothing_unsafe(testbed):
    with testbed.browser("nosuch") as browser:
        answer = browser.get("/")
    assert "unsafe" not in answer.headers["content-security-policy"]
    style = re.search(r"<style>(.*?)</style>", answer.text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in answer.headers["content-security-policy"]
    for name in ("cross-origin-opener-policy", "cross-origin-resource-policy", "permissions-policy"):
        assert answer.headers[name]


def test_json_is_returned_when_requested(testbed, workspace):
    with testbed.browser(workspace) as browser:
        answer = browser.get("/api/status", headers={"Accept": "application/json"})
    assert answer.status_code == 403
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "no_session"


def test_a_stopped_workspace_is_explained_to_its_owner(testbed, owner, workspace, inside):
    job_control.request_stop(attempt_of(workspace).pk, EndReason.CANCELLED_BY_USER)
    testbed.call(_later(1.6))
    answer = inside.get("/lab")
    assert answer.status_code == 410
    assert "has stopped" in answer.text


def test_a_workspace_that_became_unready_is_explained(testbed, workspace, inside):
    Attempt.objects.update(ready_at=None)
    testbed.call(_later(1.6))
    answer = inside.get("/lab")
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


def test_a_secret_opens_in_its_own_row_only(owner, testbed, workspace):
    other = running_workspace(owner, port=testbed.tool.port)
    mine, theirs = attempt_of(workspace), attempt_of(other)
    assert decrypt_attempt_secret(mine) != decrypt_attempt_secret(theirs)
    theirs.secret = mine.secret
    with pytest.raises(Exception, match="copied from another row"):
        decrypt_attempt_secret(theirs)


def test_an_inactive_user_cannot_enter(owner, workspace, session):
    _, ticket = do_open_workspace(owner, workspace, session)
    owner.is_active = False
    owner.save()
    assert do_redeem_ticket(ticket, workspace.public_id) is None


async def _later(seconds: float) -> None:
    import asyncio

    await asyncio.sleep(seconds)
