"""Which versions of Fairway can use a database: one whose tables are not known is refused before anything is changed.

A database names its migrations. `migrate` also leaves its own version there, and the oldest version that can use
the tables: while migrations only add, the release before may go on or be installed again (docs/operations.md).
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterable

import psycopg
from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, connection, connections, migrations
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.db.migrations.state import ProjectState

from portal.database.roles import as_owner
from portal.errors import FairwayError
from portal.version import VERSION

OLDEST_USER = "0.1.0"
"""The oldest version that works on the tables of this one. Raise it with a migration that takes something away."""
FIRST_RELEASE = "0.1.0"
_TABLE = "django_migrations"
_READ_COMMENT = "SELECT obj_description(to_regclass(%s), 'pg_class')"
_COMMENT = re.compile(r"Fairway (\d+\.\d+\.\d+), usable by (\d+\.\d+\.\d+) and newer")


class UnknownSchemaError(FairwayError):
    """The tables are not those of a version that this one can use; the message says which and what to do."""


def check_schema() -> None:
    """Raise UnknownSchemaError unless the database is new, of this version, or can be migrated or used by it.

    Reads only, as the owner of the tables. Raise OperationalError if the database does not respond.
    """
    with as_owner():
        if _TABLE not in connection.introspection.table_names():
            return
        loader = MigrationLoader(connection)
        if newer := unknown_migrations(f"{app}.{name}" for app, name in loader.applied_migrations):
            with connection.cursor() as cursor:
                cursor.execute(_READ_COMMENT, [_TABLE])
                _refuse_newer(newer[0], cursor.fetchone()[0])
        elif missing := _first_missing(_applied_state(loader)):
            raise UnknownSchemaError(
                f"The database was made by a development version before {FIRST_RELEASE} ({missing} is missing) and "
                "cannot be migrated: use an empty database and a new data folder (--data-dir)."
            )


def is_newer() -> bool:
    """Return whether a newer version has migrated the database, whose tables `migrate` must not touch then."""
    applied = MigrationRecorder(connection).applied_migrations()
    return bool(unknown_migrations(f"{app}.{name}" for app, name in applied))


def check_service_start() -> None:
    """End this process with one sentence if its version cannot use the database.

    Quick, because every service calls it: the tables were compared when `migrate` left its version there. A database
    that does not respond, or is empty, is left to the service, which waits for it.
    """
    wrapper = connections[DEFAULT_DB_ALIAS]
    try:
        with psycopg.connect(**wrapper.get_connection_params()) as opened:
            row = opened.execute(
                "SELECT to_regclass(%s), obj_description(to_regclass(%s), 'pg_class')", [_TABLE] * 2
            )
            table, comment = row.fetchone() or (None, None)
            if table is None:
                return
            applied = {str(name) for (name,) in opened.execute(f"SELECT app || '.' || name FROM {_TABLE}")}  # noqa: S608
    except psycopg.Error:
        return
    try:
        if newer := unknown_migrations(applied):
            _refuse_newer(newer[0], comment)
        elif waiting := sorted(_known_migrations() - applied):
            raise UnknownSchemaError(
                f"The database is not migrated to Fairway {VERSION} ({waiting[0]}): run manage.py prepare first."
            )
        elif not comment:
            raise UnknownSchemaError(
                f"The database was not prepared by Fairway {VERSION}: run manage.py prepare first."
            )
    except UnknownSchemaError as error:
        sys.exit(str(error))


def _refuse_newer(migration: str, comment: str | None) -> None:
    """Raise UnknownSchemaError unless the newer version has left word that this one can use its tables."""
    found = _COMMENT.fullmatch(comment or "")
    if found is None or _number(found[2]) > _number(VERSION):
        raise UnknownSchemaError(
            f"The database was migrated by Fairway {found[1] if found else 'of a newer version'} ({migration}), and "
            f"this is {VERSION}: install that version or a newer one, or restore a backup that this version made."
        )


def unknown_migrations(applied: Iterable[str]) -> list[str]:
    """Return those of the migrations, as ``app.name``, that this version does not have, sorted."""
    return sorted(set(applied) - _known_migrations())


def _known_migrations() -> set[str]:
    """Return the migrations of this version, as ``app.name``, without importing them."""
    found = set()
    for config in apps.get_app_configs():
        name, _ = MigrationLoader.migrations_module(config.label)
        try:
            package = importlib.import_module(str(name))
        except ModuleNotFoundError:  # an app without tables
            continue
        found |= {
            f"{config.label}.{info.name}"
            for info in pkgutil.iter_modules(package.__path__)
            if info.name[0] != "_"
        }
    return found


def write_version() -> None:
    """Record this version in the database. Must run as the owner of the tables, after the last migration."""
    text = f"Fairway {VERSION}, usable by {OLDEST_USER} and newer"
    with connection.cursor() as cursor:
        cursor.execute(f"COMMENT ON TABLE {_TABLE} IS %s", [text])


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _applied_state(loader: MigrationLoader) -> ProjectState:
    """Return the models as the applied migrations describe them."""
    state = ProjectState(real_apps=loader.unmigrated_apps)
    plan: list[migrations.Migration] = []
    for target in loader.graph.leaf_nodes():
        for key in loader.graph.forwards_plan(target):
            migration = loader.graph.nodes[key]
            if key in loader.applied_migrations and migration not in plan:
                plan.append(migration)
    for migration in plan:
        migration.mutate_state(state, preserve=False)
    return state


def _first_missing(state: ProjectState) -> str:
    """Return the first column, constraint or index of the portal's models that the database lacks, or blank."""
    with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
        cursor.execute(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = current_schema()"
        )
        columns = {(table, column) for table, column in cursor.fetchall()}
        cursor.execute(
            "SELECT conname FROM pg_constraint WHERE connamespace = current_schema()::regnamespace "
            "UNION SELECT relname FROM pg_class WHERE relkind = 'i' "
            "AND relnamespace = current_schema()::regnamespace"
        )
        names = {name for (name,) in cursor.fetchall()}
    for (app, model), described in sorted(state.models.items()):
        if app != "portal" or described.options.get("proxy") or described.options.get("managed") is False:
            continue
        table = described.options.get("db_table") or f"{app}_{model}"
        for name, field in described.fields.items():
            if field.many_to_many or getattr(field, "column", "") is None:
                continue
            column = field.db_column or (f"{name}_id" if field.remote_field else name)
            if (table, column) not in columns:
                return f"column {table}.{column}"
        rules = [*described.options.get("constraints", ()), *described.options.get("indexes", ())]
        for rule in rules:
            if rule.name not in names:
                return f"{rule.name} of {table}"
    return ""
