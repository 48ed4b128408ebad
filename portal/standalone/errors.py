"""The error that prevents a start."""

from __future__ import annotations

from django.db.utils import DatabaseError, OperationalError

from portal.database.unfinished_restore import UnfinishedRestore


class StartError(Exception):
    """A requirement cannot be started; the message states the cause and the remedy."""


def database_start_error(error: DatabaseError) -> StartError:
    """Return the error for a database that accepts no connection, or that the owner's role may not read."""
    if isinstance(error.__cause__, UnfinishedRestore):
        return StartError(str(error))
    if not isinstance(error, OperationalError):
        return StartError(
            f"The database cannot be read: {str(error).strip()}. Connect as the role that owns its tables "
            "(docs/operations.md)."
        )
    return StartError(f"The database does not respond: {error}")
