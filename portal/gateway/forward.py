"""Carries one HTTP request upstream and its answer back, streaming both ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from portal.gateway.guard import Guard, Hold
from portal.gateway.wire import Gone, Headers, Receive, Scope, Send

LONG_AFTER_S = 1.0
"""From here on a request is watched: for a browser that left, and for a right that ended."""


class NoAnswer(Exception):
    """Nothing upstream answered, and nothing was sent to the browser yet."""


@dataclass(frozen=True)
class Journey:
    """Where a request goes, with which headers, and what becomes of the headers of the answer."""

    session: aiohttp.ClientSession
    url: URL
    headers: Headers
    answer_headers: Callable[[Iterable[tuple[bytes, bytes]]], Headers]
    answer_within_s: float | None = None
    hold: Hold | None = None
    guard: Guard | None = None


def upstream_url(origin: str, scope: Scope) -> URL:
    """The address upstream: our origin, and the browser's path and query byte for byte."""
    target = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    return URL(origin + target.decode("ascii"), encoded=True)


def text(headers: Headers) -> list[tuple[str, str]]:
    """Headers as aiohttp wants them; it writes UTF-8."""
    return [(name.decode("ascii"), _value(value)) for name, value in headers]


def _value(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")


@dataclass
class Body:
    """The request's body as it arrives."""

    receive: Receive
    whole: bool = False
    last_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Gone
            self.last_s = asyncio.get_running_loop().time()
            chunk = message.get("body", b"")
            if chunk:
                yield bytes(chunk)
            if not message.get("more_body", False):
                self.whole = True
                return

    async def until_gone(self) -> None:
        """Returns when the browser has left; only to be awaited once the body is whole."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


class _Ended(Exception):
    """The watch ended this request; the browser left or its right did."""


class _Watch:
    """Cancels a long request when its browser leaves, its right ends, or no answer begins in time."""

    def __init__(self, journey: Journey, body: Body) -> None:
        self._journey, self._body = journey, body
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._timer = self._loop.call_later(LONG_AFTER_S, self._begin)
        self._task: asyncio.Task[None] | None = None
        self.answered = False
        self.why = ""

    def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._look())

    def _end(self, why: str) -> None:
        if not self.why and self._main is not None:
            self.why = why
            self._main.cancel()

    async def _look(self) -> None:
        journey = self._journey
        if journey.hold is not None and journey.guard is not None:
            with journey.guard.watching(journey.hold, lambda: self._end("right")):
                await self._until_end()
        else:
            await self._until_end()

    async def _until_end(self) -> None:
        limit_s = self._journey.answer_within_s
        while not self._body.whole or (limit_s is not None and not self.answered):
            if self._body.whole and not self.answered and limit_s is not None:
                left_s = self._body.last_s + limit_s - self._loop.time()
                if left_s <= 0:
                    self._end("late")
                    return
                await asyncio.sleep(min(left_s, 0.25))
            else:
                await asyncio.sleep(0.25)
        await self._body.until_gone()
        self._end("gone")


async def forward(journey: Journey, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers the request from upstream. Raises NoAnswer while the browser can still be told something else.

    An answer that breaks off upstream breaks off here too: it never looks whole.
    """
    body = Body(receive)
    has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
    if not has_body:
        await receive()  # the empty body; what follows can only be the end of the connection
        body.whole = True
    watch = _Watch(journey, body)
    started = False
    try:
        async with journey.session.request(
            scope["method"],
            journey.url,
            headers=text(journey.headers),
            data=body if has_body else None,
            allow_redirects=False,
        ) as response:
            watch.answered = True
            headers = journey.answer_headers(response.raw_headers)
            if response.status in (204, 304):
                headers = [pair for pair in headers if pair[0] != b"content-length"]
            started = True
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            content = response.content
            while not content.at_eof():
                chunk = await content.readany()
                await send({"type": "http.response.body", "body": chunk, "more_body": not content.at_eof()})
                if content.at_eof() and chunk:
                    return
            await send({"type": "http.response.body", "body": b""})
    except asyncio.CancelledError:
        if not watch.why:
            raise
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        if watch.why == "late" and not started:
            raise NoAnswer("no answer in time") from None
        if watch.why == "right" and not started:
            raise NoAnswer("the right ended") from None
    except (aiohttp.ClientError, TimeoutError, OSError) as problem:
        if not started and not _left(problem):
            raise NoAnswer(str(problem) or type(problem).__name__) from problem
    finally:
        watch.stop()


def _left(problem: BaseException | None) -> bool:
    while problem is not None:
        if isinstance(problem, Gone):
            return True
        problem = problem.__cause__
    return False
