"""`migrate` while processes of the release before use the tables that it changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from django.core.management import call_command
from django.db import OperationalError, connection
from django.db.migrations.recorder import MigrationRecorder

from portal.database.migration_session import retry_for_locks
from portal.database.roles import as_owner
from tests.upgrade.recording import close_connections, recorded_database

pytestmark = pytest.mark.django_db(transaction=True)

HELD_S = 7.0
"""Longer than one attempt waits; a process may hold a lock for 8 s (`idle_in_transaction_session_timeout`)."""


@pytest.fixture
def old_process(tmp_path: Path) -> Iterator[psycopg.Connection]:
    """A connection to a recorded database, as of a process of the release that is being replaced."""
    with recorded_database("0.1.0", tmp_path):
        with as_owner():
            target = connection.get_connection_params()
        for kind in ("cursor_factory", "context", "options"):
            target.pop(kind, None)
        with psycopg.connect(**target) as opened:
            yield opened


def migrate_while(act: Callable[[], None]) -> None:
    other = threading.Thread(target=act)
    other.start()
    try:
        call_command("migrate", verbosity=0)
    finally:
        other.join()
    with as_owner():
        applied = MigrationRecorder(connection).applied_migrations()
    assert ("portal", "0004_bulk_operations") in applied


def test_a_lock_that_is_held_for_long_is_waited_for(old_process: psycopg.Connection) -> None:
    old_process.execute("SELECT id FROM portal_node FOR UPDATE")

    def end_later() -> None:
        time.sleep(HELD_S)
        old_process.commit()

    migrate_while(end_later)


def test_a_deadlock_ends_one_of_both_and_the_migration_goes_on(old_process: psycopg.Connection) -> None:
    """The old process has rows of `portal_user`, to which a migration adds a reference, and then wants a node."""
    old_process.execute("UPDATE portal_user SET language = language")

    def want_a_node() -> None:
        time.sleep(1)
        try:
            old_process.execute("UPDATE portal_node SET name = name")
            time.sleep(HELD_S)
            old_process.commit()
        except psycopg.errors.DeadlockDetected:
            old_process.rollback()

    migrate_while(want_a_node)


def test_a_migration_may_take_longer_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    options = connection.settings_dict["OPTIONS"] | {"options": "-c statement_timeout=200 -c lock_timeout=0"}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    close_connections()

    def take_long() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(1)")

    retry_for_locks(take_long)
    with pytest.raises(OperationalError, match="statement timeout"):
        take_long()
    close_connections()
