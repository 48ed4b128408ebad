"""Prefixes log lines with the coloured name of their process."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import IO, TextIO

COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
MAX_LINE_BYTES = 16 * 1024
SUPERVISOR_NAME = "fairway"


class PrefixedWriter:
    """Write whole lines from several threads; a closed terminal silences it but never blocks a process."""

    def __init__(self, out: TextIO, *, quiet: bool = False) -> None:
        self._out = out
        self._colour = out.isatty() and "NO_COLOR" not in os.environ
        self._quiet = quiet
        self._lock = threading.Lock()
        self._colour_of: dict[str, int] = {}

    def supervisor_line(self, message: str) -> None:
        self._write(SUPERVISOR_NAME, message)

    def raw(self, text: str) -> None:
        """Write text without a prefix, for the person at the terminal."""
        self._put(text + "\n")

    def copy_from(self, name: str, source: IO[bytes]) -> None:
        """Write each line of a process until it closes its output."""
        with source:
            while line := source.readline(MAX_LINE_BYTES):
                if not self._quiet:
                    self._write(name, line.decode(errors="replace").rstrip("\r\n"))

    def _write(self, name: str, text: str) -> None:
        prefix = f"{name:<13} |"
        if self._colour:
            with self._lock:
                number = self._colour_of.setdefault(name, COLOURS[len(self._colour_of) % len(COLOURS)])
            prefix = f"\x1b[{number}m{prefix}\x1b[0m"
        self._put(f"{prefix} {text}\n")

    def _put(self, text: str) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError, OSError):
            self._out.write(text)
            self._out.flush()
