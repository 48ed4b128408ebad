"""Empties the tables after a test by DELETE.

Django's way takes longer than most tests: TRUNCATE makes new files for each table and index, the tables are listed
from the catalogue each time, and ``post_migrate`` inserts hundreds of permissions, which this project does not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from django.apps import apps
from django.db import connections, router, transaction
from django.db.backends.postgresql.operations import DatabaseOperations
from django.test import TransactionTestCase

FILLED_BY_MIGRATE = frozenset({"django_content_type", "auth_permission"})
"""Tables that no test writes to; they keep what the migration of the database has inserted."""
_sql_of_truncate = DatabaseOperations.sql_flush
_empty_by_flush = TransactionTestCase._fixture_teardown


@cache
def may_skip_triggers(alias: str) -> bool:
    """Only a superuser may; foreign keys, and rows that are kept for ever, are the business of triggers."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
        return bool(cursor.fetchone()[0])


@cache
def emptied_tables(alias: str) -> tuple[str, ...]:
    """Return the tables that are emptied after each test."""
    tables = {
        model._meta.db_table
        for model in apps.get_models(include_auto_created=True)
        if model._meta.managed and not model._meta.proxy and router.allow_migrate_model(alias, model)
    }
    return tuple(sorted(tables - FILLED_BY_MIGRATE))


@cache
def _deletions(alias: str) -> str:
    quote = connections[alias].ops.quote_name
    deletions = [f"DELETE FROM {quote(table)}" for table in emptied_tables(alias)]
    return "; ".join(["SET LOCAL session_replication_role = replica", *deletions])


def _empty_tables(self: TransactionTestCase) -> None:
    aliases = self._databases_names(include_mirrors=False)
    if not all(map(may_skip_triggers, aliases)):
        _empty_by_flush(self)
        return
    for alias in aliases:
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            cursor.execute(_deletions(alias))


def _sql_of_flush(self: DatabaseOperations, style: Any, tables: Sequence[str], **options: Any) -> list[str]:
    truncations = _sql_of_truncate(self, style, tables, **options)
    audit = "ALTER TABLE portal_auditentry {} TRIGGER USER"
    return [audit.format("DISABLE"), *truncations, audit.format("ENABLE")]


def flush_by_delete() -> None:
    """From here on, in this process."""
    TransactionTestCase._fixture_teardown = _empty_tables  # type: ignore[method-assign]
    DatabaseOperations.sql_flush = _sql_of_flush  # type: ignore[method-assign]
