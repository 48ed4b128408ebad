"""The data folder of one machine and the permissions of its parts."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agents.node.host.atomic_files import make_folder
from portal.config import data_paths
from portal.standalone.account import account_name, check_traversable, set_owner
from portal.standalone.errors import StartError

ENTRY_MODES = {
    "secret_key": 0o400,
    "original": 0o600,
    "keys": 0o700,
    "keys/*": 0o600,
    "keys/*.pub": 0o644,
    "logs": 0o700,
    "artifacts": 0o700,
    "agent": 0o711,
    "agent/*": 0o600,
    "agent/agent.pyz*": 0o644,
    "servers": 0o755,
    "environments": 0o755,
    "homes": 0o711,
    "node": 0o711,
    "node/*.json": 0o600,
    "node/state": 0o711,
    "node/state/tasks": 0o711,
    "node/state/tasks/*": 0o711,
    "node/state/scratch": 0o711,
    "demo": 0o711,
    "demo/*": 0o711,
    "demo/*/*.json": 0o600,
    "demo/*/homes": 0o711,
    "demo/*/state": 0o711,
    "demo/*/state/tasks": 0o711,
    "demo/*/state/tasks/*": 0o711,
    "demo/*/state/scratch": 0o711,
}
"""Modes in the data folder. The accounts of jobs pass through 711; a later pattern takes precedence."""


def _private_mode(facts: os.stat_result) -> int:
    return 0o700 if stat.S_ISDIR(facts.st_mode) else 0o600


def _public_mode(facts: os.stat_result) -> int:
    return 0o755 if stat.S_ISDIR(facts.st_mode) or facts.st_mode & 0o100 else 0o644


TREE_MODES: dict[str, Callable[[os.stat_result], int]] = {
    "run": _private_mode,
    "logs": _private_mode,
    "artifacts": _private_mode,
    "servers": _public_mode,
    "environments": _public_mode,
}
"""Folders with one rule for everything below them. Only programs that jobs run too are public."""


KNOWN_NAMES = {
    *TREE_MODES,
    *(pattern.split("/")[0] for pattern in ENTRY_MODES),
    "postgres",
    "valkey",
    "lost+found",
}


@dataclass(frozen=True)
class DataDir:
    """Paths below the data folder. `account` runs the servers when root starts them, else None."""

    root: Path
    account: str | None

    @property
    def mark(self) -> str:
        """Identify the folder for processes: the same by any path, and another one for a copy."""
        facts = self.root.stat()
        return f"{facts.st_dev}:{facts.st_ino}"

    @property
    def marks(self) -> tuple[str, str]:
        """The mark, and that of processes which an earlier version started."""
        return self.mark, str(self.root)

    @property
    def postgres(self) -> Path:
        return self.root / "postgres"

    @property
    def servers(self) -> Path:
        """Copies of a wheel's programs, for an account that cannot read the virtual environment."""
        return self.root / "servers"

    @property
    def valkey(self) -> Path:
        return self.root / "valkey"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def restore_mark(self) -> Path:
        """Exists from the start of a restore to its end."""
        return self.run / "restore.json"

    @property
    def sockets(self) -> Path:
        return data_paths.sockets_dir(self.root)

    @property
    def secret_key(self) -> Path:
        return self.root / "secret_key"

    @property
    def database_url(self) -> str:
        return data_paths.database_url(self.root)

    @property
    def redis_url(self) -> str:
        return data_paths.redis_url(self.root)

    def check_path(self) -> None:
        """Raise StartError for a path that servers, logs and messages cannot hold."""
        text = str(self.root)
        if not text.isprintable():
            raise StartError(
                f"The data folder {text!a} has a character that cannot be printed: choose another name."
            )

    def prepare(self) -> None:
        """Create the folders. The servers' account can traverse root's data folder, not list it."""
        self.check_path()
        mode = 0o711 if self.account else 0o700
        try:
            make_folder(str(self.root), mode)
            self._check_content()
            self._check_links()
            self.root.chmod(mode)
            check_traversable(self.root, self.account)
            for private in (self.keys, self.run, self.root / "logs"):
                make_folder(str(private), 0o700)
            self._repair_modes()
            self.run.chmod(mode)
            for given in (self.valkey, self.sockets):
                self._make_private(given)
        except OSError as error:
            raise unusable(self.root, error) from error

    def _check_content(self) -> None:
        """Refuse a folder of another account, or one that is used for something else."""
        if not any(
            (self.root / mark).exists() for mark in ("run/up.lock", "secret_key", "postgres/PG_VERSION")
        ):
            foreign = sorted({path.name for path in self.root.iterdir()} - KNOWN_NAMES)
            if foreign:
                raise StartError(
                    f"The folder {self.root} has {foreign[0]!a} but no installation of Fairway. "
                    "Choose another with --data-dir."
                )
        owner = self.root.stat().st_uid
        if owner != os.geteuid():
            raise StartError(
                f"The data folder {self.root} belongs to {account_name(owner)}, and {account_name(os.geteuid())} "
                "starts Fairway: choose another with --data-dir, or change its owner."
            )

    def _check_links(self) -> None:
        """Refuse a private folder elsewhere that others may enter: the modes there are not ours to change."""
        for name in (name for name, mode in ENTRY_MODES.items() if mode == 0o700):
            folder = self.root / name
            if folder.is_symlink() and folder.is_dir() and folder.stat().st_mode & 0o077:
                raise StartError(
                    f"{folder} is a link to {folder.resolve()}, which other accounts may enter: give that folder the "
                    "mode 700."
                )

    def _repair_modes(self) -> None:
        """Give every entry of ENTRY_MODES and TREE_MODES its mode: an earlier version left them to the umask."""
        modes = {path: mode for pattern, mode in ENTRY_MODES.items() for path in self.root.glob(pattern)}
        for path, mode in modes.items():
            self._set_mode(path.name, mode, path.parent)
        for name, mode_of in TREE_MODES.items():
            if not (self.root / name).is_dir():
                continue
            for _, folders, files, descriptor in os.fwalk(self.root / name, follow_symlinks=False):
                for entry in (*folders, *files):
                    with contextlib.suppress(FileNotFoundError):
                        facts = os.stat(entry, dir_fd=descriptor, follow_symlinks=False)
                        self._set_mode(entry, mode_of(facts), descriptor)

    def _set_mode(self, name: str, mode: int, folder: Path | int) -> None:
        """Change a file or folder of ours; links, sockets and files with a second name are left alone."""
        at = folder if isinstance(folder, int) else os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            facts = os.stat(name, dir_fd=at, follow_symlinks=False)
            if stat.S_IMODE(facts.st_mode) != mode and _is_ours(facts):
                entry = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=at)
                try:
                    if os.path.samestat(os.fstat(entry), facts):
                        Path(f"/proc/self/fd/{entry}").chmod(mode)
                finally:
                    os.close(entry)
        finally:
            if at != folder:
                os.close(at)

    def prepare_unowned(self) -> None:
        """Create missing folders in a data folder of another owner, as in a container with any uid."""
        self.check_path()
        try:
            for private in (self.keys, self.run, self.root / "logs"):
                make_folder(str(private), 0o700)
        except OSError as error:
            raise unusable(self.root, error) from error

    def check_installed(self) -> None:
        """Raise StartError when there is nothing to read: a command would else create an installation."""
        if not os.environ.get("DATABASE_URL") and not (self.postgres / "PG_VERSION").exists():
            raise StartError(f"The data folder {self.root} has no installation of Fairway: check --data-dir.")

    def ensure_secret_key(self) -> None:
        """Write the key that signs sessions and tickets on first start, readable by its owner only."""
        if self.secret_key.exists():
            return
        if self.restore_mark.exists():
            raise StartError(
                f"A restore into the data folder {self.root} was interrupted: run manage.py restore again."
            )
        handle = os.open(self.secret_key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(64) + "\n")

    def _make_private(self, folder: Path) -> None:
        """Create a folder of mode 700 for the servers' account; refuse links and foreign owners."""
        make_folder(str(folder), 0o700)
        if folder.is_symlink() or folder.stat().st_uid not in {os.geteuid(), _uid(self.account)}:
            raise StartError(f"{folder} belongs to another account; remove it or choose another --data-dir.")
        set_owner(folder, self.account, 0o700)


def unusable(path: Path, error: OSError) -> StartError:
    """Return the error for a data folder that the system refuses."""
    where = f"{error.filename}: " if error.filename and str(error.filename) != str(path) else ""
    why = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
    return StartError(f"The data folder {path} cannot be used: {where}{why}.")


def _is_ours(facts: os.stat_result) -> bool:
    if facts.st_uid != os.geteuid():
        return False
    return stat.S_ISDIR(facts.st_mode) or (stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1)


def _uid(account: str | None) -> int:
    return pwd.getpwnam(account).pw_uid if account else os.geteuid()
