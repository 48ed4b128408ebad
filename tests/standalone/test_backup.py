"""Backup and restore, round trip, through the command line, on a PostgreSQL of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.keys import make_keys
from portal.standalone.account import service_account
from portal.standalone.backup import read_manifest
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError
from tests.process_environment import without_servers
from tests.standalone.data_folder_access import wrong_access

ROOT = Path(__file__).parent.parent.parent
MAKE_ROWS = """
from portal.models import AuditEntry, ClusterSettings, NodePool, Project
from portal.standalone.command_database import command_database
from portal.standalone.account import service_account
from portal.standalone.data_dir import DataDir
from portal.config import data_paths
from django.core.management import call_command
folder = DataDir(data_paths.data_dir(), service_account())
with command_database(folder, exclusive=True):
    call_command("migrate", verbosity=0)
    ClusterSettings.objects.update_or_create(id=1, defaults={"cluster_id": "kept2345ab"})
    NodePool.objects.create(name="a100")
    Project.objects.create(name="vision")
"""
READ_ROWS = """
import json
from portal.models import ClusterSettings, NodePool, Project
from portal.standalone.command_database import command_database
from portal.standalone.account import service_account
from portal.standalone.data_dir import DataDir
from portal.config import data_paths
with command_database(DataDir(data_paths.data_dir(), service_account()), exclusive=True):
    row = ClusterSettings.objects.get(id=1)
    print(json.dumps([row.cluster_id, row.recovery_mode, *NodePool.objects.values_list("name", flat=True),
        *Project.objects.values_list("name", flat=True)]))
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that the servers' account can pass through, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="fairway-backup-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


def manage(
    *arguments: str, data: Path, program: str | None = None, umask: int = -1, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in without_servers().items() if name != "FAIRWAY_SECRET_KEY"}
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env=environment | {"FAIRWAY_DATA_DIR": str(data)} | variables,
        input=program,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        umask=umask,
    )


@pytest.fixture(scope="module")
def backup(place: Path) -> Path:
    data = place / "first"
    folder = DataDir(data, service_account())
    folder.prepare()
    folder.ensure_secret_key()
    make_keys(folder.keys, "kept2345ab")
    made = manage("shell", "--verbosity", "0", data=data, program=MAKE_ROWS)
    assert made.returncode == 0, made.stderr
    file = place / "monday.fairway"
    done = manage("backup", str(file), data=data, umask=0o000)
    assert done.returncode == 0, done.stderr
    return file


def test_a_backup_is_private_and_complete(backup: Path) -> None:
    assert backup.stat().st_mode & 0o777 == 0o600
    with tarfile.open(backup) as tar:
        names = set(tar.getnames())
    assert {
        "manifest.json",
        "database.dump",
        "secret_key",
        "keys/control_ed25519",
        "keys/signing_ed25519.pub",
    } <= names


@pytest.mark.rig
def test_a_database_that_is_named_needs_no_folder_of_ours(place: Path) -> None:
    """As in a container: the data folder is a volume of another account, and no right reaches beyond the modes."""
    data = place / "volume"
    data.mkdir()
    os.chown(data, 1, -1)
    data.chmod(0o770)
    program = (
        "from pathlib import Path; from portal.standalone.command_database import command_database as b; "
        "from portal.standalone.data_dir import DataDir as F\n"
        f"with b(F(Path({str(data)!r}), None), exclusive=True): print('there')"
    )
    words = ["setpriv", "--bounding-set", "-fowner", sys.executable, "-c", program]
    said = {}
    for name, named in (("ours", {}), ("named", {"DATABASE_URL": "postgres://unused/unused"})):
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=without_servers() | named,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        said[name] = done.stdout + done.stderr
    assert "belongs to " in said["ours"] and said["named"] == "there\n"


def test_a_backup_overwrites_nothing(backup: Path, place: Path) -> None:
    before = backup.read_bytes()
    again = manage("backup", str(backup), data=place / "first")
    assert again.returncode != 0
    assert "never overwrites" in again.stderr
    assert backup.read_bytes() == before


