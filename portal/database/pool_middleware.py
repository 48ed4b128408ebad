"""Begins the sharing of connections, and ends each request's turn as soon as its answer is made."""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from portal.database.base import DatabaseWrapper
from portal.database.connection_pool import CHECKOUT_TIMEOUT_S, ConnectionPool


def enable_pooling(wait_s: float = CHECKOUT_TIMEOUT_S) -> None:
    """From here on the threads of this process share ``settings.DATABASE_POOL`` connections; 0 changes nothing.

    ``wait_s`` is how long one waits for a turn.
    """
    if settings.DATABASE_POOL and DatabaseWrapper.pool is None:
        DatabaseWrapper.pool = ConnectionPool(settings.DATABASE_POOL, wait_s)


def release_connection() -> None:
    """Gives this thread's connection back, where it is a lent one outside of a transaction."""
    wrapper = connections[DEFAULT_DB_ALIAS]
    if isinstance(wrapper, DatabaseWrapper):
        wrapper.return_to_pool()


class ReleaseConnectionMiddleware:
    """The outermost middleware: who reads a long answer slowly holds no connection meanwhile."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        try:
            return self.get_response(request)
        finally:
            release_connection()
