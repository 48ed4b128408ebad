"""A workspace shared with a member of its project: who enters, what they may do, and when it ends."""

from __future__ import annotations

import asyncio
import datetime as dt
import time

import aiohttp
import pytest
from django.test import Client
from django.utils import timezone

from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound
from portal.models import AuditEntry, Environment, Job, Node, User, WorkspaceShare
from portal.services.workspaces.access import do_open_workspace
from portal.services.workspaces.secret_replacement import due_replacements, unreplaced_secret
from portal.services.workspaces.sharing import (
    do_revoke_share,
    do_share_workspace,
    get_share,
    list_shares,
    list_visitors,
    project_members,
    remaining_risk,
)
from tests import factories
from tests.gateway.gateway_harness import Testbed, running_workspace, sign_in

HOUR_S = 3600


@pytest.fixture
def guest(workspace: Job) -> User:
    user = factories.user()
    workspace.project.memberships.create(user=user, role="member")
    return user


def enter(testbed: Testbed, user: User, job: Job) -> dict[str, str]:
    """The headers of a user who has opened the workspace."""
    _, ticket = do_open_workspace(user, job, sign_in(user))
    answer = testbed.enter(job, ticket)
    assert answer.status_code == 303, answer.text
    cookie = answer.headers["set-cookie"].partition(";")[0]
    return {"Cookie": cookie, "Origin": f"http://{testbed.host(job)}"}


def socket_ends_within(testbed: Testbed, job: Job, headers: dict[str, str], end, limit_s: float) -> bool:
    """Open a WebSocket, call ``end`` while it is open, and return whether it was closed in time."""

    async def go() -> bool:
        address = f"http://127.0.0.1:{testbed.port}/socket"
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(address, headers=headers | {"Host": testbed.host(job)}) as wire,
        ):
            await wire.send_str("hello")
            assert (await wire.receive()).data == "hello"
            await asyncio.to_thread(end)
            try:
                message = await asyncio.wait_for(wire.receive(), limit_s)
            except TimeoutError:
                return False
            return message.type in (
                aiohttp.WSMsgType.CLOSE,
                aiohttp.WSMsgType.CLOSED,
                aiohttp.WSMsgType.ERROR,
            )

    return asyncio.run(go())


def test_a_guest_edits_until_the_share_is_revoked(
    testbed: Testbed, owner: User, workspace: Job, guest: User
) -> None:
    with pytest.raises(Forbidden):
        do_open_workspace(guest, workspace, sign_in(guest))
    share = do_share_workspace(owner, workspace, guest, "edit", HOUR_S)
    headers = enter(testbed, guest, workspace)
    with testbed.browser(workspace) as browser:
        assert browser.post("/upload", headers=headers, content=b"x").json()["bytes"] == 1
    assert [each.user for each in list_visitors(workspace)] == [guest]
    closed = socket_ends_within(testbed, workspace, headers, lambda: do_revoke_share(owner, share), 8)
    assert closed
    with testbed.browser(workspace) as browser:
        assert browser.get("/", headers=headers).status_code == 403
    with pytest.raises(Forbidden):
        do_open_workspace(guest, workspace, sign_in(guest))
    actions = AuditEntry.objects.filter(action__startswith="workspace.").order_by("id")
    assert [(each.action, each.actor) for each in actions] == [
        ("workspace.share", owner), ("workspace.open", guest), ("workspace.unshare", owner)
    ]  # fmt: skip
    assert workspace.events.filter(kind="shared").count() == 2


