"""Empties the tables after a test by DELETE.

Django's way takes longer than most tests: TRUNCATE makes new files for each table and index, the tables are listed
from the catalogue each time, and ``post_migrate`` inserts hundreds of permissions, which this project does not use.
"""

from __future__ import annotations

from functools import cache

from django.apps import apps
from django.conf import settings
from django.db import connection
from django.test import TransactionTestCase

from tests.table_owner import execute_as_owner

FILLED_BY_MIGRATE = frozenset({"django_content_type", "auth_permission"})
"""Tables that no test writes to; they keep what the migration of the database has inserted."""


@cache
def owner_may_skip_triggers() -> bool:
    """Only a superuser may; foreign keys, and rows that are kept for ever, are the business of triggers."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT rolsuper FROM pg_roles WHERE rolname = %s", [settings.DATABASE_OWNER["USER"]])
        return bool(cursor.fetchone()[0])


@cache
def emptied_tables() -> tuple[str, ...]:
    """Return the tables that are emptied after each test."""
    tables = {
        model._meta.db_table
        for model in apps.get_models(include_auto_created=True)
        if model._meta.managed and not model._meta.proxy
    }
    return tuple(sorted(tables - FILLED_BY_MIGRATE))


@cache
def _statements() -> str:
    tables = [connection.ops.quote_name(table) for table in emptied_tables()]
    if owner_may_skip_triggers():
        deletions = [f"DELETE FROM {table}" for table in tables]
        return "; ".join(["SET LOCAL session_replication_role = replica", *deletions])
    audit = "ALTER TABLE portal_auditentry {} TRIGGER USER"
    return "; ".join([audit.format("DISABLE"), f"TRUNCATE {', '.join(tables)}", audit.format("ENABLE")])


def _empty_tables(self: TransactionTestCase) -> None:
    execute_as_owner(_statements())


def flush_by_delete() -> None:
    """From here on, in this process."""
    TransactionTestCase._fixture_teardown = _empty_tables  # type: ignore[method-assign]
