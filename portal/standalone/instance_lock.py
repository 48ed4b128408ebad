"""Lock on a data folder: one `up` at a time, and its address."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType

from portal.standalone.errors import StartError


def refuse_second(run: Path) -> None:
    """Raise StartError if an `up` holds the data folder, before anything else is checked, such as its port."""
    try:
        handle = os.open(run / "up.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # there is none, or the folder is refused later
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartError(_already_running_message(os.pread(handle, 4096, 0), run.parent)) from None
    finally:
        os.close(handle)


class InstanceLock:
    """Hold a data folder for this process; the kernel releases the lock when the process dies."""

    def __init__(self, run: Path) -> None:
        self._path = run / "up.lock"

    def __enter__(self) -> InstanceLock:
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = os.pread(self._handle, 4096, 0)
            os.close(self._handle)
            raise StartError(_already_running_message(said, self._path.parent.parent)) from None
        self.write_info(url="")
        return self

    def write_info(self, *, url: str) -> None:
        """Write the address for the message of a second `up`."""
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps({"pid": os.getpid(), "url": url}).encode(), 0)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.ftruncate(self._handle, 0)
        os.close(self._handle)


def _already_running_message(said: bytes, data: Path) -> str:
    try:
        known = json.loads(said)
        who = f"process {known['pid']}" + (f", {known['url']}" if known["url"] else "")
    except (ValueError, KeyError):
        who = "it is starting"
    return f"Fairway is already running with {data} ({who}). Stop it first, or choose another --data-dir."
