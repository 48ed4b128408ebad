"""The file of a backup: database, keys known to nodes, and secret key. Writes such files and checks them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import secrets
import subprocess
import tarfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, BinaryIO

from django.db import DatabaseError, connection
from django.db.migrations.loader import MigrationLoader

from agents.keys import PURPOSES, key_path
from agents.node.host.atomic_files import fsync_dir
from portal.database.roles import SCHEMAS, as_owner
from portal.failpoints import failpoint
from portal.models import ClusterSettings
from portal.standalone.backup_requirements import check_backup_possible, server_major
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError
from portal.standalone.postgres_tools import ToolProcess, find_tool

FORMAT = 1
MANIFEST = "manifest.json"
DUMP = "database.dump"
SECRET_KEY_FILE = "secret_key"  # noqa: S105  (a file's name)
UNFINISHED = ".fairway-backup-"
"""Prefix of the file that becomes a backup; a killed backup leaves one, and the next one there removes it."""
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
        _remove_unfinished(target.parent)
        with as_owner(), _unfinished_file(target.parent) as (path, out):
            manifest = _write_archive(out, folder)
            failpoint("backup.written")
            try:
                target.hardlink_to(path)
            except FileExistsError:
                raise StartError(
                    f"{target} was created in the meantime; a backup never overwrites a file."
                ) from None
            fsync_dir(str(target.parent))
            failpoint("backup.linked")
    except OSError as error:  # such as a full disk, or one without hard links
        raise StartError(f"{target} cannot be written: {error.strerror}.") from error
    return manifest


@contextlib.contextmanager
def _unfinished_file(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield a new private file, locked while this process lives, whose name is removed at the end."""
    path = folder / f"{UNFINISHED}{secrets.token_hex(8)}"
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as out:
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(out, fcntl.LOCK_EX)
            yield path, out
        finally:
            path.unlink(missing_ok=True)


