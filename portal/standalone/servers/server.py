"""A server that `up`, a command or the tests run on this machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from portal.program_copies import open_for_every_account
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError

POLL_INTERVAL_S = 0.02
_UNNEEDED = shutil.ignore_patterns("include", "*.a", "doc", "__pycache__")


def copy_programs_for_account(folder: DataDir, name: str, program: Path, sources: Mapping[str, Path]) -> Path:
    """Copy folders, by their path in the copy, below the data folder; return the folder of the copy.

    The account that runs a server may have no access to the Python environment: its modes depend on the umask of
    whoever created it. A program is copied again when its path, size or time has changed.
    """
    status = program.stat()
    mark = hashlib.sha256(f"{program.parent} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:12]
    target = folder.servers / f"{name}-{mark}"
    if not target.is_dir():
        for interrupted in folder.servers.glob(".making-*"):
            shutil.rmtree(interrupted)
        making = folder.servers / f".making-{os.getpid()}"
        for path, source in sources.items():
            shutil.copytree(source, making / path, symlinks=True, ignore=_UNNEEDED)
        folder.servers.chmod(0o755)
        open_for_every_account(making)
        making.rename(target)
    return target


@dataclass(frozen=True)
class Server(ABC):
    """A prepared server: ``command`` runs it in the foreground, ``stop_signal`` stops it cleanly."""

    name: ClassVar[str]
    title: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    grace_s: ClassVar[float] = 10.0
    ready_timeout_s: ClassVar[float]
    not_ready: ClassVar[type[Exception]]
    """What ``check_ready`` raises while the server does not answer."""

    folder: DataDir

    @property
    @abstractmethod
    def command(self) -> list[str]: ...

    @property
    @abstractmethod
    def from_wheel(self) -> bool: ...

    @abstractmethod
    def check_ready(self) -> None: ...

    def wait_ready(self, is_running: Callable[[], bool]) -> None:
        """Return when the server answers. Raise StartError."""
        deadline = time.monotonic() + self.ready_timeout_s
        while True:
            try:
                self.check_ready()
                return
            except self.not_ready as error:
                if not is_running():
                    raise StartError(
                        f"{self.title} stopped while starting; see its log lines above."
                    ) from error
                if time.monotonic() > deadline:
                    raise StartError(
                        f"{self.title} did not respond within {self.ready_timeout_s:.0f} s: {error}"
                    ) from error
            time.sleep(POLL_INTERVAL_S)
