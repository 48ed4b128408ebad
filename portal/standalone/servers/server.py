"""A server that `up`, a command or the tests run on this machine."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError

POLL_INTERVAL_S = 0.02


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
            except self.not_ready as trouble:
                if not is_running():
                    raise StartError(
                        f"{self.title} stopped while starting; see its log lines above."
                    ) from trouble
                if time.monotonic() > deadline:
                    raise StartError(
                        f"{self.title} did not respond within {self.ready_timeout_s:.0f} s: {trouble}"
                    ) from trouble
            time.sleep(POLL_INTERVAL_S)
