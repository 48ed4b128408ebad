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

Answer = TypeVar("Answer")

_known: ContextVar[dict[Hashable, Any] | None] = ContextVar("known in this look", default=None)


@contextmanager
def one_look() -> Iterator[None]:
    """Until it ends, whatever is asked by ``asked_once`` is asked once."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def asked_once(what: Hashable, ask: Callable[[], Answer]) -> Answer:
    """The answer of ``ask``, or what it was before in this look. Nobody changes it."""
    known = _known.get()
    if known is None:
        return ask()
    if what not in known:
        known[what] = ask()
    answer: Answer = known[what]
    return answer
