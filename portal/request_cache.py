"""Caches answers for the duration of one read-only request.

Lists, permission checks and form fields all need the user's memberships: a third of the queries of the launch
page. Requests that change data are not cached.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

CachedValue = TypeVar("CachedValue")

_cache: ContextVar[dict[Hashable, Any] | None] = ContextVar("known in this look", default=None)


@contextmanager
def request_cache() -> Iterator[None]:
    """Cache the answers of ``cached`` until the context ends."""
    token = _cache.set({})
    try:
        yield
    finally:
        _cache.reset(token)


def cached(key: Hashable, compute: Callable[[], CachedValue]) -> CachedValue:
    """Return ``compute()``, or its earlier result in this request. Callers must not modify the result."""
    known = _cache.get()
    if known is None:
        return compute()
    if key not in known:
        known[key] = compute()
    answer: CachedValue = known[key]
    return answer
