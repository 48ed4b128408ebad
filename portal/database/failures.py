"""What a failure of the database means to the user: what is slow, and whether the change may have been made."""

from __future__ import annotations

from django.utils.translation import gettext_noop

from portal.database.connection_pool import PoolFullError

POOL_FULL = gettext_noop(
    "All database connections of this process are in use. This step was not made. Try again in a moment."
)
LOCK_WAIT = gettext_noop(
    "Another change holds a lock on the same rows. This step was undone. Try again in a moment."
)
STATEMENT_TIMEOUT = gettext_noop(
    "The database took too long for one statement. This step was undone. Try again in a moment."
)
DATABASE_AWAY = gettext_noop(
    "The database does not answer. A change may have been made: check it, or repeat the request with the same "
    "Idempotency-Key if it had one."
)
VALKEY_AWAY = gettext_noop(
    "Valkey does not answer. A change may have been made: check it, or repeat the request with the same "
    "Idempotency-Key if it had one."
)
_MESSAGES = {"55P03": LOCK_WAIT, "40P01": LOCK_WAIT, "57014": STATEMENT_TIMEOUT}


def database_failure_message(failure: BaseException) -> str:
    """Return the English sentence, marked for translation, for an OperationalError or InterfaceError.

    A lock or statement timeout rolls its transaction back; after a lost connection, a commit may have succeeded.
    """
    cause: BaseException | None = failure
    while cause is not None:
        if message := _MESSAGES.get(getattr(cause, "sqlstate", None) or ""):
            return message
        if isinstance(cause, PoolFullError):
            return POOL_FULL
        cause = cause.__cause__
    return DATABASE_AWAY
