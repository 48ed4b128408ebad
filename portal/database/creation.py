"""Creates the databases of tests and benchmarks with the two roles of an installation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db.backends.postgresql import creation

from portal.database.roles import as_owner


class DatabaseCreation(creation.DatabaseCreation):
    """Creates and drops databases as the owner of the tables; the services' role may not."""

    @contextmanager
    def _nodb_cursor(self) -> Iterator[Any]:
        with as_owner(), super()._nodb_cursor() as cursor:  # type: ignore[misc]  # the stubs do not know it
            yield cursor
