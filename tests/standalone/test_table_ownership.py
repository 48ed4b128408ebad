"""The owner of tables that earlier tracking servers created, and what `prepare` says is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.standalone.postgres_servers import (
    OWNER,
    ROOT,
    SERVICES,
    OwnPostgres,
    own_postgres,
    versions,
)

FOREIGN = (
    "SELECT count(*) FROM pg_class WHERE relnamespace IN ('public'::regnamespace, 'mlflow'::regnamespace)"
    f" AND relkind IN ('r', 'S') AND pg_get_userbyid(relowner) <> '{OWNER}'"
)


@pytest.fixture(scope="module", params=versions())
def server(request: pytest.FixtureRequest) -> Iterator[OwnPostgres]:
    """With the prepared database `first`; others are copies of it."""
    with own_postgres(request.param) as server:
        server.create_roles()
        server.create_database("first")
        prepared = server.manage("prepare", database="first", data=server.folder / "first")
        assert prepared.returncode == 0, prepared.stderr
        yield server


@pytest.fixture
def data(server: OwnPostgres) -> Iterator[Path]:
    """A data folder with the keys of the database `first` and its copies."""
    folder = Path(tempfile.mkdtemp(prefix="fairway-ownership-"))
    shutil.copytree(server.folder / "first" / "keys", folder / "keys")
    shutil.copy2(server.folder / "first" / "secret_key", folder)
    yield folder
    shutil.rmtree(folder)


def as_the_tracking_server_left_it(server: OwnPostgres, name: str) -> None:
    """A copy of the database in which MLflow's tables, and what else may be, belong to the services' role."""
    server.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    server.execute(f'CREATE DATABASE {name} TEMPLATE first OWNER "{OWNER}"')
    server.execute(f'GRANT CREATE ON SCHEMA mlflow TO "{SERVICES}"', database=name)
    tables = server.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'mlflow'", database=name)
    assert len(tables) > 60
    for (table,) in tables:
        server.execute(f'ALTER TABLE mlflow."{table}" OWNER TO "{SERVICES}"', database=name)


def members(server: OwnPostgres) -> list[tuple[object, ...]]:
    """Who has the rights of the services' role, by membership."""
    return server.execute(
        "SELECT DISTINCT member::regrole::text FROM pg_auth_members WHERE roleid = %s::regrole"
        " AND pg_has_role(member, roleid, 'USAGE') AND NOT (SELECT rolsuper FROM pg_roles WHERE oid = member)",
        f'"{SERVICES}"',
    )


def test_tables_of_the_services_role_are_taken_over_by_migrate(server: OwnPostgres, data: Path) -> None:
    as_the_tracking_server_left_it(server, "old")
    assert server.execute(FOREIGN, database="old")[0][0] > 60
    done = server.manage("backup", str(data / "before.tar"), database="old", data=data)
    assert done.returncode == 1 and "may not read" in done.stderr and "Traceback" not in done.stderr, (
        done.stderr
    )
    done = server.manage("migrate", database="old", data=data)
    assert done.returncode == 0, done.stderr
    assert server.execute(FOREIGN, database="old") == [(0,)]
    assert members(server) == []
    for statement in (
        "INSERT INTO mlflow.experiments (name, lifecycle_stage) VALUES ('used', 'active')",
        "DELETE FROM mlflow.experiments WHERE name = 'used'",
    ):
        server.execute(statement, database="old", role=SERVICES)
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for schema mlflow"):
        server.execute("CREATE TABLE mlflow.mine (id int)", database="old", role=SERVICES)
    done = server.manage("backup", str(data / "after.tar"), database="old", data=data)
    assert done.returncode == 0, done.stderr
    again = server.manage("migrate", database="old", data=data)
    assert again.returncode == 0, again.stderr


def test_running_processes_keep_the_use_of_tables_that_are_taken_over(
    server: OwnPostgres, data: Path
) -> None:
    """A tracking server of the earlier version holds a lock for a while, and goes on afterwards."""
    as_the_tracking_server_left_it(server, "busy")
    with psycopg.connect(
        host="127.0.0.1", port=server.port, user=SERVICES, password="only-here", dbname="busy"
    ) as tracking:
        tracking.execute("SELECT count(*) FROM mlflow.runs")
        threading.Timer(8, tracking.commit).start()
        done = server.manage("migrate", database="busy", data=data)
        assert done.returncode == 0, done.stderr
        assert tracking.execute("SELECT count(*) FROM mlflow.runs").fetchone() == (0,)
    assert server.execute(FOREIGN, database="busy") == [(0,)]


def test_an_owner_that_may_not_take_tables_over_gets_the_sql(server: OwnPostgres, data: Path) -> None:
    """The services' role was created by a superuser, and the owner has no CREATEROLE, or is not its administrator."""
    as_the_tracking_server_left_it(server, "strict")
    server.execute(f'ALTER ROLE "{OWNER}" NOCREATEROLE')
    server.execute(f'REVOKE "{SERVICES}" FROM "{OWNER}"')
    try:
        done = server.manage("prepare", database="strict", data=data)
        sql = f'REASSIGN OWNED BY "{SERVICES}" TO "{OWNER}";'
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert sql in done.stderr and done.stderr.count("\n") == 1, done.stderr
        server.execute(sql, database="strict")
        done = server.manage("prepare", database="strict", data=data)
        assert done.returncode == 0, done.stderr
        assert server.execute(FOREIGN, database="strict") == [(0,)]
    finally:
        server.execute(f'ALTER ROLE "{OWNER}" CREATEROLE')
        if server.binaries.major >= 16:  # as after it created the role
            options = "ADMIN TRUE, INHERIT FALSE, SET FALSE"
            server.execute(f'GRANT "{SERVICES}" TO "{OWNER}" WITH {options}')


