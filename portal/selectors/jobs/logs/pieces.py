"""A mirrored log in pieces: what a program wrote to one stream at once, as its node stored it.

Only a newline byte ends a line: a carriage return, a form feed and U+2028 are bytes of the program like others.
Every reader of logs uses this module, so that all of them find the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from portal.selectors.jobs.logs.files import TIMESTAMP_PREFIX

PIECE_BYTES = 64 * 1024
"""A longer line of the file is split at multiples of this offset, wherever reading starts."""
READ_BYTES = 1024 * 1024
_MAX_HEADER_BYTES = 128
_HEADER_BEGINNING = re.compile(rb"[\dT:.+Z-]{0,40}(?: [a-z]{0,6}(?: [FP]?)?)?")
"""What may be the beginning of a header whose rest is not copied yet."""


class Header(NamedTuple):
    """Time, stream, and whether the program ended the line here; of bytes without a header all are unknown."""

    at: str | None
    stream: str
    ends_line: bool


_NO_HEADER = Header(None, "", ends_line=True)


class Piece(NamedTuple):
    """A piece from byte ``start`` of the file up to, not including, ``end``; its text begins at ``text_start``.

    ``text`` has no newline; the program wrote one after it if ``ends_line``. Not ``finished``: the last piece of the
    file, of which more may be copied.
    """

    start: int
    text_start: int
    end: int
    at: str | None
    stream: str
    text: bytes
    ends_line: bool
    finished: bool

    @property
    def program_bytes(self) -> bytes:
        """What the program wrote."""
        return self.text + b"\n" if self.ends_line else self.text


def read_pieces(file: BinaryIO, log_format: str, start: int, size: int) -> Iterator[Piece]:
    """Yield the pieces of the first ``size`` bytes of a file, from the one that contains byte ``start``."""
    # Without headers, an earlier beginning changes nothing: the pieces of a long line end at multiples of an offset.
    line = _line_start(file, start, 0 if log_format == "k8s" else start - 2 * PIECE_BYTES)
    at = line if start < _next_split(line, line) else start - start % PIECE_BYTES
    header, header_bytes = _NO_HEADER, 0
    if log_format == "k8s" and at > line:
        file.seek(line)
        header, _ = _parse_header(file.read(_MAX_HEADER_BYTES))
    file.seek(at)
    base, data, done = at, b"", False
    while not done:
        read = file.read(min(READ_BYTES, size - base - len(data)))
        data, base = data[at - base :] + read, at
        done = not read or base + len(data) >= size
        while True:
            index = at - base
            if at == line:
                header_bytes = 0
                if log_format == "k8s":
                    header, header_bytes = _parse_header(data, index)
            newline = data.find(b"\n", index)
            split = _next_split(line, at)
            if newline >= 0 and base + newline < split:
                text = data[index + header_bytes : newline]
                yield Piece(
                    at, at + header_bytes, base + newline + 1, *header[:2], text, header[2], finished=True
                )
                at = line = base + newline + 1
            elif base + len(data) >= split:
                text = data[index + header_bytes : split - base]
                yield Piece(at, at + header_bytes, split, *header[:2], text, ends_line=False, finished=True)
                at, header_bytes = split, 0
            else:
                break
    rest = data[at - base :]
    if rest:
        text = rest[header_bytes:]
        if at == line and log_format == "k8s" and header is _NO_HEADER and _HEADER_BEGINNING.fullmatch(rest):
            text = b""
        end = at + len(rest)
        yield Piece(at, end - len(text), end, *header[:2], text, ends_line=False, finished=False)


def incomplete_suffix(data: bytes) -> int:
    """Return how many bytes at the end are the beginning of a character in UTF-8 whose rest is missing."""
    for count in range(1, min(3, len(data)) + 1):
        byte = data[-count]
        if byte & 0xC0 != 0x80:
            size = (
                4 if 0xF0 <= byte <= 0xF4 else 3 if 0xE0 <= byte <= 0xEF else 2 if 0xC2 <= byte <= 0xDF else 0
            )
            return count if size > count else 0
    return 0


def _next_split(line: int, at: int) -> int:
    """Return where a piece from ``at`` ends at the latest, in a line of the file from ``line``."""
    return -(-max(line + PIECE_BYTES, at + 1) // PIECE_BYTES) * PIECE_BYTES


def _line_start(file: BinaryIO, offset: int, lowest: int) -> int:
    """Return where the line of the file begins that contains byte ``offset``, ``lowest`` if it begins before that."""
    lowest = max(0, lowest)
    while offset > lowest:
        step = min(PIECE_BYTES, offset - lowest)
        file.seek(offset - step)
        newline = file.read(step).rfind(b"\n")
        if newline >= 0:
            return offset - step + newline + 1
        offset -= step
    return lowest


def _parse_header(data: bytes, index: int = 0) -> tuple[Header, int]:
    """Return the header at ``index`` and its length."""
    match = TIMESTAMP_PREFIX.match(data, index)
    if match is None:
        return _NO_HEADER, 0
    at, stream, mark = match.groups()
    return Header(at.decode(), stream.decode(), mark == b"F"), match.end() - index
