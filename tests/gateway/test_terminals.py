"""Terminals the whole way: page, record, actor and agent of a real node, gateway, and a shell beside a real task."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest
from django.test import Client

from portal.gateway.apps.terminal_app import InputDetector, close_stale_terminals
from portal.models import AuditEntry, BrowserSession, Job, Project, Terminal, User
from portal.services.accounts.sessions import session_id
from portal.services.jobs.submission import do_cancel_job
from portal.services.workspaces.terminals import MAX_TERMINALS_PER_USER
from tests import factories
from tests.engine_harness import wait_for
from tests.gateway.gateway_harness import Testbed, in_thread, sign_in
from tests.time_budget import budget_s

ORIGIN = "http://localhost:8000"
AT_MOST_S = 5.0


def page(session: str) -> Client:
    client = Client(headers={"host": "localhost:8000"})
    client.cookies["fairway_session"] = session
    return client


def ask(session: str, job: Job, rank: int = 0) -> Any:
    return page(session).post(f"/jobs/{job.public_id}/terminals/", {"rank": rank, "cols": 90, "rows": 30})


def opened(session: str, job: Job) -> str:
    """The path of the socket of a terminal that listens."""
    answer = ask(session, job)
    assert answer.status_code == 201, answer.content
    state = answer.json()["state"]
    reported = wait_for("it listens", lambda: (now := page(session).get(state).json())["listens"] and now)
    return str(reported["socket"])


class Shell:
    """The browser's side of a terminal."""

    def __init__(self, wire: aiohttp.ClientWebSocketResponse) -> None:
        self._wire = wire
        self.printed = b""
        self.words: list[dict[str, Any]] = []

    async def ask(self, line: str, answer: str) -> None:
        begin = len(self.printed)
        await self._wire.send_bytes(line.encode() + b"\n")
        while answer.encode() not in self.printed[begin:].replace(line.encode(), b""):
            assert await self.hear(), self.printed

    async def hear(self) -> bool:
        message = await asyncio.wait_for(self._wire.receive(), 15)
        if message.type is aiohttp.WSMsgType.BINARY:
            self.printed += message.data
        elif message.type is aiohttp.WSMsgType.TEXT:
            self.words.append(json.loads(message.data))
        return message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT)

    async def until_closed(self) -> int | None:
        """Its closing code; None where the connection just broke."""
        while await self.hear():
            pass
        return self._wire.close_code


def visit(
    testbed: Testbed,
    path: str,
    session: str,
    play: Callable[[Shell], Coroutine[Any, Any, Any]],
    origin: str = ORIGIN,
) -> Any:
    """What ``play`` gives, at a terminal."""

    async def go() -> Any:
        headers = {
            "Origin": origin,
            "Host": "localhost:8000",
            "Cookie": f"fairway_session={session}; other=1",
        }
        async with (
            aiohttp.ClientSession() as client,
            client.ws_connect(f"http://127.0.0.1:{testbed.port}{path}", headers=headers) as wire,
        ):
            return await play(Shell(wire))

    return asyncio.run(go())


def refused(testbed: Testbed, path: str, session: str, origin: str = ORIGIN) -> int:
    async def nothing(_: Shell) -> None: ...

    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        visit(testbed, path, session, nothing, origin)
    return caught.value.status


def acts(job: Job) -> list[tuple[str, str]]:
    rows = AuditEntry.objects.filter(object_id=job.public_id, action__startswith="terminal.")
    return list(rows.order_by("pk").values_list("action", "actor_name"))


