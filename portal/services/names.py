"""Checks names: their syntax, and that the database has no row with the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import IntegrityError, transaction

from portal.errors import InvalidRequest
from portal.models.public_id import name_error


@contextmanager
def atomic_unique(field: str, message: str, code: str | None = "already_exists") -> Iterator[None]:
    """Run the block in a transaction. Raise InvalidRequest for ``field`` if the database refuses a duplicate."""
    try:
        with transaction.atomic():
            yield
    except IntegrityError as error:
        raise InvalidRequest(fields={field: message}, code=code) from error


def check_name(name: str) -> None:
    """Raise InvalidRequest unless the text is a valid name."""
    if fault := name_error(name):
        raise InvalidRequest(fields={"name": fault})