def test_a_restored_database_equals_the_backup(backup: Path, place: Path) -> None:
    data = place / "second"
    done = manage("restore", str(backup), data=data, umask=0o022)
    assert done.returncode == 0, done.stderr
    assert wrong_access(data, service_account()) == []
    read = manage("shell", "--verbosity", "0", data=data, program=READ_ROWS)
    assert json.loads(read.stdout) == ["kept2345ab", True, "a100", "vision"], read.stderr
    for name, mode in {
        "secret_key": 0o400,
        "keys/control_ed25519": 0o600,
        "keys/control_ed25519.pub": 0o644,
    }.items():
        assert (data / name).read_bytes() == (place / "first" / name).read_bytes()
        assert (data / name).stat().st_mode & 0o777 == mode
    again = manage("restore", str(backup), data=data)
    assert again.returncode != 0
    assert "restore into an empty data folder" in again.stderr


def rewritten(backup: Path, target: Path, **changes: object) -> Path:
    """The same backup with changed bytes: `manifest` merges into the manifest, others replace a file."""
    with tarfile.open(backup) as old, tarfile.open(target, "w") as new:
        for member in old.getmembers():
            content = old.extractfile(member).read()  # type: ignore[union-attr]
            if member.name == "manifest.json":
                content = json.dumps(json.loads(content) | changes.get("manifest", {})).encode()  # type: ignore[operator]
            elif member.name in changes:
                content = changes[member.name]  # type: ignore[assignment]
            path = target.with_suffix(".part")
            path.write_bytes(content)
            new.add(path, member.name)
            path.unlink()
    return target


def test_a_file_that_does_not_fit_is_refused_with_a_reason(backup: Path, place: Path) -> None:
    text = place / "text"
    text.write_text("hello")
    files = {
        place / "missing": "no file",
        text: "not a readable backup",
        rewritten(backup, place / "newer", manifest={"migrations": ["portal.9999_later"]}): "does not have",
        rewritten(backup, place / "format", manifest={"format": 2}): "reads format 1",
        rewritten(backup, place / "damaged", secret_key=b"other"): "damaged",
    }
    for file, reason in files.items():
        with pytest.raises(StartError, match=reason):
            read_manifest(file)
    done = manage("restore", str(text), data=place / "third")
    assert done.returncode != 0 and "not a readable backup" in done.stderr
    done = manage("restore", str(backup), data=place / "third")
    assert done.returncode == 0, "a refused restore leaves the folder empty: " + done.stderr


def test_a_manifest_that_anyone_may_have_written_is_refused_with_a_sentence(
    backup: Path, place: Path
) -> None:
    values: dict[str, list[object]] = {
        "files": ["text", [1], None, {}, {"database.dump": 5}],
        "migrations": [[["portal"]], 5, None, ["portal.\x1b[31m"]],
        **{key: ["\x1b[2J"] for key in ("made_at", "cluster", "fairway")},
        "postgres_major": ["15"],
        "format": ["1"],
    }
    for name, value in [(name, value) for name, several in values.items() for value in several]:
        file = rewritten(backup, place / "manifest", manifest={name: value})
        with pytest.raises(StartError, match="is not a backup of Fairway"):
            read_manifest(file)


@pytest.mark.parametrize("name", ["manifest.json", "secret_key"])
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("target", ["itself", "/etc/passwd"])
def test_links_in_a_backup_are_not_followed(
    backup: Path, place: Path, name: str, kind: bytes, target: str
) -> None:
    link = tarfile.TarInfo(name)
    link.type, link.linkname = kind, name if target == "itself" else target
    file = place / "links"
    with tarfile.open(backup) as old, tarfile.open(file, "w") as new:
        for member in old.getmembers():
            if member.name == name:
                new.addfile(link)
            else:
                new.addfile(member, old.extractfile(member))
    with pytest.raises(StartError, match=r"is not a backup|lacks secret_key"):
        read_manifest(file)


@pytest.mark.parametrize("point", ["restore.folder_marked", "restore.loaded", "restore.wrote.secret_key"])
def test_up_refuses_what_a_killed_restore_left(backup: Path, place: Path, point: str) -> None:
    data = place / point
    killed = manage("restore", str(backup), data=data, FAIRWAY_KILL_AT=point)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    up = manage("up", "--port", str(free_port()), "--no-local-node", data=data)
    assert up.returncode == 1 and "Traceback" not in up.stderr, up.stderr
    assert "CommandError: A restore into th" in up.stderr and up.stderr.count("\n") == 1, up.stderr
    done = manage("restore", str(backup), data=data)
    assert done.returncode == 0, done.stderr
    read = manage("shell", "--verbosity", "0", data=data, program=READ_ROWS)
    assert json.loads(read.stdout) == ["kept2345ab", True, "a100", "vision"], read.stderr


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
