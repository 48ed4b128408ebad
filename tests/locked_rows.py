"""A row that another connection locks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection, transaction
from django.db.models import Model


@contextmanager
def locked_row(row: Model) -> Iterator[None]:
    """Hold the lock of ``SELECT ... FOR UPDATE`` on a row from another thread."""
    locked, release = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            type(row)._default_manager.select_for_update().get(pk=row.pk)
            locked.set()
            release.wait(60)
        connection.close()

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert locked.wait(60)
        yield
    finally:
        release.set()
        holder.join()
