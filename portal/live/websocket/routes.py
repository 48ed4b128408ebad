"""WebSocket routes: path to consumer. Each consumer declares its access policy, as each HTTP route does."""

from __future__ import annotations

from typing import Any

from portal.live.websocket.consumer import LiveConsumer

WEBSOCKET_ROUTES = {"/live/": LiveConsumer}


async def websocket_app(scope: Any, receive: Any, send: Any) -> None:
    consumer = WEBSOCKET_ROUTES.get(scope["path"])
    if consumer is not None:
        await consumer.serve(scope, receive, send)
        return
    if (await receive())["type"] == "websocket.connect":
        await send({"type": "websocket.close", "code": 4404})
