"""Log writer of the process runtime: time, stream and F or P before each line, up to a size."""

from __future__ import annotations

import os
import select
import threading
import time
from typing import Dict

from agents.node.host import procfs

STDOUT, STDERR = b"stdout", b"stderr"
_READ_BYTES = 65_536
_ENDS_WITHIN_S = 5.0


class TaskLogWriter:
    """Writes the output of a task up to a size; the rest is read and dropped, so that the task continues.

    Otherwise one task with endless output would fill the node's disk.
    """

    def __init__(self, path: str, limit_mib: int, stdout: int, stderr: int) -> None:
        self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._bytes_left = limit_mib * procfs.MIB - os.fstat(self._log).st_size
        self._limit_mib = limit_mib
        self._dropped_bytes = 0
        self._streams: Dict[int, bytes] = {stdout: STDOUT, stderr: STDERR}
        threading.stack_size(256 * 1024)
        self._thread = threading.Thread(target=self._copy, name="log", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all output is written."""
        self._thread.join(timeout=_ENDS_WITHIN_S)

    def _copy(self) -> None:
        while self._streams:
            ready, _, _ = select.select(list(self._streams), [], [])
            for reading in ready:
                data = os.read(reading, _READ_BYTES)
                if data:
                    self._append(self._streams[reading], data)
                else:
                    del self._streams[reading]
        if self._dropped_bytes:
            self._write_marker(f"fairway: {self._dropped_bytes} bytes were dropped here.")

    def _append(self, stream: bytes, data: bytes) -> None:
        """Append output; after the first piece beyond the limit everything is dropped."""
        lines = to_log_lines(stream, data, time.time_ns())
        if len(lines) > self._bytes_left:
            if not self._dropped_bytes:
                self._bytes_left = 0
                self._write_marker(log_cut_message(self._limit_mib))
            self._dropped_bytes += len(data)
            return
        self._bytes_left -= len(lines)
        self._write(lines)

    def _write_marker(self, words: str) -> None:
        self._write(to_log_lines(STDOUT, words.encode() + b"\n", time.time_ns()))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._log, view) :]
        except OSError:  # with a full disk the output is lost, but the task continues
            return


def to_log_lines(stream: bytes, data: bytes, now_ns: int) -> bytes:
    """Return log lines: complete ones (F), and an incomplete one (P) at the end."""
    seconds, fraction = divmod(now_ns, 1_000_000_000)
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    head = f"{moment}.{fraction:09d}+00:00 ".encode() + stream
    whole, newline, begun = data.rpartition(b"\n")
    lines = b"".join((head, b" F ", whole.replace(b"\n", b"\n" + head + b" F "), b"\n")) if newline else b""
    return lines + (b"".join((head, b" P ", begun, b"\n")) if begun else b"")


def log_cut_message(limit_mib: int) -> str:
    """Return the message at the end of a log that reached its limit."""
    return f"fairway: log truncated at {limit_mib} MiB; further output is discarded."
