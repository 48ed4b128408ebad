"""The services' role uses tables and adds to histories; only the owner changes tables, nobody empties the trail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.conf import settings as django_settings
from django.db import DatabaseError, connection, transaction
from django.db.utils import ProgrammingError

from portal.database import roles
from portal.database.roles import (
    APPEND_ONLY_TABLES,
    SINGLE_ROLE_WARNING,
    grant_service_privileges,
    single_role_warning,
)
from portal.models import AuditEntry
from portal.services.jobs.submission import do_cancel_job
from tests import factories

pytestmark = pytest.mark.django_db

ROLE = "fairway_test_services"


@pytest.fixture
def two_roles(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The roles and rights that `manage.py migrate` leaves, in a transaction that is rolled back."""
    monkeypatch.setattr(django_settings, "DATABASE_OWNER", {"USER": connection.settings_dict["USER"]})
    named = connection.settings_dict | {"USER": ROLE, "PASSWORD": "only here"}
    monkeypatch.setattr(django_settings, "DATABASES", {"default": named})
    grant_service_privileges()
    grant_service_privileges()  # each migration does it again


@pytest.fixture
def as_services(two_roles: None) -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL ROLE {ROLE}")
        yield
        cursor.execute("RESET ROLE")


def rights(table: str) -> set[str]:
    words = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT word FROM unnest(%s::text[]) AS word WHERE has_table_privilege(%s, %s, word)",
            [list(words), ROLE, table],
        )
        return {row[0] for row in cursor.fetchall()}


def refused(statement: str) -> str:
    with pytest.raises(DatabaseError) as caught, transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statement)
    return str(caught.value)


def test_services_role_has_the_use_of_every_table_and_no_more(two_roles):
    use = {"SELECT", "INSERT", "UPDATE", "DELETE"}
    with connection.cursor() as cursor:
        tables = set(connection.introspection.table_names(cursor))
        for table in sorted(tables):
            expected = use
            if table in APPEND_ONLY_TABLES:
                expected = {"SELECT", "INSERT"}
            elif table == "django_migrations":
                expected = {"SELECT"}
            assert rights(table) == expected, table
        assert set(APPEND_ONLY_TABLES) <= tables
        cursor.execute(
            "SELECT rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls FROM pg_roles"
            " WHERE rolname = %s",
            [ROLE],
        )
        assert cursor.fetchone() == (False,)
        cursor.execute("SELECT has_schema_privilege(%s, 'public', 'CREATE')", [ROLE])
        assert cursor.fetchone() == (False,)
        cursor.execute("SELECT count(*) FROM pg_class WHERE pg_get_userbyid(relowner) = %s", [ROLE])
        assert cursor.fetchone() == (0,)


@pytest.mark.parametrize(
    "statement",
    [
        *(f"TRUNCATE {table} CASCADE" for table in APPEND_ONLY_TABLES),
        *(f"DELETE FROM {table}" for table in APPEND_ONLY_TABLES),
        "UPDATE portal_auditentry SET action = 'nothing'",
        "UPDATE portal_jobevent SET message = ''",
        "TRUNCATE portal_user CASCADE",
        "DROP TABLE portal_auditentry",
        "ALTER TABLE portal_auditentry DISABLE TRIGGER ALL",
        "DROP TRIGGER portal_audit_append_only ON portal_auditentry",
        "CREATE OR REPLACE FUNCTION portal_audit_append_only() RETURNS trigger LANGUAGE plpgsql"
        " AS 'BEGIN RETURN NEW; END'",
        "CREATE TABLE public.mine (id int)",
        "SET LOCAL session_replication_role = replica",
        "CREATE ROLE another",
        "DELETE FROM django_migrations",
        "COPY (SELECT 1) TO PROGRAM 'true'",
    ],
)
def test_services_role_cannot_touch_history_or_tables(as_services, statement):
    said = refused(statement)
    assert any(word in said for word in ("permission denied", "must be owner", "must be superuser")), said


def test_services_role_does_its_work(as_services):
    dataset = factories.basic_cluster()
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    do_cancel_job(factories.user(admin=True), job)
    dataset["owner"].memberships.all().delete()
    assert [entry.action for entry in AuditEntry.objects.all()] == ["job.cancel"]
    assert job.events.count() >= 2
    assert single_role_warning() == ""


@pytest.mark.parametrize("statement", ["TRUNCATE portal_auditentry", "TRUNCATE portal_auditentry CASCADE"])
def test_even_the_owner_cannot_delete_audit_entries(statement):
    AuditEntry.objects.create(actor_name="x", action="x", object_kind="user", object_id="1")
    assert "append-only" in refused(statement)
    assert AuditEntry.objects.count() == 1


def test_one_role_for_everything_is_warned_of_and_left_as_it_is(monkeypatch):
    assert single_role_warning() == SINGLE_ROLE_WARNING
    monkeypatch.setattr(django_settings, "DATABASE_OWNER", {})
    with roles.as_owner():
        grant_service_privileges()
    assert single_role_warning() == SINGLE_ROLE_WARNING


def test_password_of_the_services_role_follows_the_settings(two_roles):
    with connection.cursor() as cursor:
        cursor.execute("SELECT rolcanlogin, rolpassword FROM pg_authid WHERE rolname = %s", [ROLE])
        may_sign_in, first = cursor.fetchone()
        assert may_sign_in and first.startswith("SCRAM-SHA-256$")
        django_settings.DATABASES["default"]["PASSWORD"] = "another one"
        grant_service_privileges()
        cursor.execute("SELECT rolpassword FROM pg_authid WHERE rolname = %s", [ROLE])
        assert cursor.fetchone()[0] != first


def test_an_owner_without_role_privileges_gets_the_commands_to_run(monkeypatch):
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE fairway_test_owner")
        cursor.execute("SET LOCAL ROLE fairway_test_owner")
        monkeypatch.setattr(django_settings, "DATABASE_OWNER", {"USER": "fairway_test_owner"})
        named = connection.settings_dict | {"USER": ROLE, "PASSWORD": "only here"}
        monkeypatch.setattr(django_settings, "DATABASES", {"default": named})
        with pytest.raises(ProgrammingError, match=f'CREATE ROLE "{ROLE}" LOGIN'):
            grant_service_privileges()
        cursor.execute("RESET ROLE")


def test_connection_inside_as_owner_is_the_owners(monkeypatch):
    own = connection.settings_dict
    monkeypatch.setattr(django_settings, "DATABASE_OWNER", {"USER": "somebody", "HOST": own["HOST"]})
    closed: list[str] = []
    monkeypatch.setattr(connection, "close", lambda: closed.append(connection.settings_dict["USER"]))
    with roles.as_owner():
        assert connection.settings_dict["USER"] == "somebody"
        assert connection.settings_dict["NAME"] == own["NAME"]
    assert connection.settings_dict is own
    assert closed == [own["USER"], "somebody"]
