"""The two database roles: the owner owns every table and changes tables, the services' role only uses them.

SQL injected into the services can therefore neither truncate nor change append-only tables. What is said of
"tables" includes the sequences and views of both schemas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, DatabaseError, OperationalError, connection, connections, transaction
from django.db.utils import ProgrammingError
from psycopg import errors, sql

TRACKING_SCHEMA = "mlflow"
"""The schema of the tracking server's tables."""
SCHEMAS = ("public", TRACKING_SCHEMA)
APPEND_ONLY_TABLES = ("portal_auditentry", "portal_jobevent", "portal_quotachange", "portal_attemptwork")
"""Histories: the services may insert and read rows, not change them."""
EXPIRING_TABLES = ("portal_auditentry", "portal_jobevent", "portal_attemptwork")
"""Those of which the services may delete old rows (`scheduler.retention`); triggers refuse newer ones."""
READ_ONLY_TABLES = ("public.django_migrations", f"{TRACKING_SCHEMA}.alembic_version")
"""Versions of the tables: the services may read them."""
SINGLE_ROLE_WARNING = (
    "The role of DATABASE_URL may change tables and the audit trail. Set DATABASE_OWNER_URL to the role that owns "
    "the tables, and DATABASE_URL to a separate role for the services (docs/operations.md)."
)
CREATE_WARNING = (
    "The role of DATABASE_URL may create functions, through which it could get the owner's rights. As a superuser, "
    "in this database: REVOKE CREATE ON SCHEMA public FROM PUBLIC;"
)
"""As in a database that was upgraded from PostgreSQL 14, whose schema `public` belongs to a superuser."""
LOCK_ATTEMPTS = 4
"""How often tables are taken over while the tracking server uses them; each attempt waits for `lock_timeout`."""

_RELATIONS = """
    SELECT namespace.nspname::text, relation.relname::text, relation.relkind::text,
        pg_get_userbyid(relation.relowner)::text,
        CASE WHEN relation.relkind = 'S' THEN has_sequence_privilege(relation.oid, 'SELECT')
            ELSE has_table_privilege(relation.oid, 'SELECT') END
    FROM pg_class AS relation JOIN pg_namespace AS namespace ON namespace.oid = relation.relnamespace
    WHERE namespace.nspname = ANY(%s) AND relation.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
        AND NOT EXISTS (
            SELECT FROM pg_depend AS dependency
            WHERE dependency.classid = 'pg_class'::regclass AND dependency.objid = relation.oid
                AND (dependency.deptype = 'e' OR relation.relkind = 'S' AND dependency.deptype IN ('a', 'i'))
        )
    ORDER BY 1, 2
"""


class Relation(NamedTuple):
    """A table, view, or sequence that belongs to no table; none of an extension."""

    schema: str
    name: str
    kind: str
    """As in `pg_class.relkind`: r, p and f are tables, v and m views, S sequences."""
    owner: str
    readable: bool
    """By the role of the connection."""

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)


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


def relations() -> list[Relation]:
    """Return what is in the two schemas, by name."""
    with connection.cursor() as cursor:
        cursor.execute(_RELATIONS, [list(SCHEMAS)])
        return [Relation(*row) for row in cursor.fetchall()]


def services_role() -> str:
    """Return the name of the services' role; blank if one role does everything."""
    services, owner = settings.DATABASES[DEFAULT_DB_ALIAS], settings.DATABASE_OWNER
    return services["USER"] if owner and services["USER"] != owner["USER"] else ""


