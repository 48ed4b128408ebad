"""Enables the connection pool and returns each request's connection as soon as its response is ready."""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from portal.database.base import DatabaseWrapper
from portal.database.connection_pool import CHECKOUT_TIMEOUT_S, ConnectionPool


def enable_pooling(wait_s: float = CHECKOUT_TIMEOUT_S) -> None:
    """Make the threads of this process share ``settings.DATABASE_POOL`` connections; 0 changes nothing.

    ``wait_s`` is the time limit for a free connection.
    """
    if settings.DATABASE_POOL and DatabaseWrapper.connection_pool is None:
        DatabaseWrapper.connection_pool = ConnectionPool(settings.DATABASE_POOL, wait_s)


def release_connection() -> None:
    """Return this thread's connection to the pool, unless a transaction is open."""
    wrapper = connections[DEFAULT_DB_ALIAS]
    if isinstance(wrapper, DatabaseWrapper):
        wrapper.return_to_pool()


class ReleaseConnectionMiddleware:
    """The outermost middleware: a client that reads a long response slowly holds no connection."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        try:
            return self.get_response(request)
        finally:
            release_connection()
