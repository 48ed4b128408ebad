"""The marks of an unfinished restore, in the data folder and in the database, and the removal of what it left."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from django.db import connection, transaction

from agents.node.host.atomic_files import write_atomic
from portal.database.roles import SCHEMAS, TRACKING_SCHEMA, create_tracking_schema, relations
from portal.database.unfinished_restore import RESTORE_SCHEMA
from portal.failpoints import failpoint
from portal.standalone.backup import secret_paths
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError
from portal.standalone.servers.binaries import REQUIRED_EXTENSION

APPLICATION = "fairway-restore"
"""The name of pg_restore's session."""
STATEMENT_LIMIT_S = 600
END_OF_SESSIONS_S = 30


class RestoreComplete(StartError):
    """The restore was interrupted after its last transaction."""


def first_object() -> str:
    """Return the name of something in the database that is not part of an extension; blank if it is empty."""
    found = [f"{relation.schema}.{relation.name}" for relation in relations()]
    return next(iter([*found, *_routines(), *_types()]), "")


def mark_folder(folder: DataDir, files: Mapping[str, bytes]) -> None:
    """Write which files follow: only files with these checksums are removed again."""
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    write_atomic(str(folder.restore_mark), json.dumps({"files": sums}).encode(), mode=0o600)


def mark_database(folder: DataDir, lock: int) -> None:
    """Create the schema that keeps everyone else out, and end the sessions that began before."""
    where = {"id": secrets.token_hex(8), "folder": str(folder.root), "host": socket.gethostname()}
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_extension WHERE extname = %s", [REQUIRED_EXTENSION])
        mark = json.dumps(where | {"creates_extension": cursor.fetchone()[0] == 0})
        cursor.execute(f"CREATE SCHEMA {RESTORE_SCHEMA}")
        cursor.execute(cursor.mogrify(f"COMMENT ON SCHEMA {RESTORE_SCHEMA} IS %s", [mark]))
    _end_sessions(keep=lock)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"CREATE EXTENSION IF NOT EXISTS {REQUIRED_EXTENSION} WITH SCHEMA public")
        create_tracking_schema()


