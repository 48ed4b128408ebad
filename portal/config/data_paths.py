"""The data directory of one machine and the addresses derived from it. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

MAX_SOCKET_PATH_BYTES = 100
"""Linux allows 107 bytes; PostgreSQL's socket file name is part of the path that is checked."""

POSTGRES_SOCKET_NAME = ".s.PGSQL.5432"
VALKEY_SOCKET_NAME = "valkey.sock"

OWNER_ROLE = "fairway"
SERVICES_ROLE = "fairway_app"
"""The two roles of the PostgreSQL that `up` starts: the owner of the tables, and the role of the processes."""


def default_data_dir() -> Path:
    """Return `/var/lib/fairway` for root, otherwise `$XDG_DATA_HOME/fairway` or `~/.local/share/fairway`."""
    if os.geteuid() == 0:
        return Path("/var/lib/fairway")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "fairway"


def data_dir() -> Path:
    """Return the data directory: `FAIRWAY_DATA_DIR`, which `--data-dir` sets, or the default."""
    named = os.environ.get("FAIRWAY_DATA_DIR")
    return Path(named).absolute() if named else default_data_dir()


def apply_data_dir_option(argv: Sequence[str]) -> None:
    """Copy `--data-dir PATH` from the command line to the environment, before the settings are read."""
    for index, argument in enumerate(argv):
        if argument == "--":
            return
        if argument == "--data-dir" and index + 1 < len(argv):
            os.environ["FAIRWAY_DATA_DIR"] = str(Path(argv[index + 1]).absolute())
        elif argument.startswith("--data-dir="):
            os.environ["FAIRWAY_DATA_DIR"] = str(Path(argument.partition("=")[2]).absolute())


def sockets_dir(data: Path) -> Path:
    """Return the directory of the unix sockets: in the data directory unless that path is too long."""
    inside = data / "run" / "sockets"
    if len(str(inside / POSTGRES_SOCKET_NAME)) <= MAX_SOCKET_PATH_BYTES:
        return inside
    mark = hashlib.sha256(str(data).encode()).hexdigest()[:12]
    runtime = Path("/run") if os.geteuid() == 0 else Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")  # noqa: S108
    return runtime / f"fairway-{os.geteuid()}-{mark}"


def agent_program(data: Path) -> Path:
    """Return the path of the agent program of this machine, which `up` writes."""
    return data / "agent" / "agent.pyz"


def agent_settings_text(settings: object) -> str:
    return json.dumps(settings, indent=1, sort_keys=True)


def write_agent_settings(data: Path, node: str, text: str) -> Path:
    """Write the settings file of the local agent of a node (public id); return its path."""
    folder = data / "agent"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = folder / f"{node}.json"
    if not path.exists() or path.read_text() != text:
        fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
        fresh.write_text(text)
        fresh.replace(path)
    return path


def database_url(data: Path, role: str = SERVICES_ROLE) -> str:
    """Return the address of the PostgreSQL that `up` starts for this data directory."""
    return f"postgres://{role}@/{quote(str(sockets_dir(data)))}/fairway"


def redis_url(data: Path) -> str:
    """Return the address of the Valkey that `up` starts for this data directory."""
    return f"unix://{sockets_dir(data) / VALKEY_SOCKET_NAME}?db=0"


def tracking_socket(data: Path) -> Path:
    """Return the socket of the tracking server that `up` starts for this data directory."""
    return sockets_dir(data) / "tracking.sock"
