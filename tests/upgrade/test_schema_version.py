"""A database whose tables this version does not know is refused before anything is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection

from portal.database import schema_version
from portal.database.roles import as_owner
from portal.database.schema_version import UnknownSchemaError, check_schema
from portal.version import VERSION
from tests.process_environment import service_environment

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).parent.parent.parent
SERVICES = {
    "web": ("-m", "uvicorn", "portal.asgi:application", "--uds", "/nonexistent/web.sock"),
    "gateway": ("-m", "portal.gateway", "--port", "0"),
    "worker": ("-m", "celery", "-A", "scheduler.worker", "worker", "-Q", "cycle", "-P", "solo"),
    "collector": ("manage.py", "collect"),
}


def as_tables_owner(*statements: str) -> None:
    with as_owner(), connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


@pytest.fixture
def newer_database() -> Iterator[None]:
    as_tables_owner(
        "INSERT INTO django_migrations (app, name, applied) VALUES ('portal', '9999_later', now())"
    )
    yield
    as_tables_owner("DELETE FROM django_migrations WHERE name = '9999_later'")
    with as_owner():
        schema_version.write_version()


def leave_version(version: str, oldest: str) -> None:
    text = f"Fairway {version}, usable by {oldest} and newer"
    as_tables_owner(f"COMMENT ON TABLE django_migrations IS '{text}'")


def facts() -> list[object]:
    with as_owner(), connection.cursor() as cursor:
        cursor.execute("SELECT table_name, column_name FROM information_schema.columns ORDER BY 1, 2")
        columns = cursor.fetchall()
        cursor.execute(
            "SELECT app, name, obj_description('django_migrations'::regclass) FROM django_migrations"
        )
        return [columns, cursor.fetchall()]


def test_the_tables_of_this_version_are_accepted() -> None:
    check_schema()


@pytest.mark.usefixtures("newer_database")
@pytest.mark.parametrize("command", ["migrate", "prepare"])
def test_a_newer_database_is_refused(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRWAY_DATA_DIR", str(tmp_path / "data"))
    leave_version("9.0.0", "8.9.0")
    before = facts()
    with pytest.raises(
        CommandError, match=rf"migrated by Fairway 9\.0\.0 \(portal\.9999_later\), and this is {VERSION}"
    ):
        call_command(command)
    assert facts() == before
    assert not list((tmp_path / "data").rglob("*key*/*"))


@pytest.mark.usefixtures("newer_database")
def test_a_newer_database_that_allows_this_version_is_used_and_left_as_it_is() -> None:
    leave_version("0.2.0", VERSION)
    before = facts()
    call_command("migrate", verbosity=0)
    assert facts() == before


@pytest.mark.parametrize(
    ("change", "back", "what"),
    [
        (
            "ALTER TABLE portal_user RENAME language TO tongue",
            "ALTER TABLE portal_user RENAME tongue TO language",
            "column portal_user.language",
        ),
        (
            "ALTER TABLE portal_user RENAME CONSTRAINT user_uid_not_system TO other",
            "ALTER TABLE portal_user RENAME CONSTRAINT other TO user_uid_not_system",
            "user_uid_not_system of portal_user",
        ),
    ],
)
def test_a_development_database_is_refused(change: str, back: str, what: str) -> None:
    as_tables_owner(change)
    try:
        for act in (check_schema, lambda: call_command("migrate", verbosity=0)):
            with pytest.raises((UnknownSchemaError, CommandError), match=f"before 0.1.0 .{what} is missing"):
                act()
    finally:
        as_tables_owner(back)


def start(service: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *SERVICES[service]],
        cwd=ROOT,
        env=service_environment() | {"FAIRWAY_SECRET_KEY": os.environ["FAIRWAY_SECRET_KEY"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.usefixtures("newer_database")
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_does_not_start_on_a_newer_database(service: str) -> None:
    leave_version("9.0.0", "8.9.0")
    ended = start(service)
    assert ended.returncode
    assert f"migrated by Fairway 9.0.0 (portal.9999_later), and this is {VERSION}" in ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
