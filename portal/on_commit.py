"""What a transaction leaves to be sent once it has committed: all of a kind together, in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from django.db import connection, transaction

Item = TypeVar("Item")


class _Batch(Generic[Item]):
    """Items of one kind, in the order they came."""

    def __init__(self, send: Callable[[list[Item]], object]) -> None:
        self.send = send
        self.items: list[Item] = []

    def __call__(self) -> None:
        self.send(self.items)


def send_after_commit(send: Callable[[list[Item]], object], items: Sequence[Item]) -> None:
    """Calls ``send`` once, after the current transaction, with these items and all others left for it.

    Each savepoint gathers its own: what is rolled back to one is not sent. Outside a transaction it is sent at once.
    """
    if not items:
        return
    inside = set(connection.savepoint_ids)
    for hook in connection.run_on_commit:
        savepoints, function = hook[:2]
        if isinstance(function, _Batch) and function.send == send and savepoints == inside:
            function.items += items
            return
    gathered = _Batch(send)
    gathered.items += items
    transaction.on_commit(gathered)
