"""Batches items to send after commit: all items of one kind in a transaction go out in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from django.db import connection, transaction

Item = TypeVar("Item")


class _Batch(Generic[Item]):
    """Items for one send function, in the order they were added."""

    def __init__(self, send: Callable[[list[Item]], object]) -> None:
        self.send = send
        self.items: list[Item] = []

    def __call__(self) -> None:
        self.send(self.items)


def send_after_commit(send: Callable[[list[Item]], object], items: Sequence[Item]) -> None:
    """Call ``send`` once after the current transaction commits, with all items added for it.

    Each savepoint has its own batch, so items of a rolled-back savepoint are not sent. Outside a transaction,
    send now.
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


def pending_items(send: Callable[[list[Item]], object]) -> Iterator[Item]:
    """Yield what the current transaction sends if it commits.

    An item of a savepoint that is still open is rolled back only together with what is added now.
    """
    for hook in connection.run_on_commit:
        function = hook[1]
        if isinstance(function, _Batch) and function.send == send:
            yield from function.items
