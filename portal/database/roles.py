"""The two database roles: the owner changes tables, the services' role only uses them.

SQL injected into the services can therefore neither truncate nor change append-only tables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connection, connections, transaction
from django.db.utils import ProgrammingError
from psycopg import errors, sql

APPEND_ONLY_TABLES = ("portal_auditentry", "portal_jobevent", "portal_quotachange", "portal_attemptwork")
"""Histories: the services may insert and read rows, not change them."""
SINGLE_ROLE_WARNING = (
    "The role of DATABASE_URL may change tables and the audit trail. Set DATABASE_OWNER_URL to the role that owns "
    "the tables, and DATABASE_URL to a separate role for the services (docs/operations.md)."
)


@contextlib.contextmanager
def as_owner() -> Iterator[None]:
    """Connect this thread as the owner inside the context, if an owner role is configured."""
    if not settings.DATABASE_OWNER:
        yield
        return
    wrapper = connections[DEFAULT_DB_ALIAS]
    services: dict[str, Any] = wrapper.settings_dict
    who = {key: settings.DATABASE_OWNER.get(key) or "" for key in ("USER", "PASSWORD", "HOST", "PORT")}
    wrapper.close()
    wrapper.settings_dict = services | who
    try:
        yield
    finally:
        wrapper.close()
        wrapper.settings_dict = services


def grant_service_privileges() -> None:
    """Create the services' role if it is missing and grant it the use of every table. Must run as the owner.

    One transaction, so that running services never lack a privilege. Raise ProgrammingError with the SQL to
    run if the owner may not create roles.
    """
    services, owner = settings.DATABASES[DEFAULT_DB_ALIAS], settings.DATABASE_OWNER
    if not owner or services["USER"] == owner["USER"]:
        return
    role = sql.Identifier(services["USER"])
    with transaction.atomic(), connection.cursor() as cursor:
        _ensure_role(cursor, services["USER"], services.get("PASSWORD") or "")
        histories = sql.SQL(", ").join(map(sql.Identifier, APPEND_ONLY_TABLES))
        for statement in (
            "REVOKE CREATE ON SCHEMA public FROM PUBLIC",
            "REVOKE ALL ON SCHEMA public FROM {role}",
            "REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {role}",
            "GRANT USAGE ON SCHEMA public TO {role}",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}",
            "GRANT SELECT, USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}",
            "REVOKE UPDATE, DELETE ON {histories} FROM {role}",
            "REVOKE INSERT, UPDATE, DELETE ON django_migrations FROM {role}",
            "CREATE SCHEMA IF NOT EXISTS mlflow",  # the tracking server creates its tables there
            "GRANT USAGE, CREATE ON SCHEMA mlflow TO {role}",
        ):
            cursor.execute(sql.SQL(statement).format(role=role, histories=histories).as_string(None))
        _return_restored_tables(cursor, role)


def _return_restored_tables(cursor: Any, role: sql.Identifier) -> None:
    """Make the services' role the owner of the tracking server's tables again, which a restore created."""
    cursor.execute(
        "SELECT tablename FROM pg_tables WHERE schemaname = 'mlflow' AND tableowner = current_user"
    )
    for (name,) in cursor.fetchall():
        statement = sql.SQL("ALTER TABLE mlflow.{table} OWNER TO {role}")
        cursor.execute(statement.format(table=sql.Identifier(name), role=role).as_string(None))


def single_role_warning() -> str:
    """Return a warning if the services' role may truncate the audit trail, else an empty string."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT has_table_privilege(current_user, %s, 'TRUNCATE')", [APPEND_ONLY_TABLES[0]])
        return SINGLE_ROLE_WARNING if cursor.fetchone()[0] else ""


def _ensure_role(cursor: Any, name: str, password: str) -> None:
    """Create the role or set its password. An empty password leaves an existing role unchanged."""
    cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [name])
    known = cursor.fetchone() is not None
    if known and not password:
        return
    # Hashed here, so that the password appears in no statement and no server log.
    hashed = connection.connection.pgconn.encrypt_password(
        password.encode(), name.encode(), b"scram-sha-256"
    ).decode()
    words = "ALTER ROLE {role} LOGIN PASSWORD {hashed}" if known else "CREATE ROLE {role} LOGIN"
    if password and not known:
        words += " PASSWORD {hashed}"
    statement = sql.SQL(words).format(role=sql.Identifier(name), hashed=sql.Literal(hashed))
    try:
        with transaction.atomic():
            cursor.execute(statement.as_string(None))
    except ProgrammingError as refused:
        if not isinstance(refused.__cause__, errors.InsufficientPrivilege):
            raise
        if not known:
            raise ProgrammingError(
                f'The table owner cannot create roles. As a superuser: CREATE ROLE "{name}" LOGIN PASSWORD ...'
            ) from refused
