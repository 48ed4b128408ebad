"""Records when the server began to render a page: later announcements may not be part of it."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest, HttpResponseBase

from portal.valkey.topic_times import now_ms


class RenderTimeMiddleware:
    """Set ``request.rendered_at_ms``, milliseconds since 1970, before any read from the database."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        request.rendered_at_ms = now_ms()  # type: ignore[attr-defined]
        return self.get_response(request)
