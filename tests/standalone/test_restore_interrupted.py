"""kill -9 and full disks at every step of backup and restore: all or nothing, and nobody uses what is incomplete."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from portal.standalone.backup import read_manifest
from portal.standalone.restores.restore import LOCK
from tests.standalone.postgres_servers import (
    OWNER,
    PASSWORD,
    ROOT,
    OwnPostgres,
    leftovers,
    own_postgres,
    versions,
)

SOURCES = [
    ROOT / "portal/standalone" / name
    for name in ("backup.py", "restores/restore.py", "restores/leftovers.py")
]
WRITTEN = ("secret_key", "keys/control_ed25519", "keys/signing_ed25519.pub")
"""Files after which a restore is killed; it is killed after each in the same way."""
REMOVAL = ("restore.files_removed", "restore.database_emptied")
COMPLETE = ("restore.committed", "restore.done")
MIB = 1024 * 1024
ROWS = 16_000

RUN = """
import io, json, os, signal, sys, traceback
from contextlib import redirect_stderr, redirect_stdout
from django.core.management import CommandError, call_command
from django.db import connection, connections

def in_child(action):
    '''The end of a child: its signal, or what it said.'''
    connections.close_all()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            out = io.StringIO()
            with redirect_stdout(out):
                action()
            said = "done: " + out.getvalue()
        except CommandError as refused:
            said = "refused: " + str(refused)
        except BaseException:
            said = traceback.format_exc()
        os.write(write, said.encode()[-4000:])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return "killed" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else said

def killed_at(point, *command):
    def action():
        os.environ["FAIRWAY_KILL_AT"] = point
        call_command(*command)
    return in_child(action)

def killed_after(count, *command):
    def action():
        left = [count]
        def run(execute, *arguments):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return execute(*arguments)
        connection.execute_wrappers.append(run)
        call_command(*command)
    return in_child(action)

def query():
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")

results = []
"""
SWEEP = """
for point in {points!r}:
    end = killed_at(point, "restore", {file!r})
    results.append([point, end, in_child(lambda: call_command("prepare")), in_child(query)])
print(json.dumps(results))
"""
STATEMENTS = """
for count in range({first}, 10_000, {step}):
    end = killed_after(count, "restore", {file!r})
    results.append([count, end])
    if end != "killed":
        break
print(json.dumps(results))
"""
BACKUPS = """
for point in {points!r}:
    results.append([point, killed_at(point, "backup", {folder!r} + "/" + point)])