def _database_mark() -> dict[str, Any] | None:
    """Return what an unfinished restore has noted in the database; None if there is none."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT oid, obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = %s",
            [RESTORE_SCHEMA],
        )
        row = cursor.fetchone()
    if row is None:
        return None
    noted: dict[str, Any] = json.loads(row[1] or "{}")
    return noted


def _end_sessions(*, application: str = "", keep: int = 0) -> None:
    """End other sessions of this database, as far as the role may, and wait until they are gone.

    Their transactions are rolled back. New ones find the mark.
    """
    deadline = time.monotonic() + END_OF_SESSIONS_S
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND pg_has_role(usesysid, 'USAGE')"
            " AND pid <> %s AND %s IN (application_name, '')",
            [keep, application],
        )
        ended = [pid for pid, _ in cursor.fetchall()]
        while True:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s)", [ended])
            if not cursor.fetchone()[0]:
                return
            if time.monotonic() > deadline:
                raise StartError("Another program uses the database and does not end: stop it first.")
            time.sleep(0.05)


def remove_unfinished(folder: DataDir) -> list[str]:
    """Remove what an interrupted restore left in the database and the data folder; return sentences about it.

    The keys go first: while they are there, the mark of the database keeps everyone else out. Raise RestoreComplete
    if nothing but the mark of the data folder was left.
    """
    said: list[str] = []
    mark = _database_mark()
    note = folder.restore_mark
    sums = json.loads(note.read_text())["files"] if note.exists() else {}
    if mark is None and first_object():
        complete = bool(sums) and _present_files(sums, folder) == set(sums)
        note.unlink(missing_ok=True)
        if complete:
            raise RestoreComplete("The interrupted restore was complete: there is nothing left to restore.")
        return said
    _remove_files(sums, folder)
    if sums:
        failpoint("restore.files_removed")
    if mark is not None:
        _end_sessions(application=APPLICATION)
        _empty_database(creates_extension=bool(mark.get("creates_extension")))
        failpoint("restore.database_emptied")
        said.append("Removed what an interrupted restore had left in the database.")
        if (mark.get("folder"), mark.get("host")) != (str(folder.root), socket.gethostname()):
            said.append(
                f"It may have left keys in {mark.get('folder')} on {mark.get('host')}: remove them there."
            )
    note.unlink(missing_ok=True)
    return said


def _present_files(sums: Mapping[str, str], folder: DataDir) -> set[str]:
    """Return the names of the files in the data folder that a restore has written."""
    return {
        name
        for name, path in secret_paths(folder).items()
        if name in sums and path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == sums[name]
    }


def _remove_files(sums: Mapping[str, str], folder: DataDir) -> None:
    present = _present_files(sums, folder)
    paths = secret_paths(folder)
    for name in present:
        paths[name].unlink()
    for path in (*paths.values(), folder.restore_mark):
        for part in path.parent.glob(f"{path.name}.*.part"):  # the process was killed while it wrote
            part.unlink()


def _empty_database(*, creates_extension: bool) -> None:
    """Drop everything that a restore created, and its mark, in one transaction."""
    connection.ensure_connection()
    connection.connection.wait_longer(STATEMENT_LIMIT_S)
    kinds = {
        "r": "TABLE",
        "p": "TABLE",
        "f": "FOREIGN TABLE",
        "v": "VIEW",
        "m": "MATERIALIZED VIEW",
        "S": "SEQUENCE",
    }
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL statement_timeout = '{STATEMENT_LIMIT_S}s'")
        for relation in relations():
            name = relation.identifier.as_string(None)
            cursor.execute(f"DROP {kinds[relation.kind]} IF EXISTS {name} CASCADE")
        for routine in _routines():
            cursor.execute(f"DROP ROUTINE IF EXISTS {routine} CASCADE")
        for type_ in _types():
            cursor.execute(f"DROP TYPE IF EXISTS {type_} CASCADE")
        if creates_extension:
            cursor.execute(f"DROP EXTENSION IF EXISTS {REQUIRED_EXTENSION}")
        cursor.execute(f"DROP SCHEMA IF EXISTS {TRACKING_SCHEMA}")
        cursor.execute(f"DROP SCHEMA {RESTORE_SCHEMA}")
    connection.close()


def run_as_caller() -> list[str]:
    """Make functions run with the rights of their caller; return sentences about those that had their owner's.

    All that is restored belongs to the owner, whoever it belonged to. Must run as the owner.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT entry.oid::regprocedure::text FROM pg_proc AS entry WHERE prosecdef AND pronamespace IN"
            " (SELECT oid FROM pg_namespace WHERE nspname = ANY(%s)) AND NOT EXISTS (SELECT FROM pg_depend WHERE"
            " classid = 'pg_proc'::regclass AND objid = entry.oid AND deptype = 'e')",
            [list(SCHEMAS)],
        )
        names = [name for (name,) in cursor.fetchall()]
        for name in names:
            cursor.execute(f"ALTER ROUTINE {name} SECURITY INVOKER")
    return [
        f"{name} runs with the rights of its caller now; before, it had those of its owner." for name in names
    ]


def _routines() -> list[str]:
    """Return the functions of our schemas, as SQL names them."""
    return _names("SELECT entry.oid::regprocedure::text FROM pg_proc AS entry", "pg_proc", "pronamespace")


def _types() -> list[str]:
    """Return the types of our schemas that are no table's, as SQL names them."""
    return _names(
        "SELECT format('%%I.%%I', nspname, entry.typname) FROM pg_type AS entry",
        "pg_type",
        "typnamespace",
        "AND entry.typtype IN ('e', 'd', 'r')",
    )


def _names(select: str, catalog: str, namespace: str, condition: str = "") -> list[str]:
    """Return the names in our schemas of a catalog's entries that belong to no extension."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"{select} JOIN pg_namespace ON pg_namespace.oid = entry.{namespace} WHERE nspname = ANY(%s) {condition}"
            " AND NOT EXISTS (SELECT FROM pg_depend WHERE classid = %s::regclass AND objid = entry.oid"
            " AND deptype = 'e') ORDER BY 1",
            [list(SCHEMAS), catalog],
        )
        return [name for (name,) in cursor.fetchall()]
