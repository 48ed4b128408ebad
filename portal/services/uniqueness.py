"""Turns the violation of a unique constraint into an error for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import IntegrityError, transaction

from portal.errors import InvalidRequest


@contextmanager
def atomic_unique(field: str, message: str, code: str | None = "already_exists") -> Iterator[None]:
    """Run the block in a transaction. Raise InvalidRequest for ``field`` if the database refuses a duplicate."""
    try:
        with transaction.atomic():
            yield
    except IntegrityError as clash:
        raise InvalidRequest(fields={field: message}, code=code) from clash
