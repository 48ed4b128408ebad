"""Restores a backup into an empty database and data folder: all of it, or nothing.

A restore takes several transactions. It first leaves a mark in the data folder, then one in the database
(``portal.database.unfinished_restore``), which nothing else uses until its last transaction drops the mark. So what
is left of an interrupted restore is recognized: the next one removes it. The order:

1. mark the data folder, with the checksums of the files to come; mark the database;
2. the dump, in one transaction of pg_restore; migrations;
3. keys and secret key;
4. one transaction: recovery mode, privileges of the services' role, no mark. From here on it is restored.
5. remove the mark of the data folder.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from django.conf import settings
from django.core.management import call_command
from django.db import DatabaseError, connection, connections, transaction

from agents.node.errors import AgentError
from agents.node.host.atomic_files import write_atomic
from portal.config import variables
from portal.database.roles import (
    SCHEMAS,
    as_owner,
    grant_service_privileges,
)
from portal.database.unfinished_restore import RESTORE_SCHEMA, restoring
from portal.failpoints import failpoint
from portal.services.cluster.recovery import begin_recovery
from portal.standalone.backup import (
    DUMP,
    SECRET_KEY_FILE,
    Manifest,
    archive_member,
    first_line,
    open_archive,
    read_small_file,
    secret_paths,
)
from portal.standalone.backup_requirements import missing_for_restore, server_major
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError
from portal.standalone.postgres_tools import (
    SETS_TRANSACTION_TIMEOUT,
    PostgresTool,
    ToolProcess,
    find_tool,
    find_tools,
    memory_file,
    read_contents,
)
from portal.standalone.restores.leftovers import (
    APPLICATION,
    RestoreComplete,
    first_object,
    mark_database,
    mark_folder,
    remove_unfinished,
    run_as_caller,
)

LOCK = 7_203_114_905
"""Key of the advisory lock that one restore at a time holds in its database."""
RESTORE_OPTIONS = (
    *("--no-owner", "--no-privileges", "--no-comments", "--no-tablespaces", "--no-publications"),
    *("--no-subscriptions", "--no-security-labels", "--exit-on-error", "--single-transaction"),
)
_ENTRY = re.compile(r"\d+; \d+ \d+ (?P<kind>[A-Z][A-Z ]*) (?P<schema>\S+) ")
"""A line of pg_restore's table of contents."""


