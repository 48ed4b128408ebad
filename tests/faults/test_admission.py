"""The web process works on a bounded number of requests; others wait for a slot or are refused before any work."""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from portal import admission, request_timeout
from portal.request_timeout import PROBE_PATHS, RequestTimeoutApp, requests_at_once
from tests.faults.test_deadline import Served, answer

AT_ONCE = requests_at_once()


class Application:
    """Answers each request once ``go_on`` is set; counts requests of which it received the whole body."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.begun = self.running = self.most = 0
        self.streams = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            return
        self.begun += 1
        self.running += 1
        self.most = max(self.most, self.running)
        if self.streams:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await self.go_on.wait()
            await send({"type": "http.response.body", "body": b""})
        else:
            await self.go_on.wait()
            await answer(send)
        self.running -= 1


async def serve(app: RequestTimeoutApp, served: Served) -> Served:
    await app(served.scope, served.receive, served.send)
    return served


async def begin(
    app: RequestTimeoutApp, count: int, path: str = "/api/v1/jobs/", **more: Any
) -> list[asyncio.Task[Served]]:
    tasks = [asyncio.create_task(serve(app, Served(path=path, **more))) for _ in range(count)]
    for _ in range(20):
        await asyncio.sleep(0)
    return tasks


async def test_what_gets_no_turn_in_time_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "WAIT_S", 0.2)
    inner = Application()
    app = RequestTimeoutApp(inner)
    first = await begin(app, AT_ONCE)
    late = await asyncio.gather(*await begin(app, 5))
    for served in late:
        assert served.status == 503 and served.headers["retry-after"] == "5"
        assert "Nothing was done" in json.loads(served.said[1]["body"])["detail"]
    assert inner.begun == AT_ONCE
    inner.go_on.set()
    assert {served.status for served in await asyncio.gather(*first)} == {200}
    (again,) = await asyncio.gather(*await begin(app, 1))
    assert again.status == 200


async def test_waiting_requests_get_their_turn_when_others_end() -> None:
    inner = Application()
    app = RequestTimeoutApp(inner)
    tasks = await begin(app, AT_ONCE * 3)
    assert inner.begun == AT_ONCE
    inner.go_on.set()
    assert {served.status for served in await asyncio.gather(*tasks)} == {200}
    assert inner.most <= AT_ONCE


async def test_requests_beyond_the_number_that_may_wait_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "MAX_WAITING", 3)
    inner = Application()
    app = RequestTimeoutApp(inner)
    first, waiting = await begin(app, AT_ONCE), await begin(app, 3)
    (refused,) = await asyncio.gather(*await begin(app, 1))
    assert refused.status == 503 and inner.begun == AT_ONCE
    inner.go_on.set()
    assert {served.status for served in await asyncio.gather(*first, *waiting)} == {200}


async def test_a_download_and_a_client_that_sends_slowly_use_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "WAIT_S", 0.2)
    inner = Application()
    inner.streams = True
    app = RequestTimeoutApp(inner)
    downloads = await begin(app, AT_ONCE)
    body = [(0.0, b"a"), (60.0, b"b")]
    senders = [asyncio.create_task(serve(app, Served(*body, method="POST"))) for _ in range(AT_ONCE)]
    (served,) = await begin(app, 1)
    inner.go_on.set()
    assert (await served).status == 200
    assert {each.status for each in await asyncio.gather(*downloads)} == {200}
    for each in senders:
        each.cancel()
    await asyncio.gather(*senders, return_exceptions=True)


async def test_probes_are_answered_while_all_other_slots_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy portal must not look like one that is down, to whatever restarts it or raises alarms."""
    monkeypatch.setattr(admission, "WAIT_S", 0.2)
    inner = Application()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await (
            answer(send) if scope["path"] in PROBE_PATHS and await receive() else inner(scope, receive, send)
        )

    app = RequestTimeoutApp(application)
    busy = await begin(app, AT_ONCE * 2)
    probes = [(await begin(app, 1, path))[0] for path in sorted(PROBE_PATHS)]
    assert [served.status for served in await asyncio.gather(*probes)] == [200, 200]
    inner.go_on.set()
    await asyncio.gather(*busy)


async def test_files_of_pages_are_sent_while_all_slots_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page whose script was refused shows everything and does nothing, and nothing requests it again."""
    monkeypatch.setattr(admission, "WAIT_S", 0.2)
    inner = Application()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].startswith("/static/"):
            await receive()
            await asyncio.sleep(0.5)  # longer than the limit of other requests below
            await answer(send)
        else:
            await inner(scope, receive, send)

    app = RequestTimeoutApp(application, within_s=0.3)
    busy = await begin(app, AT_ONCE)
    files = await asyncio.gather(*await begin(app, AT_ONCE, "/static/chunks/launch-QWERTZ12.js"))
    assert {served.status for served in files} == {200}
    inner.go_on.set()
    assert {served.status for served in await asyncio.gather(*busy)} == {503}


class Waiting:
    """Waits in a thread for another process, like a view."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun = self.after = self.most_after = 0
        self._lock = threading.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (await receive())["type"] == "http.disconnect":
            return
        if scope["path"] == "/waits/":
            await asyncio.get_running_loop().run_in_executor(None, contextvars.copy_context().run, self._wait)
        await answer(send)

    def _wait(self) -> None:
        with admission.waiting_for_others():
            self.begun += 1
            self.go_on.wait(20)
        with self._lock:
            self.after += 1
            self.most_after = max(self.after, self.most_after)
        time.sleep(0.02)
        with self._lock:
            self.after -= 1


async def test_requests_that_wait_for_another_process_use_no_turn_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_timeout, "UNPOOLED_REQUESTS", 3)
    monkeypatch.setattr("django.conf.settings.DATABASE_POOL", 0)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(12))
    inner = Waiting()
    app = RequestTimeoutApp(inner)
    waiting = await begin(app, 12, "/waits/")
    while inner.begun < 12:
        await asyncio.sleep(0.01)
    pages = await asyncio.gather(*await begin(app, 6))
    assert {served.status for served in pages} == {200}
    inner.go_on.set()
    assert {served.status for served in await asyncio.gather(*waiting)} == {200}
    assert inner.most_after <= 3
    assert app._admission.paused == 0
    assert {served.status for served in await asyncio.gather(*await begin(app, 6))} == {200}


async def test_only_a_bounded_number_of_requests_waits_without_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_timeout, "UNPOOLED_REQUESTS", 2)
    monkeypatch.setattr("django.conf.settings.DATABASE_POOL", 0)
    monkeypatch.setattr(admission, "MAX_PAUSED", 3)
    monkeypatch.setattr(admission, "WAIT_S", 0.5)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(12))
    inner = Waiting()
    app = RequestTimeoutApp(inner)
    waiting = await begin(app, 8, "/waits/")
    await asyncio.sleep(1.0)
    assert inner.begun == 5
    inner.go_on.set()
    found = sorted(served.status for served in await asyncio.gather(*waiting))
    assert found == [200] * 5 + [503] * 3
