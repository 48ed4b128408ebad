"""The end that every request and every wait for the database has."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from django.db import OperationalError, connection

from portal.database import timeouts
from portal.request_timeout import RequestTimeoutApp
from tests.time_budget import budget_s

WITHIN_S = 0.3


class Served:
    """What a server does with one request: gives its body, keeps the answer."""

    def __init__(self, *body: tuple[float, bytes], path: str = "/jobs/", method: str = "GET", **headers: str):
        self.body = list(body) or [(0.0, b"")]
        self.said: list[dict[str, Any]] = []
        names = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.scope = {"type": "http", "method": method, "path": path, "headers": names}
        self.took_s = 0.0

    async def by(self, application: Any) -> Served:
        began_s = time.monotonic()
        await RequestTimeoutApp(application, within_s=WITHIN_S)(self.scope, self.receive, self.send)
        self.took_s = time.monotonic() - began_s
        return self

    async def receive(self) -> dict[str, Any]:
        if not self.body:
            await asyncio.Event().wait()
        pause_s, piece = self.body.pop(0)
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": piece, "more_body": bool(self.body)}

    async def send(self, message: dict[str, Any]) -> None:
        self.said.append(message)

    @property
    def status(self) -> int:
        return int(self.said[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.said[0]["headers"]}


async def answer(send: Any, *pieces: tuple[float, bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for pause_s, piece in pieces:
        await asyncio.sleep(pause_s)
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def test_an_answer_in_time_passes_unchanged() -> None:
    async def quick(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await answer(send, (0.0, b"fine"))

    served = await Served().by(quick)
    assert (served.status, [message.get("body") for message in served.said]) == (200, [None, b"fine", b""])


async def test_an_answer_that_has_started_may_take_longer() -> None:
    async def download(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await answer(send, (WITHIN_S, b"half"), (WITHIN_S, b"whole"))

    served = await Served().by(download)
    assert served.status == 200
    assert served.said[-2]["body"] == b"whole"


async def test_a_slow_sender_does_not_use_the_time_of_others() -> None:
    async def read_all(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await answer(send)

    served = await Served((WITHIN_S, b"a"), (WITHIN_S, b"b"), method="POST").by(read_all)
    assert served.status == 200


async def test_no_answer_is_a_503_and_late_output_is_discarded() -> None:
    ended = asyncio.Event()

    async def stuck(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(WITHIN_S * 3)
        await answer(send, (0.0, b"too late"))
        ended.set()

    served = await Served().by(stuck)
    assert served.status == 503
    assert WITHIN_S <= served.took_s < WITHIN_S * 2.5
    assert served.headers["retry-after"] == "5"
    assert b"Try again" in served.said[1]["body"]
    reported = len(served.said)
    await asyncio.wait_for(ended.wait(), 5)  # what could not be stopped ends by itself
    assert len(served.said) == reported


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"path": "/api/v1/jobs/"}, "application/problem+json"),
        ({"path": "/jobs/"}, "text/html; charset=utf-8"),
        ({"path": "/jobs/", "hx_request": "true"}, "text/plain; charset=utf-8"),
    ],
)
async def test_each_entry_point_has_its_own_format(asked: dict[str, str], kind: str) -> None:
    async def stuck(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(WITHIN_S * 2)

    served = await Served(**asked).by(stuck)
    assert (served.status, served.headers["content-type"]) == (503, kind)
    if "json" in kind:
        assert json.loads(served.said[1]["body"])["code"] == "unavailable"


async def test_an_error_is_reported_by_the_server() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise LookupError("broken")

    with pytest.raises(LookupError):
        await Served().by(broken)


@pytest.mark.django_db(transaction=True)
def test_an_unresponsive_database_is_dropped_and_not_retried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "SERVER_TIMEOUT_S", 0.3)
    open_for_s = budget_s(0.5)
    monkeypatch.setattr(timeouts.DATABASE_BREAKER, "open_for_s", open_for_s)
    with pytest.raises(OperationalError, match="has not responded"), connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(60)")
    connection.close()
    with pytest.raises(OperationalError, match="a moment ago"):
        connection.ensure_connection()
    time.sleep(open_for_s + 0.1)
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        assert cursor.fetchone() == (1,)
