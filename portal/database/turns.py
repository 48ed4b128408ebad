"""Begins the sharing of connections, and ends each request's turn as soon as its answer is made."""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from portal.database.base import DatabaseWrapper
from portal.database.shared import WAIT_S, SharedConnections


def share_connections(wait_s: float = WAIT_S) -> None:
    """From here on the threads of this process share ``settings.DATABASE_POOL`` connections; 0 changes nothing.

    ``wait_s`` is how long one waits for a turn.
    """
    if settings.DATABASE_POOL and DatabaseWrapper.shared is None:
        DatabaseWrapper.shared = SharedConnections(settings.DATABASE_POOL, wait_s)


def give_back() -> None:
    """Gives this thread's connection back, where it is a lent one outside of a transaction."""
    wrapper = connections[DEFAULT_DB_ALIAS]
    if isinstance(wrapper, DatabaseWrapper):
        wrapper.give_back()


class GiveBack:
    """The outermost middleware: who reads a long answer slowly holds no connection meanwhile."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        try:
            return self.get_response(request)
        finally:
            give_back()
