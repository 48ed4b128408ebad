"""The services' role uses tables and adds to histories; only the owner changes tables, nobody empties the trail."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.apps import apps
from django.conf import settings as django_settings
from django.db import DatabaseError, connection, models, transaction
from django.db.utils import ProgrammingError

from portal.database import roles
from portal.database.roles import (
    APPEND_ONLY_TABLES,
    EXPIRING_TABLES,
    SINGLE_ROLE_WARNING,
    as_owner,
    grant_service_privileges,
    single_role_warning,
)
from portal.models import AuditEntry
from portal.services.jobs.submission import do_cancel_job
from tests import factories, table_owner

pytestmark = pytest.mark.django_db

ROOT = Path(__file__).parent.parent.parent
OTHER_ROLE = "fairway_test_other"
USE = {"SELECT", "INSERT", "UPDATE", "DELETE"}
ALLOWED_ON_TABLES = {
    **{table: {"SELECT", "INSERT"} for table in APPEND_ONLY_TABLES},
    **{table: {"SELECT", "INSERT", "DELETE"} for table in EXPIRING_TABLES},
    "django_migrations": {"SELECT"},
}
"""What the services may do with a table; ``USE`` for all others."""
ALLOWED_ON_SCHEMAS = {"public": {"USAGE"}, "mlflow": {"USAGE"}, table_owner.SCHEMA: {"USAGE"}}
PRIVILEGES = [*USE, "TRUNCATE", "REFERENCES", "TRIGGER"]
APPEND_ONLY_MODELS = [model for model in apps.get_models() if model._meta.db_table in APPEND_ONLY_TABLES]
WRITES = {"select_for_update", "update", "delete", "bulk_update", "update_or_create"}


def refused(statement: str) -> str:
    with pytest.raises(DatabaseError) as caught, transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statement)
    return str(caught.value)


def rows(statement: str, *parameters: object) -> list[tuple[object, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return list(cursor.fetchall())


def test_tests_connect_as_the_services_role() -> None:
    services, owner = django_settings.DATABASES["default"]["USER"], django_settings.DATABASE_OWNER["USER"]
    assert rows("SELECT session_user, current_user") == [(services, services)]
    assert services != owner
    assert "permission denied" in refused(f"SET ROLE {owner}")


def test_services_role_has_the_use_of_every_table_and_no_more() -> None:
    allowed: dict[str, set[str]] = {}
    privileges = rows(
        "SELECT tablename, word FROM pg_tables, unnest(%s::text[]) AS word WHERE schemaname = 'public'"
        " AND has_table_privilege(quote_ident(tablename), word)",
        PRIVILEGES,
    )
    for (table,) in rows("SELECT tablename::text FROM pg_tables WHERE schemaname = 'public'"):
        allowed[str(table)] = {str(word) for name, word in privileges if name == table}
    assert allowed == {table: ALLOWED_ON_TABLES.get(table, USE) for table in allowed}
    assert set(ALLOWED_ON_TABLES) <= set(allowed)
    assert {model._meta.db_table for model in apps.get_models() if model._meta.managed} <= set(allowed)


def test_services_role_has_no_privilege_on_single_columns_of_histories() -> None:
    """A privilege on one column would allow row locks, and with them changes of that column."""
    assert not rows(
        "SELECT table_name, column_name, privilege_type FROM information_schema.column_privileges"
        " WHERE table_schema = 'public' AND table_name = ANY(%s) AND privilege_type NOT IN ('SELECT', 'INSERT')"
        " AND grantee IN (current_user, 'PUBLIC')",
        list(APPEND_ONLY_TABLES),
    )


def test_services_role_has_the_use_of_sequences_and_schemas_and_no_attribute() -> None:
    assert rows(
        "SELECT DISTINCT has_sequence_privilege(oid, 'USAGE'), has_sequence_privilege(oid, 'SELECT'),"
        " has_sequence_privilege(oid, 'UPDATE') FROM pg_class"
        " WHERE relkind = 'S' AND relnamespace = 'public'::regnamespace"
    ) == [(True, True, False)]
    schemas = rows(
        "SELECT nspname::text, array(SELECT word FROM unnest(%s::text[]) AS word"
        " WHERE has_schema_privilege(oid, word)) FROM pg_namespace"
        " WHERE nspname NOT LIKE 'pg\\_%%' AND nspname <> 'information_schema'",
        ["USAGE", "CREATE"],
    )
    assert {name: set(words) for name, words in schemas} == ALLOWED_ON_SCHEMAS  # type: ignore[call-overload]
    assert rows(
        "SELECT rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls FROM pg_roles"
        " WHERE rolname = current_user"
    ) == [(False,)]
    assert rows(
        "SELECT relname FROM pg_class WHERE pg_get_userbyid(relowner) = current_user"
    ) == []  # fmt: skip
    assert rows(
        "SELECT proname FROM pg_proc WHERE prosecdef AND pronamespace <> %s::regnamespace", table_owner.SCHEMA
    ) == []  # fmt: skip


@pytest.mark.parametrize(
    "statement",
    [
        *(f"TRUNCATE {table} CASCADE" for table in APPEND_ONLY_TABLES),
        *(f"DELETE FROM {table}" for table in APPEND_ONLY_TABLES if table not in EXPIRING_TABLES),
        *(f"UPDATE {table} SET id = id" for table in APPEND_ONLY_TABLES),
        *(
            f"SELECT id FROM {table} FOR {strength}"
            for table in APPEND_ONLY_TABLES
            for strength in ("UPDATE", "NO KEY UPDATE", "SHARE", "KEY SHARE")
        ),
        "LOCK TABLE portal_quotachange IN SHARE MODE",
        "INSERT INTO portal_auditentry SELECT * FROM portal_auditentry ON CONFLICT (id) DO UPDATE SET action = ''",
        "MERGE INTO portal_quotachange AS old USING portal_quotachange AS new ON old.id = new.id"
        " WHEN MATCHED THEN DELETE",
        "DROP TRIGGER portal_jobevent_keep_recent ON portal_jobevent",
        "CREATE OR REPLACE FUNCTION portal_keep_recent_rows() RETURNS trigger LANGUAGE plpgsql"
        " AS 'BEGIN RETURN OLD; END'",
        "TRUNCATE portal_user CASCADE",
        "SELECT setval('portal_user_id_seq', 1)",
        "ALTER SEQUENCE portal_user_id_seq RESTART",
        "DROP TABLE portal_auditentry",
        "ALTER TABLE portal_auditentry DISABLE TRIGGER ALL",
        "DROP TRIGGER portal_audit_append_only ON portal_auditentry",
        "CREATE OR REPLACE FUNCTION portal_audit_append_only() RETURNS trigger LANGUAGE plpgsql"
        " AS 'BEGIN RETURN NEW; END'",
        "CREATE TRIGGER mine BEFORE INSERT ON portal_jobevent FOR EACH ROW"
        " EXECUTE FUNCTION portal_audit_append_only()",
        "CREATE INDEX mine ON portal_jobevent (id)",
        "CREATE TABLE public.mine (id int)",
        "CREATE TABLE mlflow.mine (id int)",
        "CREATE SCHEMA mine",
        "SET LOCAL session_replication_role = replica",
        "CREATE ROLE another",
        "DELETE FROM django_migrations",
        "COPY (SELECT 1) TO PROGRAM 'true'",
        "COPY portal_jobevent FROM '/etc/passwd'",
    ],
)
def test_services_role_cannot_touch_history_or_tables(statement: str) -> None:
    said = refused(statement)
    assert any(word in said for word in ("permission denied", "must be owner", "must be superuser")), said


@pytest.mark.parametrize(
    "statement",
    [
        *(
            f"INSERT INTO {table} SELECT * FROM {table} ON CONFLICT DO NOTHING"
            for table in APPEND_ONLY_TABLES
        ),
        "SELECT nextval('portal_user_id_seq')",
        "SELECT pg_advisory_xact_lock(1)",
        "SELECT id FROM portal_job FOR UPDATE SKIP LOCKED",
        "CREATE TEMPORARY TABLE mine (id int) ON COMMIT DROP",
        "ANALYZE portal_job",
    ],
)
def test_services_role_may_use_what_services_need(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


def test_no_service_locks_or_changes_rows_of_a_history() -> None:
    """Also where no test comes: by the name of the model, or of the relation that leads to it."""
    relations = {
        field.remote_field.related_name
        for model in APPEND_ONLY_MODELS
        for field in model._meta.get_fields()
        if isinstance(field, models.ForeignKey) and field.remote_field.related_name not in {None, "+"}
    }
    names = {model.__name__ for model in APPEND_ONLY_MODELS}
    assert {"changes", "events", "work"} <= relations
    mentioned = re.compile(rf"\b({'|'.join(names | relations)})\b")
    calls = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for folder in ("portal", "scheduler")
        for path in (ROOT / folder).rglob("*.py")
        if mentioned.search(text := path.read_text())
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in WRITES
        and is_history(call.func.value, names, relations)
        and not (call.func.attr == "delete" and path == ROOT / "scheduler" / "retention.py")
    ]
    assert calls == []


def is_history(receiver: ast.expr, models_by_name: set[str], relations: set[str]) -> bool:
    """Whether a chain of calls begins with such a model, or goes through such a relation."""
    while isinstance(receiver, ast.Call | ast.Attribute):
        if isinstance(receiver, ast.Attribute) and receiver.attr in relations:
            return True
        receiver = receiver.func if isinstance(receiver, ast.Call) else receiver.value
    return isinstance(receiver, ast.Name) and receiver.id in models_by_name


def test_services_role_does_its_work() -> None:
    dataset = factories.basic_cluster()
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    do_cancel_job(factories.user(admin=True), job)
    dataset["owner"].memberships.all().delete()
    assert [entry.action for entry in AuditEntry.objects.all()] == ["job.cancel"]
    assert job.events.count() >= 2
    assert single_role_warning() == ""


@pytest.mark.parametrize(
    "statement",
    [
        "TRUNCATE portal_auditentry",
        "TRUNCATE portal_auditentry CASCADE",
        "UPDATE portal_auditentry SET reason = 'changed'",
        "DELETE FROM portal_auditentry",
    ],
)
def test_even_the_owner_cannot_change_or_delete_audit_entries(statement: str) -> None:
    AuditEntry.objects.create(actor_name="x", action="x", object_kind="user", object_id="1")
    with pytest.raises(DatabaseError, match=r"append-only|kept for 400 days"), transaction.atomic():
        table_owner.execute_as_owner(statement)
    assert AuditEntry.objects.count() == 1


@pytest.fixture
def owner(transactional_db: None) -> Iterator[None]:
    """The connection is the owner's, in a transaction that is rolled back."""
    with as_owner(), transaction.atomic():
        yield
        transaction.set_rollback(True)


