"""The data folder of one machine and the permissions of its parts."""

from __future__ import annotations

import os
import pwd
import secrets
from dataclasses import dataclass
from pathlib import Path

from portal.config import data_paths
from portal.standalone.account import check_traversable, set_owner
from portal.standalone.errors import StartError


@dataclass(frozen=True)
class DataDir:
    """Paths below the data folder. `account` runs the servers when root starts them, else None."""

    root: Path
    account: str | None

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

    def prepare(self) -> None:
        """Create the folders. The servers' account can traverse root's data folder, not list it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.root.chmod(0o711 if self.account else 0o700)
            check_traversable(self.root, self.account)
            for private in (self.keys, self.run, self.root / "logs"):
                private.mkdir(mode=0o700, exist_ok=True)
                private.chmod(0o711 if private == self.run and self.account else 0o700)
            for given in (self.valkey, self.sockets):
                self._make_private(given)
        except (PermissionError, NotADirectoryError, FileExistsError) as trouble:
            raise StartError(f"The data folder {self.root} cannot be used: {trouble.strerror}.") from trouble

    def prepare_unowned(self) -> None:
        """Create missing folders in a data folder of another owner, as in a container with any uid."""
        try:
            for private in (self.keys, self.run, self.root / "logs"):
                private.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as trouble:
            raise StartError(f"The data folder {self.root} cannot be used: {trouble.strerror}.") from trouble

    def ensure_secret_key(self) -> None:
        """Write the key that signs sessions and tickets on first start, readable by its owner only."""
        if self.secret_key.exists():
            return
        handle = os.open(self.secret_key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(64) + "\n")

    def _make_private(self, folder: Path) -> None:
        """Create a folder of mode 700 for the servers' account; refuse links and foreign owners."""
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid not in {os.geteuid(), _uid(self.account)}:
            raise StartError(f"{folder} belongs to another account; remove it or choose another --data-dir.")
        set_owner(folder, self.account, 0o700)


def _uid(account: str | None) -> int:
    return pwd.getpwnam(account).pw_uid if account else os.geteuid()
