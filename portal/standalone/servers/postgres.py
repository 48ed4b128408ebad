"""Our own PostgreSQL: initialized once, reached over a unix socket only, with persistent data."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import sql

from agents.node.host.atomic_files import make_folder, write_atomic
from portal.config.data_paths import OWNER_ROLE, SERVICES_ROLE
from portal.standalone.account import set_owner
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError
from portal.standalone.processes.exec_child import exec_command
from portal.standalone.servers.binaries import PostgresBinaries, find_postgres
from portal.standalone.servers.server import Server, copy_programs_for_account

DATABASE = "fairway"
INITDB_TIMEOUT_S = 120
OLD_SERVER_TIMEOUT_S = 30


@dataclass(frozen=True)
class PostgresServer(Server):
    name = "postgres"
    title = "PostgreSQL"
    stop_signal = signal.SIGINT  # PostgreSQL's fast shutdown
    grace_s = 30.0
    ready_timeout_s = 60.0  # recovery after a crash may take a while
    not_ready = psycopg.OperationalError

    binaries: PostgresBinaries
    durable: bool = True

    @property
    def command(self) -> list[str]:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder.sockets),
            "unix_socket_permissions": "0700",
            "max_connections": "200",
            # not in /dev/shm, from which systemd removes the files of an account whose last session or unit ended
            "dynamic_shared_memory_type": "mmap",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "jit": "off",
            "log_line_prefix": "",
            "log_min_messages": "warning",
        }
        if not self.durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [self.binaries.program("postgres"), "-D", str(self.folder.postgres), "-p", "5432", *options]

    def connect(self, database: str = DATABASE) -> psycopg.Connection:
        return psycopg.connect(
            host=str(self.folder.sockets),
            user=OWNER_ROLE,
            dbname=database,
            connect_timeout=5,
            autocommit=True,
        )

    @property
    def from_wheel(self) -> bool:
        return self.binaries.from_wheel

    def check_ready(self) -> None:
        """Return when the server answers and has our database."""
        if not _is_ready(self.folder.postgres):  # a connection now would be logged as a fatal error
            raise self.not_ready("it is starting")
        with self.connect("postgres") as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE])
            if found.fetchone() is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))


def prepare_postgres(folder: DataDir, *, durable: bool = True) -> PostgresServer:
    """Return a startable server: programs that match the data, data initialized if missing."""
    version_file = folder.postgres / "PG_VERSION"
    existing = int(version_file.read_text()) if version_file.is_file() else None
    binaries = find_postgres(existing)
    if binaries.from_wheel and folder.account is not None:
        binaries = _copy_binaries(binaries, folder)
    if existing is None:
        _initialize_data(folder, binaries)
    _write_access_rules(folder)
    stop_stale_server(folder)
    return PostgresServer(folder, binaries, durable)


def _is_ready(data: Path) -> bool:
    """Return whether the server's pid file says, in its eighth line, that it accepts connections."""
    try:
        return (data / "postmaster.pid").read_text().splitlines()[7].strip() == "ready"
    except (FileNotFoundError, IndexError):
        return False


def stop_stale_server(folder: DataDir) -> None:
    """Stop a server that outlived its supervisor, and remove a stale pid file.

    A reused pid would otherwise keep PostgreSQL from starting for ever.
    """
    mark = folder.postgres / "postmaster.pid"
    try:
        pid = int(mark.read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return
    deadline = time.monotonic() + OLD_SERVER_TIMEOUT_S
    if not _is_postgres_of(pid, folder.postgres):
        mark.unlink(missing_ok=True)
        return
    os.kill(pid, signal.SIGINT)
    while _is_postgres_of(pid, folder.postgres):
        if time.monotonic() > deadline:
            raise StartError(
                f"A previous PostgreSQL (process {pid}) on {folder.postgres} does not stop; stop it first."
            )
        time.sleep(0.05)


def _is_postgres_of(pid: int, data: Path) -> bool:
    """Return whether that process is a PostgreSQL whose working directory is this data folder."""
    try:
        working = Path(f"/proc/{pid}/cwd").readlink()
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return False
    return working == data.resolve() and b"postgres" in program


def _initialize_data(folder: DataDir, binaries: PostgresBinaries) -> None:
    """Run initdb in a temporary folder and rename it: an incomplete database is never used."""
    making = folder.root / f"postgres.making-{os.getpid()}"
    shutil.rmtree(making, ignore_errors=True)
    make_folder(str(making), 0o700)
    set_owner(making, folder.account, 0o700)
    command = [binaries.program("initdb"), "-D", str(making), "-U", OWNER_ROLE, "--auth=peer"]
    command += ["--encoding=UTF8", "--no-locale", "--no-instructions", "--no-sync"]
    try:
        done = subprocess.run(
            exec_command(command, account=folder.account),
            cwd="/",
            capture_output=True,
            text=True,
            timeout=INITDB_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise StartError(f"PostgreSQL could not create its data folder: {_first_error(done.stderr)}.")
        making.rename(folder.postgres)
    except subprocess.TimeoutExpired:
        raise StartError(
            f"PostgreSQL took longer than {INITDB_TIMEOUT_S} s to create its data folder."
        ) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _first_error(output: str) -> str:
    """Return the first error in the output of initdb, without its prefix; the other lines follow from it."""
    lines = [line for line in output.splitlines() if re.search("error:|FATAL:", line)] or [output.strip()]
    return re.sub(r".*?(error|FATAL): +", "", lines[0])


def _write_access_rules(folder: DataDir) -> None:
    """Allow only our account, the servers' account and root to be the two roles, over the socket only."""
    users = {pwd.getpwuid(os.geteuid()).pw_name, folder.account or "", "root"} - {""}
    rules = {
        "pg_hba.conf": "local all all peer map=fairway\n",
        "pg_ident.conf": "".join(
            f"fairway {user} {role}\n" for user in sorted(users) for role in (OWNER_ROLE, SERVICES_ROLE)
        ),
    }
    for name, text in rules.items():
        path = folder.postgres / name
        write_atomic(str(path), text.encode(), sync=False)
        set_owner(path, folder.account, 0o600)


def _copy_binaries(binaries: PostgresBinaries, folder: DataDir) -> PostgresBinaries:
    package = binaries.folder.parent.parent
    libraries = package.with_name(f"{package.name}.libs")
    sources = {f"{package.name}/pginstall": package / "pginstall"}
    if libraries.is_dir():
        sources[libraries.name] = libraries
    copied = copy_programs_for_account(
        folder, f"postgresql-{binaries.major}", binaries.folder / "postgres", sources
    )
    return PostgresBinaries(copied / package.name / "pginstall" / "bin", binaries.major, from_wheel=True)
