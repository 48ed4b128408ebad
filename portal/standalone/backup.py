"""Backup and restore of database, keys known to nodes, and secret key."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.core.management import call_command
from django.db import DatabaseError, connection, connections, transaction
from django.db.migrations.loader import MigrationLoader

from agents.keys import PURPOSES, key_path
from agents.node.host.atomic_files import write_atomic
from portal.database.roles import as_owner
from portal.models import ClusterSettings
from portal.services.cluster.recovery import begin_recovery
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError
from portal.standalone.servers.binaries import POSTGRES_VERSIONS, find_postgres

FORMAT = 1
MANIFEST = "manifest.json"
DUMP = "database.dump"
SECRET_KEY_FILE = "secret_key"  # noqa: S105  (a file's name)
DUMP_TIMEOUT_S = 3_600
MAX_SMALL_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Manifest:
    """Contents of a backup. `files` maps each name to the SHA-256 of its bytes."""

    format: int
    fairway: str
    made_at: str
    cluster: str
    postgres_major: int
    migrations: list[str]
    files: dict[str, str]


def check_target(target: Path) -> None:
    """Raise StartError where no backup can be written."""
    if target.exists():
        raise StartError(f"{target} exists; a backup never overwrites a file.")
    if not target.parent.is_dir():
        raise StartError(f"There is no folder {target.parent}.")


def write_backup(target: Path, folder: DataDir) -> Manifest:
    """Write the backup to a temporary file and rename it; mode 600, never overwriting a file."""
    check_target(target)
    try:
        return _write_backup(target, folder)
    except OSError as trouble:  # such as a full disk, or one without hard links
        raise StartError(f"{target} cannot be written: {trouble.strerror}.") from trouble


def _write_backup(target: Path, folder: DataDir) -> Manifest:
    with tempfile.TemporaryDirectory(prefix=".backup-", dir=target.parent) as space:
        dump = Path(space) / DUMP
        with as_owner():
            try:
                major, cluster, migrations = _describe_database()
            except DatabaseError as trouble:
                raise StartError(f"The database cannot be read: {trouble}") from trouble
            _postgres_tool(
                "pg_dump", major, "--format=custom", "--no-owner", "--no-privileges", "--file", str(dump)
            )
        small = _small_files(folder)
        files = {DUMP: _sha256(dump)} | {n: hashlib.sha256(c).hexdigest() for n, c in small.items()}
        manifest = Manifest(
            FORMAT,
            _fairway_version(),
            time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            cluster,
            major,
            migrations,
            files,
        )
        whole = Path(space) / "whole"
        with os.fdopen(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            with tarfile.open(fileobj=out, mode="w") as tar:
                _add(tar, MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
                for name, content in small.items():
                    _add(tar, name, content)
                tar.add(dump, DUMP, recursive=False, filter=_anonymous)
            out.flush()
            os.fsync(out.fileno())
        try:
            target.hardlink_to(whole)
        except FileExistsError:
            raise StartError(
                f"{target} was created in the meantime; a backup never overwrites a file."
            ) from None
    return manifest


def read_manifest(source: Path, folder: DataDir) -> Manifest:
    """Check that a backup is complete and fits this version and an empty data folder; return its manifest."""
    with _open_archive(source) as tar:
        manifest = _load_manifest(tar, source)
        for name, wanted in manifest.files.items():
            file = _member(tar, name)
            if hashlib.file_digest(file, "sha256").hexdigest() != wanted:  # type: ignore[arg-type]
                raise StartError(f"{name} in {source} is damaged: its checksum differs.")
    taken = [path for path in _secret_paths(folder).values() if path.exists()]
    if taken:
        raise StartError(f"{taken[0]} exists: restore into an empty data folder (--data-dir).")
    on_disk = MigrationLoader(None, ignore_no_migrations=True).disk_migrations or {}
    newer = sorted(set(manifest.migrations) - {f"{app}.{name}" for app, name in on_disk})
    if newer:
        raise StartError(
            f"The backup was made by Fairway {manifest.fairway} and contains tables that this version "
            f"({_fairway_version()}) does not have ({newer[0]}). Install that version or a newer one first."
        )
    return manifest


def restore_backup(source: Path, manifest: Manifest, folder: DataDir) -> None:
    """Restore into an empty database and data folder; jobs start only after the recovery.

    The database is restored in one transaction, the keys after it: a refusal leaves both empty.
    """
    with as_owner():
        if "django_migrations" in connection.introspection.table_names():
            raise StartError("The database is not empty: restore into an empty one.")
    with (
        _open_archive(source) as tar,
        tempfile.TemporaryDirectory(prefix=".restore-", dir=folder.root) as space,
    ):
        contents = {name: _read_small_file(tar, name) for name in manifest.files if name != DUMP}
        dump = Path(space) / DUMP
        with os.fdopen(os.open(dump, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            shutil.copyfileobj(_member(tar, DUMP), out)
        options = [
            "--no-owner",
            "--no-privileges",
            "--no-comments",
            "--exit-on-error",
            "--single-transaction",
        ]
        with as_owner():
            major = max(_server_major(), manifest.postgres_major)
            name = connection.settings_dict["NAME"]
            _postgres_tool("pg_restore", major, *options, "--dbname", name, str(dump))
    if SECRET_KEY_FILE in contents:
        settings.SECRET_KEY = contents[SECRET_KEY_FILE].decode().strip()
    connections.close_all()
    call_command("migrate", interactive=False, verbosity=0)
    with transaction.atomic():
        begin_recovery()
    _write_small_files(contents, folder)
    connections.close_all()


def _describe_database() -> tuple[int, str, list[str]]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT app, name FROM django_migrations ORDER BY app, name")
        migrations = [f"{app}.{name}" for app, name in cursor.fetchall()]
    row = ClusterSettings.objects.filter(id=1).first()
    return _server_major(), row.cluster_id if row else "", migrations


def _server_major() -> int:
    connection.ensure_connection()
    return int(connection.connection.info.server_version) // 10_000


def _postgres_tool(name: str, at_least: int, *arguments: str) -> None:
    """Run pg_dump or pg_restore of at least this major version; the password is passed in the environment."""
    database: dict[str, Any] = connection.settings_dict
    named = {
        "PGHOST": database.get("HOST"),
        "PGPORT": database.get("PORT"),
        "PGUSER": database.get("USER"),
        "PGPASSWORD": database.get("PASSWORD"),
        "PGDATABASE": database.get("NAME"),
    }
    environment = {**os.environ, **{n: str(v) for n, v in named.items() if v}, "PGCONNECT_TIMEOUT": "10"}
    try:
        done = subprocess.run(
            [_tool(name, at_least), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DUMP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StartError(f"{name} took longer than {DUMP_TIMEOUT_S // 60} minutes.") from None
    if done.returncode:
        raise StartError(f"{name} failed: {done.stderr.strip()[-2000:]}")


def _tool(name: str, at_least: int) -> str:
    for major in range(at_least, POSTGRES_VERSIONS.stop):
        with contextlib.suppress(StartError):
            return find_postgres(major).program(name)
    raise StartError(
        f"There is no {name} for PostgreSQL {at_least} on this machine. "
        f"Install one (Debian: apt-get install postgresql-{at_least})."
    )


def _secret_paths(folder: DataDir) -> dict[str, Path]:
    """Return the paths of the keys and the secret key, by their names in the backup."""
    private = [key_path(folder.keys, purpose) for purpose in PURPOSES]
    pairs = [path for key in private for path in (key, key.with_name(f"{key.name}.pub"))]
    return {**{f"keys/{path.name}": path for path in pairs}, SECRET_KEY_FILE: folder.secret_key}


def _small_files(folder: DataDir) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in _secret_paths(folder).items() if path.exists()}


def _write_small_files(contents: Mapping[str, bytes], folder: DataDir) -> None:
    for name, path in _secret_paths(folder).items():
        if name in contents:
            mode = 0o400 if name == SECRET_KEY_FILE else 0o644 if name.endswith(".pub") else 0o600
            write_atomic(str(path), contents[name], mode=mode)


@contextlib.contextmanager
def _open_archive(source: Path) -> Iterator[tarfile.TarFile]:
    try:
        if not source.is_file():
            raise StartError(f"There is no file {source}.")
        source.open("rb").close()
    except OSError as trouble:
        raise StartError(f"{source} is not a readable backup: {trouble.strerror}.") from trouble
    try:
        with tarfile.open(source, "r:") as tar:
            yield tar
    except tarfile.TarError as trouble:
        raise StartError(f"{source} is not a readable backup: {trouble}.") from trouble


def _load_manifest(tar: tarfile.TarFile, source: Path) -> Manifest:
    try:
        manifest = Manifest(**json.loads(_read_small_file(tar, MANIFEST)))
    except (StartError, ValueError, TypeError):
        raise StartError(f"{source} is not a backup of Fairway.") from None
    if manifest.format != FORMAT:
        raise StartError(f"{source} has format {manifest.format}; this version reads format {FORMAT}.")
    return manifest


def _read_small_file(tar: tarfile.TarFile, name: str) -> bytes:
    content = _member(tar, name).read(MAX_SMALL_FILE_BYTES + 1)
    if len(content) > MAX_SMALL_FILE_BYTES:
        raise StartError(f"{name} in the backup is larger than any such file.")
    return content


def _member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    try:
        file = tar.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise StartError(f"The backup lacks {name}.")
    return file


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
    tar.addfile(member, io.BytesIO(content))


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o600
    return member


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fairway_version() -> str:
    try:
        return version("fairway")
    except PackageNotFoundError:
        return "0.1.0"
