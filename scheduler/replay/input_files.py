"""Reads plain or gzip input files; errors name the file and the location."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

GZIP_MAGIC = b"\x1f\x8b"


class MalformedFileError(Exception):
    """Invalid file content. ``location``: line, column or JSON path; "" is the whole file."""

    def __init__(self, path: str | Path, location: str, message: str) -> None:
        super().__init__(path, location, message)
        self.path = str(path)
        self.location = location
        self.message = message

    def __str__(self) -> str:
        return f"{', '.join(part for part in (self.path, self.location) if part)}: {self.message}"


def read_text(path: str | Path) -> str:
    """Return the text of a file, decompressed if it is gzip.

    Raise MalformedFileError when it is missing, unreadable, corrupt or not UTF-8.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise MalformedFileError(path, "", "no such file") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise MalformedFileError(path, "", f"cannot be read ({why})") from None
    if content.startswith(GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise MalformedFileError(
                path, "", f"the gzip archive is damaged or truncated ({error})"
            ) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise MalformedFileError(path, f"line {line}", "not UTF-8 text") from None
