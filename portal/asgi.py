"""ASGI entry of the web process: pages and REST by Django, WebSockets by ``portal.live``."""

from __future__ import annotations

import os
from typing import Any

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.config.settings")
_pages = get_asgi_application()

from portal.live.routes import sockets  # noqa: E402


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Hands each connection to its part."""
    if scope["type"] == "websocket":
        await sockets(scope, receive, send)
    elif scope["type"] == "http":
        await _pages(scope, receive, send)