def test_prepare_says_what_backup_and_restore_will_miss(server: OwnPostgres, data: Path) -> None:
    as_the_tracking_server_left_it(server, "told")
    server.execute("CREATE TABLE public.visitors (id int)", database="told")
    done = server.manage("prepare", database="told", data=data)
    assert done.returncode == 1, done.stderr
    assert 'The table public.visitors belongs to the role "postgres"' in done.stderr
    assert 'REASSIGN OWNED BY "postgres"' not in done.stderr, "that would fail: it owns the system's tables"
    assert sorted(path.name for path in data.iterdir()) == ["keys", "logs", "run", "secret_key"]
    server.execute("DROP TABLE public.visitors", database="told")
    server.execute("ALTER DATABASE told OWNER TO postgres")
    server.execute(f'GRANT CREATE ON SCHEMA public TO "{OWNER}"', database="told")
    without_tools = {"FAIRWAY_SERVERS": "wheel"} if server.binaries.major == 15 else {}
    done = server.manage("prepare", database="told", data=data, **without_tools)
    assert done.returncode == 0, done.stderr
    assert f'Backup and restore: The role "{OWNER}" may not create schemas in the database' in done.stderr
    if without_tools:
        assert "install version 15 (Debian: apt-get install postgresql-client-15)" in done.stderr


def test_the_tracking_server_refuses_tables_that_it_cannot_use(server: OwnPostgres, data: Path) -> None:
    """It creates none, and waits for no restore: the supervisor starts it again."""

    def refusal(database: str) -> str:
        environment = server.environment(database, data) | {"FAIRWAY_TRACKING_SOCKET": str(data / "socket")}
        command = [sys.executable, "-m", "portal.tracking.server"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        return done.stderr

    server.create_database("without_tables")
    assert refusal("without_tables").startswith("MLflow's tables are missing; the installed MLflow needs ")
    server.execute("CREATE SCHEMA fairway_restore", database="without_tables")
    assert refusal("without_tables").startswith("A restore into this database is running or was interrupted")
    as_the_tracking_server_left_it(server, "newer")
    server.execute("UPDATE mlflow.alembic_version SET version_num = 'from_later'", database="newer")
    assert refusal("newer").startswith("MLflow's tables have the revision from_later")
    done = server.manage("migrate", database="newer", data=data)
    assert "MLflow's tables were written by a newer MLflow (revision from_later)" in done.stderr, done.stderr


def test_a_separate_database_for_mlflow_is_left_to_the_tracking_server(
    server: OwnPostgres, data: Path
) -> None:
    server.create_database("portal_only")
    server.create_database("experiments")
    address = server.environment("experiments", data)["DATABASE_OWNER_URL"]
    separate = {"FAIRWAY_TRACKING_DATABASE_URL": address}
    done = server.manage("migrate", database="portal_only", data=data, **separate)
    assert done.returncode == 0, done.stderr
    assert server.execute("SELECT to_regclass('mlflow.experiments')", database="portal_only") == [(None,)]
    socket = data / "tracking.sock"
    environment = (
        server.environment("portal_only", data) | {"FAIRWAY_TRACKING_SOCKET": str(socket)} | separate
    )
    command = [sys.executable, "-m", "portal.tracking.server"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as tracking:
        deadline = time.monotonic() + 120
        while not socket.exists():
            assert tracking.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        tracking.terminate()
    assert server.execute("SELECT count(*) FROM mlflow.experiments", database="experiments") != []


def test_a_function_of_the_services_role_gets_no_rights_of_the_owner(server: OwnPostgres, data: Path) -> None:
    """In a database that was upgraded from PostgreSQL 14: `public` belongs to a superuser, and all may create."""
    server.execute("DROP DATABASE IF EXISTS upgraded WITH (FORCE)")
    server.execute(f'CREATE DATABASE upgraded TEMPLATE first OWNER "{OWNER}"')
    server.execute("ALTER SCHEMA public OWNER TO postgres", database="upgraded")
    server.execute("GRANT CREATE ON SCHEMA public TO PUBLIC", database="upgraded")
    warned = server.manage("prepare", database="upgraded", data=data)
    assert "REVOKE CREATE ON SCHEMA public FROM PUBLIC;" in warned.stderr, warned.stderr
    body = "LANGUAGE plpgsql SECURITY DEFINER AS 'BEGIN EXECUTE $1; END'"
    server.execute(
        f"CREATE FUNCTION public.act(text) RETURNS void {body}", database="upgraded", role=SERVICES
    )
    file = data / "with-function.tar"
    refused = server.manage("backup", str(file), database="upgraded", data=data)
    assert 'act(text) belongs to the role "portal-services"' in refused.stderr, refused.stderr
    assert refused.returncode and not file.exists()
    # as in a backup that an earlier version made
    server.execute(f'ALTER FUNCTION public.act(text) OWNER TO "{OWNER}"', database="upgraded")
    done = server.manage("backup", str(file), database="upgraded", data=data)
    assert done.returncode == 0, done.stderr
    server.create_database("restored")
    done = server.manage("restore", str(file), database="restored", data=data / "restored")
    assert done.returncode == 0, done.stderr
    assert "act(text) runs with the rights of its caller now" in done.stdout
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        server.execute("SELECT public.act('TRUNCATE portal_auditentry')", database="restored", role=SERVICES)


def test_large_objects_of_the_services_role_do_not_stop_a_backup(server: OwnPostgres, data: Path) -> None:
    server.execute("SELECT lo_create(0)", database="first", role=SERVICES)
    done = server.manage("backup", str(data / "first.tar"), database="first", data=data)
    assert done.returncode == 0, done.stderr