print(json.dumps(results))
"""


def failpoints(prefix: str) -> list[str]:
    """The names in the sources; those with a variable part for some values of it."""
    found = [name for path in SOURCES for name in re.findall(r'failpoint\(f?"([^"]+)"\)', path.read_text())]
    names = [name.replace("{name}", value) for name in found for value in WRITTEN]
    return [name for name in dict.fromkeys(names) if name.startswith(prefix)]


class Place:
    """A prepared installation with a backup of 3 MiB, on a server of its own."""

    def __init__(self, server: OwnPostgres, folder: Path) -> None:
        self.server, self.folder, self.file = server, folder, folder / "monday.tar"
        server.create_roles()
        server.create_database("first")
        prepared = server.manage("prepare", database="first", data=folder / "first")
        assert prepared.returncode == 0, prepared.stderr
        server.execute(
            "INSERT INTO portal_auditentry (at, actor_name, action, object_kind, object_id, object_name, reason)"
            " SELECT now(), 'x', 'x', 'x', 'x', 'x', (SELECT string_agg(md5(random()::text), '')"
            f" FROM generate_series(1, 15) WHERE n > 0) FROM generate_series(1, {ROWS}) AS n",
            database="first",
        )
        done = self.backup(self.file)
        assert done.returncode == 0, done.stderr
        assert self.file.stat().st_size > 3 * MIB

    def backup(self, target: Path) -> subprocess.CompletedProcess[str]:
        return self.server.manage("backup", str(target), database="first", data=self.folder / "first")

    def results(self, program: str, database: str, data: Path) -> list[list[str]]:
        done = self.server.manage(
            "shell", "--verbosity", "0", database=database, data=data, program=RUN + program
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def restored(self, database: str, data: Path) -> bool:
        """Whether a database and a data folder are those of the backup, in recovery mode."""
        question = (
            "SELECT recovery_mode, (SELECT count(*) FROM portal_auditentry WHERE action = 'x'),"
            " to_regnamespace('fairway_restore') IS NULL FROM portal_clustersettings"
        )
        assert self.server.execute(question, database=database) == [(True, ROWS, True)]
        names = ("secret_key", "keys/control_ed25519", "keys/tunnel_ed25519.pub")
        first = self.folder / "first"
        assert [(data / name).read_bytes() for name in names] == [
            (first / name).read_bytes() for name in names
        ]
        return not (data / "run/restore.json").exists()


@pytest.fixture(scope="module", params=versions(every_run=slice(1)))
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="fairway-interrupted-"))
    folder.chmod(0o711)  # a server on a small disk passes through
    with own_postgres(request.param) as server:
        yield Place(server, folder)
    shutil.rmtree(folder)


def test_a_restore_that_is_killed_at_any_step_is_refused_by_others_and_removed_by_the_next(
    place: Place,
) -> None:
    place.server.create_database("killed")
    data = place.folder / "killed"
    points = [point for point in failpoints("restore.") if point not in COMPLETE]
    assert len(points) >= 11
    order = [point for point in points if point not in REMOVAL]
    order += ["restore.wrote.secret_key", *REMOVAL]  # the removal of what the one before left is killed, too
    for point, end, prepared, queried in place.results(
        SWEEP.format(points=order, file=str(place.file)), "killed", data
    ):
        assert end == "killed", (point, end)
        assert prepared.startswith("refused: A restore into"), (point, prepared)
        assert point in ("restore.folder_marked", "restore.database_emptied") or (
            "A restore into this database is running or was interrupted" in queried
        ), (point, queried)
    done = place.server.manage("restore", str(place.file), database="killed", data=data)
    assert done.returncode == 0, done.stderr
    assert place.restored("killed", data)


@pytest.mark.parametrize("point", COMPLETE)
def test_a_restore_that_is_killed_after_its_last_transaction_is_complete(place: Place, point: str) -> None:
    place.server.create_database("complete")
    data = place.folder / point
    ((_, end, prepared, queried),) = place.results(
        SWEEP.format(points=[point], file=str(place.file)), "complete", data
    )
    assert (end, queried) == ("killed", "done: ") and prepared.startswith("done"), (end, queried, prepared)
    again = place.server.manage("restore", str(place.file), database="complete", data=data)
    assert again.returncode == 1
    assert "was complete" in again.stderr or "restore into an empty data folder" in again.stderr
    assert place.restored("complete", data)


def test_a_restore_that_is_killed_after_any_statement_is_removed_by_the_next(place: Place) -> None:
    place.server.create_database("statements")
    data = place.folder / "statements"
    results = place.results(STATEMENTS.format(first=9, step=13, file=str(place.file)), "statements", data)
    assert len(results) > 8, results
    # the last one was complete, or the one before: it was killed after its last transaction
    assert re.match("done: |refused: .* restore into an empty data folder", results[-1][1]), results[-1]
    assert place.restored("statements", data)


def test_two_restores_at_once_are_refused(place: Place) -> None:
    place.server.create_database("twice")
    with psycopg.connect(
        host="127.0.0.1", port=place.server.port, user=OWNER, password=PASSWORD, dbname="twice"
    ) as other:
        other.execute("SELECT pg_advisory_lock(%s)", [LOCK])
        done = place.server.manage("restore", str(place.file), database="twice", data=place.folder / "twice")
    assert "Another restore into this database is running." in done.stderr
    assert leftovers(place.server, "twice", place.folder / "twice") == []


def test_a_backup_that_is_killed_at_any_step_leaves_a_whole_file_or_none(place: Place) -> None:
    folder = place.folder / "backups"
    folder.mkdir()
    points = failpoints("backup.")
    assert len(points) == 4
    results = place.results(
        BACKUPS.format(points=points, folder=str(folder)), "first", place.folder / "first"
    )
    assert [end for _, end in results] == ["killed"] * len(points), results
    whole = [path.name for path in folder.glob("backup.*")]
    assert whole == ["backup.linked"]
    read_manifest(folder / "backup.linked")
    assert len(list(folder.glob(".fairway-backup-*"))) == 1, "each removes what the one before had left"
    done = place.backup(folder / "last")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["backup.linked", "last"]


@contextlib.contextmanager
def small_disk(folder: Path, mib: float) -> Iterator[Path]:
    """A disk of its own, which can be full and can grow. Skip where we may not mount."""
    folder.mkdir(mode=0o711)
    size = f"size={int(mib * 1024)}k,mode=711"
    words = ["mount", "-t", "tmpfs", "-o", size, "fairway-small", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_leaves_no_part_of_a_backup(place: Place) -> None:
    with small_disk(place.folder / "small-backups", 2) as disk:
        done = place.backup(disk / "tuesday.tar")
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert f"{disk / 'tuesday.tar'} cannot be written: No space left on device." in done.stderr
        assert list(disk.iterdir()) == []


def test_a_full_data_folder_leaves_nothing_of_a_restore(place: Place) -> None:
    place.server.create_database("full-folder")
    with small_disk(place.folder / "small-data", 0.0625) as disk:
        data = disk / "data"
        for size in (1024, 4096):  # the mark fits, or not even that
            (disk / "other").unlink(missing_ok=True)
            with contextlib.suppress(OSError), (disk / "other").open("wb") as other:
                while True:
                    other.write(b"x" * size)
                    other.flush()
            done = place.server.manage("restore", str(place.file), database="full-folder", data=data)
            assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
            assert "No space left on device" in done.stderr
            assert leftovers(place.server, "full-folder", data) == []
        (disk / "other").unlink()
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        done = place.server.manage("restore", str(place.file), database="full-folder", data=data)
        assert done.returncode == 0, done.stderr
        assert place.restored("full-folder", data)


def test_a_full_disk_of_the_database_server_leaves_nothing_of_a_restore(place: Place) -> None:
    """Whether the server refuses a statement or ends because it cannot write its log."""
    data = place.folder / "full-server"
    with (
        small_disk(place.folder / "small-server", 600) as disk,
        own_postgres(place.server.binaries.major, disk) as small,
    ):
        small.create_roles()
        small.create_database("full")
        for spare in (1, 4, 9):
            used = -(-shutil.disk_usage(disk).used // MIB)
            subprocess.run(["mount", "-o", f"remount,size={used + spare}m", str(disk)], check=True)
            done = small.manage("restore", str(place.file), database="full", data=data)
            assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
            subprocess.run(["mount", "-o", "remount,size=600m", str(disk)], check=True)
            small.stop()
            small.start()
            marked = small.execute("SELECT to_regnamespace('fairway_restore') IS NOT NULL", database="full")
            assert marked == [(True,)] or leftovers(small, "full", data) == []
        done = small.manage("restore", str(place.file), database="full", data=data)
        assert done.returncode == 0, done.stderr
