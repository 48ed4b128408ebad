"""The shapes of ASGI that the gateway speaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class ClientDisconnectedError(Exception):
    """The browser went away before its request was whole."""


class BodyTimeoutError(Exception):
    """The browser stopped sending in the midst of its request, and nothing was answered yet."""


class BodyTooLargeError(Exception):
    """The request's body is longer than the proxied takes; upstream did not get all of it."""