def restore_backup(source: Path, manifest: Manifest, folder: DataDir) -> list[str]:
    """Restore a backup that `read_manifest` has checked; jobs start only after the recovery.

    Return sentences about what it removed of an earlier, interrupted restore, and what it changed. Raise StartError,
    or CommandError of a migration; then database and data folder are empty again, or the message says that they are
    not.
    """
    with restoring(), _plain_errors(), as_owner(), _only_restore() as lock:
        said = remove_unfinished(folder)
        check_data_folder(folder)
        _check_database()
        if missing := missing_for_restore():
            raise StartError(missing[0])
        tool, contents = _choose_tool(source)
        with open_archive(source) as tar:
            files = {name: read_small_file(tar, name) for name in manifest.files if name != DUMP}
        try:
            mark_folder(folder, files)
            failpoint("restore.folder_marked")
            mark_database(folder, lock)
            failpoint("restore.database_marked")
            _load(source, tool, contents)
            failpoint("restore.loaded")
            said += run_as_caller()
            if SECRET_KEY_FILE in files and not variables.SECRET_KEY.read():
                settings.SECRET_KEY = files[SECRET_KEY_FILE].decode().strip()
            call_command("migrate", interactive=False, verbosity=0)
            failpoint("restore.migrated")
            _write_files(files, folder)
            _finish()
        except BaseException as error:
            _remove_after(error, folder)
            raise
        failpoint("restore.committed")
        folder.restore_mark.unlink()
        failpoint("restore.done")
    return said


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Convert errors of the database to sentences."""
    try:
        yield
    except DatabaseError as error:
        raise StartError(f"The backup cannot be restored: {first_line(error)}") from error
    except AgentError as error:  # a full disk, found by write_atomic
        raise StartError(
            f"The data folder cannot be written: {first_line(error.__cause__ or error)}"
        ) from error
    finally:
        connections.close_all()


@contextlib.contextmanager
def _only_restore() -> Iterator[int]:
    """Refuse a second restore into the same database while this one runs. Yield the process id of the session."""
    held = connection.copy()
    try:
        with held.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_lock(%s), pg_backend_pid()", [LOCK])
            ours, pid = cursor.fetchone()
        if not ours:
            raise StartError("Another restore into this database is running.")
        yield pid
    finally:
        held.close()  # releases the lock


def check_data_folder(folder: DataDir) -> None:
    """Raise StartError if the data folder has keys, unless an interrupted restore has left them."""
    taken = [path for path in secret_paths(folder).values() if path.exists()]
    if taken and not folder.restore_mark.exists():
        raise StartError(f"{taken[0]} exists: restore into an empty data folder (--data-dir).")


def _check_database() -> None:
    if name := first_object():
        raise StartError(f"The database is not empty ({name}): restore into an empty one.")


# -- the steps -------------------------------------------------------------------------------------


def _choose_tool(source: Path) -> tuple[PostgresTool, list[str]]:
    """Return the pg_restore that reads the backup and fits the server, and the entries to restore."""
    server = server_major()
    find_tool("pg_restore", server)
    older_failed = False
    for tool in find_tools("pg_restore", server):
        try:
            with open_archive(source) as tar:
                contents = read_contents(tool, archive_member(tar, DUMP))
        except StartError as error:
            if "unsupported version" not in str(error):
                raise
            older_failed = True
            continue
        if server < SETS_TRANSACTION_TIMEOUT <= tool.major:
            if older_failed:
                raise StartError(
                    f"The backup was written by a newer pg_dump, whose files PostgreSQL {server} cannot restore: "
                    f"restore it into PostgreSQL {SETS_TRANSACTION_TIMEOUT} or newer."
                )
            raise StartError(
                f"pg_restore {tool.major} cannot restore into PostgreSQL {server}: install version {server} "
                f"(Debian: apt-get install postgresql-client-{server})."
            )
        return tool, [line for line in contents if _is_ours(line)]
    raise StartError(
        "The backup was written by a newer pg_dump than the pg_restore of this machine: install a newer one."
    )


def _is_ours(line: str) -> bool:
    """Return whether an entry is in one of our schemas; those themselves and the extension exist by then."""
    entry = _ENTRY.match(line)
    return entry is not None and entry["schema"] in SCHEMAS


def _load(source: Path, tool: PostgresTool, contents: list[str]) -> None:
    """Restore the dump in one transaction; it is read from the backup, without a copy on the disk."""
    name = str(connection.settings_dict["NAME"])
    with open_archive(source) as tar, memory_file("\n".join([*contents, ""]).encode()) as listing:
        options = [*RESTORE_OPTIONS, "--use-list", f"/dev/fd/{listing}", "--dbname", name]
        with ToolProcess(
            tool, options, stdin=subprocess.PIPE, files=[listing], application=APPLICATION
        ) as stream:
            stream.feed(archive_member(tar, DUMP))
            failpoint("restore.read")
            stream.finish()


def _write_files(files: Mapping[str, bytes], folder: DataDir) -> None:
    for name, path in secret_paths(folder).items():
        if name in files:
            mode = 0o400 if name == SECRET_KEY_FILE else 0o644 if name.endswith(".pub") else 0o600
            write_atomic(str(path), files[name], mode=mode)
            failpoint(f"restore.wrote.{name}")


def _finish() -> None:
    """End the restore in one transaction: from its commit on, the services use the database."""
    with transaction.atomic(), connection.cursor() as cursor:
        begin_recovery()
        grant_service_privileges()
        cursor.execute(f"DROP SCHEMA {RESTORE_SCHEMA}")
        failpoint("restore.committing")


def _remove_after(cause: BaseException, folder: DataDir) -> None:
    """Remove what was restored so far; raise StartError if that fails."""
    try:
        connection.close()  # it may be inside a failed transaction
        remove_unfinished(folder)
    except RestoreComplete:
        raise
    except (AgentError, DatabaseError, OSError, StartError) as error:
        why = first_line(cause) if isinstance(cause, Exception) else "it was interrupted."
        raise StartError(
            f"The backup was not restored: {why} What it left could not be removed either "
            f"({first_line(error)}) Run manage.py restore again: it removes that first."
        ) from cause
