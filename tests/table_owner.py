"""Lets fixtures change what the services' role may not: rows of histories, triggers, tables.

Tests connect as the services do. A function of the test database runs a statement as the owner of the tables, in the
transaction of the test, whose rows no other connection sees.
"""

from __future__ import annotations

from typing import Any

from django.db import connection
from django.db.models import QuerySet
from django.db.models.sql import UpdateQuery

from portal.database.roles import as_owner

SCHEMA = "fairway_tests"
_FUNCTION = f"""
    CREATE SCHEMA IF NOT EXISTS {SCHEMA};
    CREATE OR REPLACE FUNCTION {SCHEMA}.as_owner(statements text) RETURNS bigint
        LANGUAGE plpgsql SECURITY DEFINER AS $$
    DECLARE changed bigint;
    BEGIN
        EXECUTE statements;
        GET DIAGNOSTICS changed = ROW_COUNT;
        RETURN changed;
    END $$;
    GRANT USAGE ON SCHEMA {SCHEMA} TO PUBLIC;
"""


def create_function() -> None:
    """Create the function in the database of the tests."""
    with as_owner(), connection.cursor() as cursor:
        cursor.execute(_FUNCTION)


def execute_as_owner(statements: str, *parameters: Any) -> int:
    """Return the number of rows that the last of the statements has changed."""
    with connection.cursor() as cursor:
        text = cursor.mogrify(statements, parameters) if parameters else statements
        cursor.execute(f"SELECT {SCHEMA}.as_owner(%s)", [text])
        return int(cursor.fetchone()[0])


def update_as_owner(rows: QuerySet[Any], **values: Any) -> int:
    """Update rows that the services may only insert, as ``QuerySet.update`` does."""
    query = rows.query.chain(UpdateQuery)
    query.add_update_values(values)
    statement, parameters = query.get_compiler(connection=connection).as_sql()
    return execute_as_owner(statement, *parameters)
