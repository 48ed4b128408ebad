"""Carries one WebSocket upstream and back: subprotocols, text and binary, closing codes, back-pressure."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp

from portal.gateway.forward import Journey, NoAnswer, text
from portal.gateway.wire import MAX_MESSAGE_BYTES, Receive, Scope, Send

HEARTBEAT_S = 30.0
CONNECT_WITHIN_S = 9.0
RIGHT_ENDED = 1008
UPSTREAM_BROKE = 1014
_MAY_BE_SENT = frozenset({1000, 1001, 1002, 1003, *range(1007, 1015)})


class HandshakeRefused(Exception):
    """Upstream answered the handshake with a plain HTTP status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the handshake was answered with {status}")
        self.status = status


async def forward_socket(journey: Journey, scope: Scope, receive: Receive, send: Send) -> None:
    """Joins the browser's socket with one upstream until either closes or the right ends.

    Raises NoAnswer or HandshakeRefused while the handshake with the browser is still open.
    """
    if (await receive())["type"] != "websocket.connect":
        return
    try:
        async with asyncio.timeout(CONNECT_WITHIN_S):
            upstream = await journey.session.ws_connect(
                journey.url,
                protocols=scope["subprotocols"],
                headers=text(journey.headers),
                max_msg_size=MAX_MESSAGE_BYTES,
                heartbeat=HEARTBEAT_S,
                compress=0,
            )
    except aiohttp.WSServerHandshakeError as problem:
        raise HandshakeRefused(problem.status) from problem
    except (aiohttp.ClientError, TimeoutError, OSError) as problem:
        raise NoAnswer(str(problem) or type(problem).__name__) from problem
    try:
        await send({"type": "websocket.accept", "subprotocol": upstream.protocol, "headers": []})
        await _join(journey, upstream, receive, send)
    finally:
        await upstream.close()


async def _join(
    journey: Journey, upstream: aiohttp.ClientWebSocketResponse, receive: Receive, send: Send
) -> None:
    ended = asyncio.Event()
    watching = (
        journey.guard.watching(journey.hold, ended.set)
        if journey.guard is not None and journey.hold is not None
        else contextlib.nullcontext()
    )
    with watching:
        up = asyncio.create_task(_upwards(upstream, receive))
        down = asyncio.create_task(_downwards(upstream, send))
        lost = asyncio.create_task(ended.wait())
        try:
            await asyncio.wait({up, down, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                await _close(send, RIGHT_ENDED, "This workspace is no longer open to you.")
            elif down.done() and not up.done():
                code = upstream.close_code if down.exception() is None else UPSTREAM_BROKE
                await _close(send, code, "")
            elif up.done() and up.exception() is None:
                await upstream.close(code=up.result())
        finally:
            for task in (up, down, lost):
                task.cancel()
            await asyncio.gather(up, down, lost, return_exceptions=True)


async def _upwards(upstream: aiohttp.ClientWebSocketResponse, receive: Receive) -> int:
    """From browser to tool; the code with which the browser closed."""
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            return _sendable(message.get("code"), instead=1001)
        words = message.get("text")
        if words is not None:
            await upstream.send_str(words)
        else:
            await upstream.send_bytes(message["bytes"])


async def _downwards(upstream: aiohttp.ClientWebSocketResponse, send: Send) -> None:
    """From tool to browser, until the tool closes."""
    while True:
        message = await upstream.receive()
        if message.type is aiohttp.WSMsgType.TEXT:
            await send({"type": "websocket.send", "text": message.data})
        elif message.type is aiohttp.WSMsgType.BINARY:
            await send({"type": "websocket.send", "bytes": message.data})
        else:
            return


async def _close(send: Send, code: int | None, reason: str) -> None:
    # The browser may be gone by now, which is what was wanted.
    with contextlib.suppress(RuntimeError, OSError):
        await send(
            {"type": "websocket.close", "code": _sendable(code, instead=UPSTREAM_BROKE), "reason": reason}
        )


def _sendable(code: int | None, *, instead: int) -> int:
    """A closing code that may stand in a close frame."""
    if code is None or code == 1006:
        return instead
    if code == 1005:
        return 1000
    return code if code in _MAY_BE_SENT or 3000 <= code <= 4999 else instead