@pytest.fixture
def other_role(owner: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The settings name another role for the services, which does not exist."""
    named = connection.settings_dict | {"USER": OTHER_ROLE, "PASSWORD": "only here"}
    monkeypatch.setattr(django_settings, "DATABASES", {"default": named})
    return OTHER_ROLE


def test_a_new_table_is_granted_by_the_migration_that_adds_it(owner: None) -> None:
    services = connection.settings_dict | django_settings.DATABASES["default"]
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE later (id bigserial)")
    question = (
        "SELECT has_table_privilege(%s, 'later', 'SELECT'),"
        " has_sequence_privilege(%s, 'later_id_seq', 'USAGE')"
    )
    assert rows(question, services["USER"], services["USER"]) == [(False, False)]
    grant_service_privileges()
    assert rows(question, services["USER"], services["USER"]) == [(True, True)]


def test_one_role_for_everything_is_warned_of_and_left_as_it_is(
    owner: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert single_role_warning() == SINGLE_ROLE_WARNING
    monkeypatch.setattr(django_settings, "DATABASE_OWNER", {})
    with roles.as_owner():
        grant_service_privileges()
    assert single_role_warning() == SINGLE_ROLE_WARNING


def test_password_of_the_services_role_follows_the_settings(other_role: str) -> None:
    grant_service_privileges()
    grant_service_privileges()  # each migration does it again
    password = "SELECT rolcanlogin, rolpassword FROM pg_authid WHERE rolname = %s"
    ((may_sign_in, first),) = rows(password, other_role)
    assert may_sign_in and str(first).startswith("SCRAM-SHA-256$")
    django_settings.DATABASES["default"]["PASSWORD"] = "another one"
    grant_service_privileges()
    assert rows(password, other_role)[0][1] != first


def test_an_owner_without_role_privileges_gets_the_commands_to_run(
    other_role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE fairway_test_owner")
        cursor.execute("SET LOCAL ROLE fairway_test_owner")
        monkeypatch.setattr(django_settings, "DATABASE_OWNER", {"USER": "fairway_test_owner"})
        with pytest.raises(ProgrammingError, match=f'CREATE ROLE "{other_role}" LOGIN'):
            grant_service_privileges()
        cursor.execute("RESET ROLE")


def test_connection_inside_as_owner_is_the_owners(transactional_db: None) -> None:
    services = connection.settings_dict
    question = "SELECT session_user, current_database()"
    with roles.as_owner():
        assert rows(question) == [(django_settings.DATABASE_OWNER["USER"], services["NAME"])]
    assert connection.settings_dict is services
    assert rows(question) == [(services["USER"], services["NAME"])]