def test_a_terminal_from_browser_to_task(testbed: Testbed, owner: User, session: str, running: Job) -> None:
    path = opened(session, running)
    outsider, admin = factories.user(), factories.user(admin=True)
    Project.objects.get(pk=running.project_id).memberships.create(user=outsider, role="manager")
    keys = {who: sign_in(who) for who in (outsider, admin)}
    for who, key in keys.items():  # a manager and an admin see the job, and type nothing into it
        assert ask(key, running).status_code == 403, who
        assert page(key).get(f"/jobs/{running.public_id}/terminal/").status_code == 403
        assert refused(testbed, path, key) == 403
        assert page(key).get(path.replace("/terminals", "/jobs/terminals", 1)).status_code == 404
    assert refused(testbed, path, "") == 403
    assert refused(testbed, path, sign_in(owner)) == 403  # another session of the same person
    assert refused(testbed, path, session, origin="http://evil.example") == 403
    assert refused(testbed, "/terminals/abcdefghjk/", session) == 403
    assert ask(session, running, rank=7).status_code == 409

    async def play(shell: Shell) -> None:
        await shell.ask("echo $FAIRWAY_JOB-$((40+2))", f"{running.public_id}-42")
        await shell.ask("stty size", "30 90")
        await shell._wire.send_str('{"cols": 70, "rows": 20}')
        await shell.ask("sleep 0.2; stty size", "20 70")
        await shell.ask("echo bye''bye; exit 4", "byebye")
        await shell.until_closed()
        assert shell.words[-1] == {"ended": "exited", "exit_code": 4}

    visit(testbed, path, session, play)
    assert refused(testbed, path, session) == 403, "entered once"
    wait_for("its end is written down", lambda: len(acts(running)) == 2)
    assert acts(running) == [("terminal.open", owner.username), ("terminal.close", owner.username)]
    assert Terminal.objects.get().closed_at is not None
    reported = json.dumps(list(AuditEntry.objects.values_list("before", "after", "reason")))
    assert "byebye" not in reported and Terminal.objects.get().secret not in reported


@pytest.mark.parametrize("end", ["sign out", "role", "stop"])
def test_a_terminal_ends_with_its_right(
    testbed: Testbed, owner: User, session: str, running: Job, end: str
) -> None:
    def take() -> None:
        match end:
            case "sign out":
                BrowserSession.objects.filter(session_key=session_id(session)).delete()
            case "role":
                running.project.memberships.filter(user=owner).update(role="viewer")
            case "stop":
                do_cancel_job(owner, Job.objects.get(pk=running.pk))

    async def play(shell: Shell) -> tuple[int | None, float]:
        await shell.ask("echo he''re", "here")
        began_s = time.monotonic()
        await asyncio.to_thread(in_thread, take)
        return await shell.until_closed(), time.monotonic() - began_s

    code, took_s = visit(testbed, opened(session, running), session, play)
    assert took_s < budget_s(AT_MOST_S)
    assert code == 1008 or end == "stop"
    closed = AuditEntry.objects.filter(action="terminal.close")
    wait_for("its end is written down", closed.exists)
    running.project.memberships.filter(user=owner).update(role="member")


def test_limits_and_sessions_left_by_a_dead_gateway(testbed: Testbed, session: str, running: Job) -> None:
    for _ in range(4):
        opened(session, running)
    refusal = ask(session, running).json()
    reported = wait_for("the node refuses", lambda: page(session).get(refusal["state"]).json()["refusal"])
    assert "at most 4 open terminals" in reported
    Terminal.objects.update(connected_at="2026-01-01T00:00Z")
    for row in list(Terminal.objects.all()[:1]) * MAX_TERMINALS_PER_USER:
        row.pk, row.public_id, row.error = None, f"x{time.monotonic_ns() % 10**9}", ""
        row.save()
    assert ask(session, running).status_code == 409
    close_stale_terminals()
    close_stale_terminals()
    assert not Terminal.objects.filter(closed_at=None, error="").exists()
    assert AuditEntry.objects.filter(action="terminal.close").count() == Terminal.objects.count()


def test_only_typing_is_typing() -> None:
    typed: list[bool] = []
    hears = InputDetector(lambda *, extends_session: typed.append(extends_session))
    text, binary = b"\x81\x85abcdhello", b"\x82\x83abcdxyz"
    for byte in text + b"\x8a\x80abcd" + binary + text + binary:  # however it is cut
        hears.feed(bytes([byte]))
    assert typed == [True, False]