def test_a_viewer_can_read_and_not_change(testbed: Testbed, owner: User, workspace: Job, guest: User) -> None:
    do_share_workspace(owner, workspace, guest, "view", HOUR_S)
    headers = enter(testbed, guest, workspace)
    before = len(testbed.tool.seen)
    with testbed.browser(workspace) as browser:
        assert browser.get("/api/contents", headers=headers).text == "tool at /api/contents"
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            answer = browser.request(method, "/api/kernels", headers=headers)
            assert answer.status_code == 403 and "viewing" in answer.text, method
        upgrade = headers | {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        upgrade |= {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
        assert browser.get("/socket", headers=upgrade).status_code == 403
    assert len(testbed.tool.seen) == before + 1
    do_share_workspace(owner, workspace, guest, "edit", HOUR_S)  # replaces it
    time.sleep(1.6)
    with testbed.browser(workspace) as browser:
        assert browser.post("/api/kernels", headers=headers).status_code == 200
    assert WorkspaceShare.objects.filter(revoked_at=None).count() == 1
    do_share_workspace(owner, workspace, guest, "edit", HOUR_S)
    page = Client()
    page.cookies["fairway_session"] = sign_in(guest)
    assert (
        page.get(f"/jobs/{workspace.public_id}/terminal/").status_code == 403
    )  # a share is for the tool alone


def test_a_share_ends_at_its_limit_and_with_the_membership(
    testbed: Testbed, owner: User, workspace: Job, guest: User
) -> None:
    share = do_share_workspace(owner, workspace, guest, "edit", HOUR_S)
    headers = enter(testbed, guest, workspace)
    past = timezone.now() - dt.timedelta(seconds=1)

    def expire() -> None:
        WorkspaceShare.objects.filter(pk=share.pk).update(expires_at=past)

    assert socket_ends_within(testbed, workspace, headers, expire, 8)
    do_share_workspace(owner, workspace, guest, "edit", HOUR_S)
    headers = enter(testbed, guest, workspace)
    workspace.project.memberships.filter(user=guest).update(role="viewer")
    time.sleep(1.6)
    with testbed.browser(workspace) as browser:
        assert browser.get("/", headers=headers).status_code == 403


def test_the_secret_of_an_editor_is_replaced_even_if_they_get_a_new_share_first(
    testbed: Testbed, owner: User, workspace: Job, guest: User
) -> None:
    do_revoke_share(owner, do_share_workspace(owner, workspace, guest, "edit", HOUR_S))
    assert due_replacements() == [] and unreplaced_secret(workspace) == "", "nobody was inside"
    share = do_share_workspace(owner, workspace, guest, "edit", HOUR_S)
    enter(testbed, guest, workspace)
    do_revoke_share(owner, share)
    assert list_visitors(workspace) == []
    view = do_share_workspace(owner, workspace, guest, "view", HOUR_S)
    (due,) = due_replacements()
    assert due.task.attempt.job == workspace and unreplaced_secret(workspace) == ""
    # a node that does not answer, and a tool that reads its secret once, are shown until it is done
    Node.objects.update(reachable=False)
    mine = Client()
    mine.force_login(owner)
    shown = mine.get(f"/jobs/{workspace.public_id}/shares/").content.decode()
    assert f"{due.task.node.name} does not answer" in shown
    do_revoke_share(owner, view)
    assert f"{due.task.node.name} does not answer" in remaining_risk(view)
    Environment.objects.filter(pk=workspace.environment_id).update(tool="code-server")
    workspace.refresh_from_db()
    assert unreplaced_secret(workspace).startswith("code-server reads its secret only when it starts")


def test_shares_are_for_members_and_by_the_owner(workspace: Job, owner: User, guest: User) -> None:
    stranger, viewer, manager = factories.user(), factories.user(), factories.user()
    admin = factories.user(admin=True)
    workspace.project.memberships.create(user=viewer, role="viewer")
    workspace.project.memberships.create(user=manager, role="manager")
    assert project_members(workspace) == sorted([guest, manager], key=lambda each: each.username)
    for other in (stranger, viewer, admin, owner):
        with pytest.raises(InvalidRequest) as caught:
            do_share_workspace(owner, workspace, other, "edit", HOUR_S)
        assert "user" in caught.value.fields
    with pytest.raises(InvalidRequest) as caught:
        do_share_workspace(owner, workspace, guest, "admin", 8 * 24 * 3600)
    assert caught.value.fields.keys() == {"access", "duration_s"}
    Environment.objects.filter(pk=workspace.environment_id).update(tool="code-server")
    with pytest.raises(InvalidRequest) as caught:
        do_share_workspace(owner, Job.objects.get(pk=workspace.pk), guest, "view", HOUR_S)
    assert caught.value.fields == {"access": "code-server cannot be used for viewing only."}
    for other in (manager, admin, guest):
        with pytest.raises(Forbidden):
            do_share_workspace(other, workspace, guest, "edit", HOUR_S)
    share = do_share_workspace(owner, workspace, guest, "edit", HOUR_S)
    for other in (guest, stranger, viewer):
        with pytest.raises(NotFound):
            get_share(other, share.public_id)
    with pytest.raises(Forbidden):
        list_shares(guest, workspace)
    assert do_revoke_share(manager, get_share(manager, share.public_id)).revoked_at is not None
    Job.objects.filter(pk=workspace.pk).update(state="CANCELLED", ended_at=timezone.now())
    with pytest.raises(Conflict, match="has ended"):
        do_share_workspace(owner, workspace, guest, "edit", HOUR_S)


def test_the_page_shares_and_revokes(testbed: Testbed, owner: User, workspace: Job, guest: User) -> None:
    mine, theirs = Client(), Client()
    mine.cookies["fairway_session"] = sign_in(owner)
    theirs.cookies["fairway_session"] = sign_in(guest)
    address = f"/jobs/{workspace.public_id}"
    assert "Only" in mine.get(f"{address}/shares/").content.decode()
    assert f"{address}/open/" not in theirs.get(f"{address}/").content.decode()
    body = {"user": guest.public_id, "access": "view", "duration_s": str(HOUR_S)}
    shown = mine.post(f"{address}/share/", body, follow=True).content.decode()
    assert "is shared with" in shown and guest.username in shown
    assert f"{address}/open/" in theirs.get(f"{address}/").content.decode()
    assert theirs.get(f"{address}/shares/").status_code == 403
    share = WorkspaceShare.objects.get()
    assert theirs.post(f"/shares/{share.public_id}/revoke/").status_code == 404
    assert "no longer shared" in mine.post(f"/shares/{share.public_id}/revoke/", follow=True).content.decode()
    assert (
        "Choose one of"
        in mine.post(f"{address}/share/", body | {"access": "x"}, follow=True).content.decode()
    )


def test_a_workspace_opens_at_a_path_of_its_own_origin(testbed: Testbed, owner: User, session: str) -> None:
    job = running_workspace(owner, port=testbed.tool.port)
    for path, location in (
        ("/lab/tree/a%20b.ipynb", "/lab/tree/a%20b.ipynb"),
        ("//evil.example/", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example/", "/"),
        ("/a\r\nX: y", "/"),
    ):
        _, ticket = do_open_workspace(owner, job, session)
        with testbed.browser(job) as browser:
            sent = {"ticket": ticket, "path": path}
            answer = browser.post("/.fairway/enter", data=sent, headers={"Origin": "http://localhost:8000"})
        assert (answer.status_code, answer.headers["location"]) == (303, location)
