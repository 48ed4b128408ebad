"""Migrations of a release stay as they are, and later ones leave a database that the release before can use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import migrations, models
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation

from portal.database.new_tables import NewTables

ROOT = Path(__file__).parent.parent.parent
MIGRATIONS = ROOT / "portal" / "migrations"
RECORDED = ROOT / "tests" / "upgrade" / "recorded"
RELEASED = {
    name: digest
    for file in sorted(RECORDED.glob("*/migrations.json"))
    for name, digest in json.loads(file.read_text()).items()
}
EXPANDING = (
    migrations.AddIndex,
    migrations.AlterModelManagers,
    migrations.AlterModelOptions,
    migrations.CreateModel,
    migrations.RemoveConstraint,
    migrations.RemoveIndex,
)
"""Operations that older code does not notice. Indexes are added without CONCURRENTLY: tables are small."""
CONTRACTING: dict[tuple[str, int], str] = {
    ("0003_node_identity", 6): "its unique constraint is replaced by one for nodes that are not retired",
    ("0003_node_identity", 7): "only a default and a text of help are added",
    ("0003_node_identity", 8): "it allows more than the unique constraint before",
    ("0003_node_identity", 9): "it allows one more kind than the constraint before",
    ("0005_deletion_of_old_history", 0): "older code deletes no row of the three tables",
    ("0003_node_identity", 11): "the table is created in the same migration",
}
"""Other operations: (migration, position) to why the release before this one tolerates it."""


def changed(released: dict[str, str], folder: Path) -> list[str]:
    """Return the released migrations that are missing or differ from their release."""
    return [
        name
        for name, digest in released.items()
        if not (folder / name).exists() or hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest
    ]


def narrowing(operation: Operation) -> str:
    """Return why the release before may fail on a database after this operation, or blank."""
    if isinstance(operation, EXPANDING):
        return ""
    if isinstance(operation, migrations.AddField):
        field = operation.field
        if field.many_to_many or field.null or field.has_db_default():
            return ""
        return "rows of older code would lack the column: give it db_default or null=True"
    if isinstance(operation, migrations.SeparateDatabaseAndState):
        return next(filter(None, map(narrowing, operation.database_operations)), "")
    return f"{type(operation).__name__} may break older code"


def later_operations() -> Iterator[tuple[str, int, Operation]]:
    loader = MigrationLoader(None, ignore_no_migrations=True)
    for (app, name), migration in sorted(loader.disk_migrations.items()):
        if app == "portal" and f"{name}.py" not in RELEASED:
            for place, operation in enumerate(migration.operations):
                yield name, place, operation


def test_released_migrations_are_unchanged() -> None:
    assert len(RELEASED) >= 2
    assert not changed(RELEASED, MIGRATIONS), "add a migration instead: installations have applied these"


def test_an_edited_and_a_removed_migration_are_found(tmp_path: Path) -> None:
    first, second = list(RELEASED)[:2]
    (tmp_path / first).write_bytes((MIGRATIONS / first).read_bytes() + b"\n")
    assert changed(RELEASED, tmp_path)[:2] == [first, second]


def test_later_migrations_only_expand() -> None:
    found = {
        (name, place): why
        for name, place, operation in later_operations()
        if (why := narrowing(operation)) and (name, place) not in CONTRACTING
    }
    assert not found, "the release before must run on this database; see CONTRACTING"


def test_later_migrations_count_up() -> None:
    numbers = sorted(int(path.name[:4]) for path in MIGRATIONS.glob("[0-9]*.py"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_migrations_are_atomic() -> None:
    """A migration that is interrupted leaves nothing, so that it can be run again."""
    loader = MigrationLoader(None, ignore_no_migrations=True)
    found = [
        name for (app, name), each in loader.disk_migrations.items() if app == "portal" and not each.atomic
    ]
    assert not found
    assert NewTables.atomic


@pytest.mark.parametrize(
    ("operation", "allowed"),
    [
        (migrations.AddField("job", "a", models.IntegerField(db_default=0)), True),
        (migrations.AddField("job", "a", models.IntegerField(null=True)), True),
        (migrations.AddField("job", "a", models.IntegerField(default=0)), False),
        (migrations.RemoveField("job", "a"), False),
        (migrations.RenameField("job", "a", "b"), False),
        (migrations.AlterField("job", "a", models.CharField(max_length=1)), False),
        (migrations.AddConstraint("job", models.CheckConstraint(condition=models.Q(a=1), name="c")), False),
        (migrations.DeleteModel("job"), False),
        (migrations.RunSQL("DROP TABLE portal_job"), False),
        (migrations.SeparateDatabaseAndState([migrations.RemoveField("job", "a")]), False),
        (migrations.CreateModel("New", [("id", models.BigAutoField(primary_key=True))]), True),
    ],
    ids=lambda value: value.describe() if isinstance(value, Operation) else str(value),
)
def test_operations_that_older_code_tolerates(operation: Operation, allowed: bool) -> None:
    assert (narrowing(operation) == "") is allowed
