"""What backup and restore need of the database, the owner's role and this machine."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from django.db import connection

from portal.database.roles import SCHEMAS, Relation, reassign_statement, relations
from portal.standalone.errors import StartError
from portal.standalone.postgres_tools import SETS_TRANSACTION_TIMEOUT, find_tool, find_tools
from portal.standalone.servers.binaries import REQUIRED_EXTENSION

NAMED_TABLES = 3
"""How many tables a message names."""


def server_major() -> int:
    """Return the major version of the server."""
    connection.ensure_connection()
    return int(connection.connection.info.server_version) // 10_000


def missing_requirements() -> list[str]:
    """Return a sentence for each thing that backup or restore will lack. Must run as the owner."""
    return [
        *foreign_tables(), *foreign_functions(), *_unreadable(), *missing_for_restore(), *_missing_tools()
    ]  # fmt: skip


def check_backup_possible() -> None:
    """Raise StartError if the owner cannot read everything, or there is no pg_dump. Must run as the owner.

    And if a function belongs to another role: a restore would give it to the owner, with the owner's rights.
    """
    if missing := [*_unreadable(), *foreign_functions()]:
        raise StartError(missing[0])
    find_tool("pg_dump", server_major())


def missing_for_restore() -> list[str]:
    """Return a sentence for each privilege and extension that a restore into this database lacks."""
    missing = []
    database, owner, may_create, in_public = _row(
        "SELECT current_database()::text, current_user::text, has_database_privilege(current_database(), 'CREATE'),"
        " has_schema_privilege('public', 'CREATE')"
    )
    if not may_create:
        missing.append(
            f'The role "{owner}" may not create schemas in the database: '
            f'as a superuser, GRANT CREATE ON DATABASE "{database}" TO "{owner}";'
        )
    if not in_public:
        missing.append(
            f'The role "{owner}" may not create tables: as a superuser, in the database "{database}", '
            f'GRANT CREATE ON SCHEMA public TO "{owner}";'
        )
    known, installed, trusted = _row(
        "SELECT count(*) > 0, bool_or(installed), bool_or(trusted OR is_superuser)"
        " FROM pg_available_extension_versions, (SELECT rolsuper AS is_superuser FROM pg_roles"
        " WHERE rolname = current_user) AS role WHERE name = %s",
        REQUIRED_EXTENSION,
    )
    if not known:
        missing.append(
            f"The database server has no extension {REQUIRED_EXTENSION}: install it there "
            "(Debian: apt-get install postgresql-contrib)."
        )
    elif not installed and not trusted:
        missing.append(
            f'The role "{owner}" may not create the extension {REQUIRED_EXTENSION}: as a superuser, in the database '
            f'"{database}", CREATE EXTENSION {REQUIRED_EXTENSION};'
        )
    return missing


def foreign_tables(*, besides: str = "") -> list[str]:
    """Return a sentence for each role but `besides` that owns tables without the owner having its privileges."""
    of_role: dict[str, list[Relation]] = defaultdict(list)
    for relation in relations():
        of_role[relation.owner].append(relation)
    (owner,) = _row("SELECT current_user::text")
    return [
        f'{_shown(tables)} to the role "{role}" instead of the owner "{owner}": '
        f"as a superuser, in this database, {_handing_over(tables, role, owner)}"
        for role, tables in sorted(of_role.items())
        if role != besides and not _row("SELECT pg_has_role(current_user, %s, 'USAGE')", role)[0]
    ]


def foreign_functions() -> list[str]:
    """Return a sentence for a function of our schemas whose owner's privileges the current role does not have."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT entry.oid::regprocedure::text, pg_get_userbyid(proowner)::text FROM pg_proc AS entry"
            " WHERE pronamespace IN (SELECT oid FROM pg_namespace WHERE nspname = ANY(%s))"
            " AND NOT pg_has_role(current_user, proowner, 'USAGE')"
            " AND NOT (SELECT rolsuper FROM pg_roles WHERE pg_roles.oid = proowner) AND NOT EXISTS (SELECT FROM"
            " pg_depend WHERE classid = 'pg_proc'::regclass AND objid = entry.oid AND deptype = 'e')"
            " ORDER BY 1 LIMIT 1",
            [list(SCHEMAS)],
        )
        return [
            f'The function {name} belongs to the role "{role}", and a restore would give it the rights of the owner: '
            f"as a superuser, in this database, DROP FUNCTION {name};"
            for name, role in cursor.fetchall()
        ]


def _handing_over(tables: list[Relation], role: str, owner: str) -> str:
    """Return the SQL that makes the owner the owner of all tables of a role."""
    if not _row("SELECT rolsuper FROM pg_roles WHERE rolname = %s", role)[0]:
        return reassign_statement(role, owner)
    # what PostgreSQL itself needs may belong to a superuser, and cannot be reassigned
    names = [each.identifier.as_string(None) for each in tables]
    return " ".join(f'ALTER TABLE {name} OWNER TO "{owner}";' for name in names)


def _shown(tables: list[Relation]) -> str:
    names = ", ".join(f"{each.schema}.{each.name}" for each in tables[:NAMED_TABLES])
    more = ", ..." if len(tables) > NAMED_TABLES else ""
    return f"{len(tables)} tables ({names}{more}) belong" if len(tables) > 1 else f"The table {names} belongs"


def _unreadable() -> list[str]:
    """Name what the owner may not read, which ends pg_dump."""
    (owner,) = _row("SELECT current_user::text")
    closed = _row(
        "SELECT array_agg(nspname::text) FROM pg_namespace WHERE nspname = ANY(%s)"
        " AND NOT has_schema_privilege(oid, 'USAGE')",
        list(SCHEMAS),
    )[0]
    if closed:
        return [
            f'The role "{owner}" may not use the schema {closed[0]}: GRANT USAGE ON SCHEMA {closed[0]} TO "{owner}";'
        ]
    unreadable = [relation for relation in relations() if not relation.readable]
    if not unreadable:
        return []
    first = unreadable[0]
    return [
        f'The role "{owner}" may not read {len(unreadable)} tables that a backup contains, such as '
        f'{first.schema}.{first.name} of the role "{first.owner}".'
    ]


def _missing_tools() -> list[str]:
    major = server_major()
    for name in ("pg_dump", "pg_restore"):
        tools = find_tools(name, major)
        if not tools:
            return [
                f"There is no {name} for PostgreSQL {major} on this machine: "
                f"install one (Debian: apt-get install postgresql-client-{major})."
            ]
        if major < SETS_TRANSACTION_TIMEOUT <= tools[0].major:
            return [
                f"The {name} of this machine is version {tools[0].major}, whose backups PostgreSQL {major} cannot "
                f"restore: install version {major} (Debian: apt-get install postgresql-client-{major})."
            ]
    return []


def _row(statement: str, *parameters: Any) -> tuple[Any, ...]:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return tuple(cursor.fetchone())
