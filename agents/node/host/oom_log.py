"""Containers with OOM kills, from the kernel log: the control group may be gone before it is read."""

from __future__ import annotations

import os
import re
import threading
from typing import Optional, Set

_GROUP = re.compile(r"oom_memcg=([^,\s]+)")
_CONTAINER = re.compile(r"[0-9a-f]{64}")


class OomLog:
    """Follows ``/dev/kmsg``; reports nothing where it is not readable."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._lock = threading.Lock()
        self._killed_containers: Set[str] = set()
        try:
            self._log: Optional[int] = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)
        except OSError:
            self._log = None

    def has_oom_kill(self, group_folder: str) -> bool:
        """Return True when the kernel killed a process of this container for lack of memory."""
        with self._lock:
            self._read()
            return any(container in self._killed_containers for container in _CONTAINER.findall(group_folder))

    def _read(self) -> None:
        while self._log is not None:
            try:
                line = os.read(self._log, 8192).decode(errors="replace")
            except BrokenPipeError:
                continue  # lines were overwritten; continue with the remaining ones
            except OSError:
                return
            if not line:
                return
            for group in _GROUP.findall(line):
                self._killed_containers.update(_CONTAINER.findall(group))