def _remove_unfinished(folder: Path) -> None:
    """Remove what killed backups left; the file of a backup that runs is locked."""
    for path in folder.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _write_archive(out: BinaryIO, folder: DataDir) -> Manifest:
    try:
        check_backup_possible()
        major, cluster, migrations = _describe_database()
        others = _other_schemas()
    except DatabaseError as error:
        raise StartError(f"The database cannot be read: {first_line(error)}") from error
    checksum = _add_dump(out, major, others)
    failpoint("backup.dumped")
    small = _small_files(folder)
    manifest = Manifest(
        FORMAT,
        fairway_version(),
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        cluster,
        major,
        migrations,
        {DUMP: checksum} | {name: hashlib.sha256(content).hexdigest() for name, content in small.items()},
    )
    with tarfile.open(fileobj=out, mode="w") as tar:  # continues behind the dump
        for name, content in small.items():
            _add(tar, name, content)
        _add(tar, MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
    out.flush()
    os.fsync(out.fileno())
    return manifest


def _add_dump(out: BinaryIO, major: int, others: list[str]) -> str:
    """Write the dump as the first member of the archive, as it arrives; return its SHA-256.

    Its header is written last, when its size is known; so it needs no second copy on the disk.
    """
    options = ["--format=custom", "--no-owner", "--no-privileges", "--no-publications", "--no-subscriptions"]
    options += ["--no-blobs"]  # large objects: Fairway has none, and those of another role cannot be read
    options += [f'--exclude-schema="{name}"' for name in others]
    out.write(bytes(tarfile.BLOCKSIZE))
    checksum, size = hashlib.sha256(), 0
    with ToolProcess(find_tool("pg_dump", major), options, stdout=subprocess.PIPE) as dump:
        for chunk in dump.output():
            out.write(chunk)
            checksum.update(chunk)
            size += len(chunk)
            failpoint("backup.dumping")
        dump.finish()
    out.write(bytes(-size % tarfile.BLOCKSIZE))
    end = out.tell()
    out.seek(0)
    out.write(_header(DUMP, size).tobuf(tarfile.GNU_FORMAT))  # one block, whatever the size
    out.seek(end)
    return checksum.hexdigest()


def read_manifest(source: Path) -> Manifest:
    """Check that a backup is complete and fits this version; return its manifest."""
    with open_archive(source) as tar:
        manifest = _load_manifest(tar, source)
        for name, wanted in manifest.files.items():
            file = archive_member(tar, name)
            if hashlib.file_digest(file, "sha256").hexdigest() != wanted:  # type: ignore[arg-type]
                raise StartError(f"{name} in {source} is damaged: its checksum differs.")
    on_disk = MigrationLoader(None, ignore_no_migrations=True).disk_migrations or {}
    newer = sorted(set(manifest.migrations) - {f"{app}.{name}" for app, name in on_disk})
    if newer:
        raise StartError(
            f"The backup was made by Fairway {manifest.fairway} and contains tables that this version "
            f"({fairway_version()}) does not have ({newer[0]}). Install that version or a newer one first."
        )
    return manifest


def _describe_database() -> tuple[int, str, list[str]]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT app, name FROM django_migrations ORDER BY app, name")
        migrations = [f"{app}.{name}" for app, name in cursor.fetchall()]
    row = ClusterSettings.objects.filter(id=1).first()
    return server_major(), row.cluster_id if row else "", migrations


def _other_schemas() -> list[str]:
    """Return the schemas of this database that are not Fairway's, quoted inside as pg_dump's patterns are."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT nspname FROM pg_namespace WHERE nspname <> ALL(%s) AND nspname !~ '^pg_'",
            [[*SCHEMAS, "information_schema"]],
        )
        return [name.replace('"', '""') for (name,) in cursor.fetchall()]


def secret_paths(folder: DataDir) -> dict[str, Path]:
    """Return the paths of the keys and the secret key, by their names in the backup."""
    private = [key_path(folder.keys, purpose) for purpose in PURPOSES]
    pairs = [path for key in private for path in (key, key.with_name(f"{key.name}.pub"))]
    return {**{f"keys/{path.name}": path for path in pairs}, SECRET_KEY_FILE: folder.secret_key}


def _small_files(folder: DataDir) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in secret_paths(folder).items() if path.exists()}


@contextlib.contextmanager
def open_archive(source: Path) -> Iterator[tarfile.TarFile]:
    """Yield the archive of a backup. Raise StartError."""
    try:
        if not source.is_file():
            raise StartError(f"There is no file {source}.")
        source.open("rb").close()
    except OSError as error:
        raise StartError(f"{source} is not a readable backup: {error.strerror}.") from error
    try:
        with tarfile.open(source, "r:") as tar:
            yield tar
    except tarfile.TarError as error:
        raise StartError(f"{source} is not a readable backup: {error}.") from error


def _load_manifest(tar: tarfile.TarFile, source: Path) -> Manifest:
    try:
        stored = json.loads(read_small_file(tar, MANIFEST))
        known = {field.name for field in fields(Manifest)}  # a later version may write more
        manifest = Manifest(**{name: value for name, value in stored.items() if name in known})
    except (StartError, ValueError, TypeError, AttributeError, RecursionError):
        raise StartError(f"{source} is not a backup of Fairway.") from None
    if isinstance(manifest.format, int) and manifest.format != FORMAT:
        raise StartError(f"{source} has format {manifest.format}; this version reads format {FORMAT}.")
    if not _is_well_formed(manifest):
        raise StartError(f"{source} is not a backup of Fairway.")
    return manifest


def _is_well_formed(manifest: Manifest) -> bool:
    """Return whether the values, which anyone may have written, have their types, and texts that can be printed."""
    values: dict[str, Any] = vars(manifest)
    migrations, files = values["migrations"], values["files"]
    if not isinstance(migrations, list) or not isinstance(files, dict):
        return False
    texts = [values["fairway"], values["made_at"], values["cluster"], *migrations, *files, *files.values()]
    return (
        all(isinstance(values[name], int) for name in ("format", "postgres_major"))
        and all(isinstance(text, str) and text.isprintable() for text in texts)
        and DUMP in files
    )


def read_small_file(tar: tarfile.TarFile, name: str) -> bytes:
    """Return the content of a key or the manifest. Raise StartError."""
    content = archive_member(tar, name).read(MAX_SMALL_FILE_BYTES + 1)
    if len(content) > MAX_SMALL_FILE_BYTES:
        raise StartError(f"{name} in the backup is larger than any such file.")
    return content


def archive_member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    """Return a file of the archive to read from. Raise StartError for anything else, such as a link."""
    try:
        member = tar.getmember(name)
    except KeyError:
        member = None
    file = tar.extractfile(member) if member and member.isreg() and not member.issparse() else None
    if file is None:
        raise StartError(f"The backup lacks {name}.")
    return file


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    tar.addfile(_header(name, len(content)), io.BytesIO(content))


def _header(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o600, int(time.time())
    return member


def first_line(error: BaseException) -> str:
    """Return the first line of an error, as a sentence."""
    return (str(error).splitlines() or ["it failed"])[0].rstrip(".") + "."


def fairway_version() -> str:
    """Return the version of this program."""
    try:
        return version("fairway")
    except PackageNotFoundError:
        return "0.1.0"
