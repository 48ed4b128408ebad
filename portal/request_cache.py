"""What a request that changes nothing asks of the record once, however often it is needed.

Who is in which project is asked by every list, every check and every field of a form: a third of the queries of the
launch page. Within one look the answer stays the same; outside of it, as in whatever changes something, it is
asked anew each time.
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
    """Until it ends, whatever is asked by ``asked_once`` is asked once."""
    token = _cache.set({})
    try:
        yield
    finally:
        _cache.reset(token)


def cached(key: Hashable, compute: Callable[[], CachedValue]) -> CachedValue:
    """The answer of ``ask``, or what it was before in this look. Nobody changes it."""
    known = _cache.get()
    if known is None:
        return compute()
    if key not in known:
        known[key] = compute()
    answer: CachedValue = known[key]
    return answer
