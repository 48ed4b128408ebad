"""The table of sockets: path -> consumer. Each consumer declares its policy, as each route does."""

from __future__ import annotations

from typing import Any

from portal.live.consumers import LiveConsumer

SOCKETS = {"/live/": LiveConsumer}


async def sockets(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI application for WebSockets."""
    consumer = SOCKETS.get(scope["path"])
    if consumer is not None:
        await consumer.serve(scope, receive, send)
        return
    if (await receive())["type"] == "websocket.connect":
        await send({"type": "websocket.close", "code": 4404})