def create_tracking_schema() -> None:
    """Create the schema of the tracking server's tables unless it exists. Must run as the owner."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT to_regnamespace(%s) IS NULL", [TRACKING_SCHEMA])
        if cursor.fetchone()[0]:  # IF NOT EXISTS would require the privilege for an existing one, too
            _execute(cursor, "CREATE SCHEMA {schema}", schema=sql.Identifier(TRACKING_SCHEMA))


def take_over_tables() -> None:
    """Make the owner the owner of all tables that belong to the services' role, which keeps the use of them.

    The tracking server of earlier versions created its tables as that role. Must run as the owner. Repeatable; one
    transaction. Raise ProgrammingError with the SQL for a superuser if the owner may not.
    """
    role = services_role()
    for remaining in reversed(range(LOCK_ATTEMPTS)):
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                if role and _take_over(cursor, role):
                    _grant(cursor, sql.Identifier(role))
            return
        except OperationalError:  # a deadlock with the tracking server, or a lock that it held for long
            if not remaining:
                raise


def _take_over(cursor: Any, role: str) -> bool:
    """Return whether anything belonged to the role."""
    cursor.execute(
        "SELECT nspname FROM pg_namespace WHERE nspname = ANY(%s) AND pg_get_userbyid(nspowner) = %s",
        [list(SCHEMAS), role],
    )
    schemas = [name for (name,) in cursor.fetchall()]
    tables = [relation for relation in relations() if relation.owner == role]
    if not schemas and not tables:
        return False
    with _membership(cursor, role):
        for name in schemas:
            _execute(cursor, "ALTER SCHEMA {schema} OWNER TO CURRENT_USER", schema=sql.Identifier(name))
        for table in tables:
            _execute(cursor, "ALTER TABLE {table} OWNER TO CURRENT_USER", table=table.identifier)
    return True


@contextlib.contextmanager
def _membership(cursor: Any, role: str) -> Iterator[None]:
    """Give the owner the rights of a role within the context; the change of an owner requires those of both.

    PostgreSQL 15 lets a role with CREATEROLE do that. PostgreSQL 16 and newer require the ADMIN option, which
    such a role has on the roles that it created.
    """
    per_grantor = connection.connection.info.server_version >= 160_000
    cursor.execute(
        "SELECT current_user::text, pg_has_role(current_user, %s, 'USAGE'), EXISTS (SELECT FROM pg_auth_members"
        " WHERE roleid = (SELECT oid FROM pg_roles WHERE rolname = %s)"
        " AND member = (SELECT oid FROM pg_roles WHERE rolname = current_user) AND (grantor = member OR NOT %s))",
        [role, role, per_grantor],
    )
    owner, may_act, granted_before = cursor.fetchone()
    names = {"role": sql.Identifier(role), "owner": sql.Identifier(owner)}
    if may_act:
        yield
        return
    inherit = " WITH INHERIT TRUE" if per_grantor else ""
    try:
        with transaction.atomic():
            _execute(cursor, "GRANT {role} TO {owner}" + inherit, **names)
            cursor.execute("SELECT pg_has_role(current_user, %s, 'USAGE')", [role])
            if not cursor.fetchone()[0]:  # PostgreSQL 15, and the owner has NOINHERIT
                raise ProgrammingError("the owner does not inherit privileges")
    except DatabaseError as error:
        raise ProgrammingError(
            f'Tables belong to the role "{role}", and the table owner may not take them over. As a superuser, '
            f"in this database: {reassign_statement(role, owner)}"
        ) from error
    yield
    undo = "GRANT {role} TO {owner} WITH INHERIT FALSE" if granted_before else "REVOKE {role} FROM {owner}"
    _execute(cursor, undo, **names)


def reassign_statement(role: str, owner: str) -> str:
    """Return the SQL with which a superuser makes another role the owner of all that a role owns."""
    statement = sql.SQL("REASSIGN OWNED BY {role} TO {owner};")
    return statement.format(role=sql.Identifier(role), owner=sql.Identifier(owner)).as_string(None)


def grant_service_privileges() -> None:
    """Create the services' role if it is missing and grant it the use of every table. Must run as the owner.

    One transaction, so that running services never lack a privilege. Raise ProgrammingError with the SQL to
    run if the owner may not create roles.
    """
    role = services_role()
    if not role:
        return
    with transaction.atomic(), connection.cursor() as cursor:
        _ensure_role(cursor, role, settings.DATABASES[DEFAULT_DB_ALIAS].get("PASSWORD") or "")
        _grant(cursor, sql.Identifier(role))


def _grant(cursor: Any, role: sql.Identifier) -> None:
    _execute(cursor, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    cursor.execute("SELECT nspname FROM pg_namespace WHERE nspname = ANY(%s)", [list(SCHEMAS)])
    for (name,) in cursor.fetchall():
        for statement in (
            "REVOKE ALL ON SCHEMA {schema} FROM {role}",
            "REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {role}",
            "GRANT USAGE ON SCHEMA {schema} TO {role}",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}",
            "GRANT SELECT, USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {role}",
        ):
            _execute(cursor, statement, schema=sql.Identifier(name), role=role)
    limited = {f"public.{table}": "UPDATE, DELETE" for table in APPEND_ONLY_TABLES}
    limited |= {f"public.{table}": "UPDATE" for table in EXPIRING_TABLES}
    limited |= dict.fromkeys(READ_ONLY_TABLES, "INSERT, UPDATE, DELETE")
    for table, words in limited.items():
        cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [table])
        if cursor.fetchone()[0]:
            name = sql.Identifier(*table.split("."))
            _execute(cursor, f"REVOKE {words} ON {{table}} FROM {{role}}", table=name, role=role)


def _execute(cursor: Any, statement: str, **names: sql.Composable) -> None:
    cursor.execute(sql.SQL(statement).format(**names).as_string(None))


def single_role_warning() -> str:
    """Return a warning if the services' role has or could get the owner's rights, else an empty string."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT has_table_privilege(current_user, %s, 'TRUNCATE'),"
            " has_schema_privilege(current_user, 'public', 'CREATE')",
            [APPEND_ONLY_TABLES[0]],
        )
        may_truncate, may_create = cursor.fetchone()
    return SINGLE_ROLE_WARNING if may_truncate else CREATE_WARNING if may_create else ""


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
    except ProgrammingError as error:
        if not isinstance(error.__cause__, errors.InsufficientPrivilege):
            raise
        if not known:
            raise ProgrammingError(
                f'The table owner cannot create roles. As a superuser: CREATE ROLE "{name}" LOGIN PASSWORD ...'
            ) from error
