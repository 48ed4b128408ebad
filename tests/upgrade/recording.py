"""Writes and loads the recorded installation of a release: its database, one start request, the agent's program."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connection, connections

from portal.database.roles import as_owner
from portal.standalone.servers.binaries import find_postgres

RECORDED = Path(__file__).parent / "recorded"
FOLDER = "@FOLDER@"
"""Stands for the folder of the nodes in recorded texts."""
SECRET_KEY = "the secret key of the recorded installation, which encrypts nothing of value"


def dump_database(target: Path, folder: Path) -> None:
    """Write the database of this test as SQL, without owners, privileges and lines that other servers lack."""
    connection.ensure_connection()
    major = connection.connection.info.server_version // 10_000
    with as_owner():
        named = connection.settings_dict
        environment = {f"PG{name}": str(named[key]) for name, key in _VARIABLES.items() if named.get(key)}
        command = [
            find_postgres(major).program("pg_dump"),
            "--no-owner",
            "--no-privileges",
            "--schema=public",
        ]
        command += ["--inserts", "--rows-per-insert=200", "--extension=btree_gist"]
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=True
        )
    kept = [
        line
        for line in done.stdout.splitlines()
        if not line.startswith(("\\", "--", "SET transaction_timeout"))
    ]
    text = "\n".join(line for line in kept if line and not line.startswith(("CREATE SCHEMA", "COMMENT ON")))
    target.write_bytes(gzip.compress(text.replace(str(folder), FOLDER).encode() + b"\n", mtime=0))


_VARIABLES = {"HOST": "HOST", "PORT": "PORT", "USER": "USER", "PASSWORD": "PASSWORD", "DATABASE": "NAME"}


@contextmanager
def recorded_database(release: str, folder: Path) -> Iterator[None]:
    """Use a database with the recorded rows, owned by the owner of the tables, in place of the test's own."""
    named: dict[str, Any] = connections.settings[DEFAULT_DB_ALIAS]
    kept, name = named["NAME"], f"{named['NAME']}_recorded"
    text = gzip.decompress((RECORDED / release / "database.sql.gz").read_bytes()).decode()
    _run_as_owner(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)', f'CREATE DATABASE "{name}"')
    connections.close_all()
    connection.settings_dict["NAME"] = named["NAME"] = name
    try:
        _run_as_owner(text.replace(FOLDER, str(folder)))
        yield
    finally:
        close_connections()
        connection.settings_dict["NAME"] = named["NAME"] = kept
        _run_as_owner(f'DROP DATABASE "{name}" WITH (FORCE)')


def close_connections() -> None:
    """Close also those of a pool that an earlier test opened, so that the next one uses the settings of now."""
    connections.close_all()
    if connection.connection_pool is not None:
        connection.close_pool()


def _run_as_owner(*scripts: str) -> None:
    with as_owner():
        target = connection.get_connection_params()
        for kind in ("cursor_factory", "context"):
            target.pop(kind, None)
        with psycopg.connect(**target, autocommit=True) as opened:
            for script in scripts:
                opened.execute(script)


def store_agent_program(program: Path, target: Path) -> None:
    """Write the agent's program without its bytecode, which other versions of Python ignore, compressed."""
    stored = io.BytesIO(b"#!/usr/bin/env python3\n")
    stored.seek(0, io.SEEK_END)
    with zipfile.ZipFile(program) as source, zipfile.ZipFile(stored, "a", zipfile.ZIP_STORED) as copy:
        for entry in source.infolist():
            if not entry.filename.endswith(".pyc"):
                copy.writestr(zipfile.ZipInfo(entry.filename, entry.date_time), source.read(entry))
    target.write_bytes(lzma.compress(stored.getvalue(), preset=9))


def agent_program(release: str) -> bytes:
    return lzma.decompress((RECORDED / release / "agent.pyz.xz").read_bytes())


def start_request(release: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the epoch and the specification with which the recorded job was started."""
    text = (RECORDED / release / "start.json").read_text().replace(FOLDER, str(folder))
    epoch, spec = json.loads(text)
    return epoch, spec


def check_no_paths(target: Path) -> None:
    """Fail if recorded texts name this machine or this checkout."""
    for path in target.iterdir():
        content = path.read_bytes()
        unpack = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix, bytes)
        text = unpack(content).decode(errors="replace")
        here = [
            str(settings.BASE_DIR),
            str(settings.DATA_DIR),
            os.uname().nodename,
            str(Path.home()) + "/",
            "/srv/tmp",
        ]
        found = [word for word in here if len(word) > 3 and word in text]
        assert not found, (path.name, found)
