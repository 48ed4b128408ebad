"""The error that prevents a start."""

from __future__ import annotations

from django.db.utils import OperationalError

from portal.database.unfinished_restore import UnfinishedRestore


class StartError(Exception):
    """A requirement cannot be started; the message states the cause and the remedy."""


def database_start_error(error: OperationalError) -> StartError:
    """Return the error for a database that accepts no connection."""
    if isinstance(error.__cause__, UnfinishedRestore):
        return StartError(str(error))
    return StartError(f"The database does not respond: {error}")
