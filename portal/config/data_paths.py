"""The data directory of one machine and the addresses derived from it. Standard library only."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

MAX_SOCKET_PATH_BYTES = 100
"""Linux allows 107 bytes; PostgreSQL's socket file name is part of the path that is checked."""

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._/+@~-]*")
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
        name, separator, value = argument.partition("=")
        if name == "--data-dir" and not separator:
            value = "".join(argv[index + 1 : index + 2])
        if name == "--data-dir" and value:  # the command refuses a blank one
            os.environ["FAIRWAY_DATA_DIR"] = str(Path(value).absolute())


def read_secret_key(data: Path) -> str:
    """Return the key of an installation; blank if there is none, or the directory cannot be read."""
    try:
        return (data / "secret_key").read_text().strip()
    except OSError:
        return ""


def sockets_dir(data: Path) -> Path:
    """Return the directory of the unix sockets: in the data directory if sockets can have such a path."""
    inside = data / "run" / "sockets"
    if _fits_sockets(inside):
        return inside
    mark = hashlib.sha256(os.fsencode(data)).hexdigest()[:12]
    runtime = Path("/run") if os.geteuid() == 0 else Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")  # noqa: S108
    outside = runtime / f"fairway-{os.geteuid()}-{mark}"
    return outside if _fits_sockets(outside) else Path("/tmp") / outside.name  # noqa: S108


def _fits_sockets(folder: Path) -> bool:
    """Return whether addresses can have this path: it is short, and a list or a URL would not split it."""
    path = str(folder / POSTGRES_SOCKET_NAME)
    return len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES and _PLAIN_PATH.fullmatch(path) is not None


def agent_program(data: Path) -> Path:
    """Return the path of the agent program of this machine, which `up` writes."""
    return data / "agent" / "agent.pyz"


def database_url(data: Path, role: str = SERVICES_ROLE) -> str:
    """Return the address of the PostgreSQL that `up` starts for this data directory."""
    return f"postgres://{role}@/{quote(str(sockets_dir(data)))}/fairway"


def redis_url(data: Path) -> str:
    """Return the address of the Valkey that `up` starts for this data directory."""
    return f"unix://{sockets_dir(data) / VALKEY_SOCKET_NAME}?db=0"


def tracking_socket(data: Path) -> Path:
    """Return the socket of the tracking server that `up` starts for this data directory."""
    return sockets_dir(data) / "tracking.sock"
