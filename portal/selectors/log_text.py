"""A mirrored log as plain text by byte offset: a piece, the last lines, or all of it; for scripts and downloads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from portal.selectors.log_files import STAMP
from portal.selectors.logs import LogFile, opened

PIECE_BYTES = 256 * 1024
MAX_TAIL_LINES = 5000


@dataclass(frozen=True)
class Piece:
    """Bytes of a log as they stand in the file, from offset ``start`` on; ``size_bytes`` is the file's."""

    data: bytes
    start: int
    size_bytes: int

    @property
    def end(self) -> int:
        """The offset at which reading goes on."""
        return self.start + len(self.data)


def read_piece(log: LogFile, offset: int, limit: int) -> Piece:
    """Whole lines from ``offset`` on, at most ``limit`` bytes; a longer line comes in pieces."""
    size = log.size_bytes
    start = min(offset, size)
    with opened(log) as file:
        file.seek(start)
        data = file.read(limit)
    lines_end = data.rfind(b"\n") + 1
    return Piece(data[: lines_end or len(data)] if len(data) == limit else data, start, size)


def read_tail(log: LogFile, lines: int) -> Piece:
    """The last lines, as far as ``PIECE_BYTES`` reach."""
    size = log.size_bytes
    start = max(0, size - PIECE_BYTES)
    with opened(log) as file:
        file.seek(start)
        data = file.read(PIECE_BYTES)
    if start:
        data = data[data.find(b"\n") + 1 :]
    last = b"".join(data.splitlines(keepends=True)[-lines:])
    return Piece(last, size - len(last), size)


def whole(log: LogFile, *, stamps: bool, upto: int | None = None) -> Iterator[bytes]:
    """What is mirrored, or its first ``upto`` bytes, in pieces; ``stamps`` keeps time and stream before each line."""
    left = log.size_bytes if upto is None else upto
    with opened(log) as file:
        while left > 0 and (lines := file.readlines(min(PIECE_BYTES, left))):
            piece = b"".join(lines)[:left]
            left -= len(piece)
            yield piece if stamps else without_stamps(log, piece)


def size_of(log: LogFile, *, stamps: bool, upto: int) -> int:
    """How many bytes ``whole`` gives: counted where stamps are taken out, so it reads the log once."""
    if stamps or log.form != "k8s":
        return upto
    return sum(map(len, whole(log, stamps=False, upto=upto)))


def part(pieces: Iterator[bytes], start: int, stop: int) -> Iterator[bytes]:
    """Of all the bytes of pieces those from ``start`` up to, not including, ``stop``."""
    at = 0
    for piece in pieces:
        if at >= stop:
            return
        if at + len(piece) > start:
            yield piece[max(0, start - at) : stop - at]
        at += len(piece)


def without_stamps(log: LogFile, data: bytes) -> bytes:
    """The lines without time and stream, where the log's format has them; pieces of one line are joined."""
    if log.form != "k8s":
        return data
    return b"".join(_plain(line) for line in data.splitlines(keepends=True))


def _plain(line: bytes) -> bytes:
    found = STAMP.match(line)
    if found is None:
        return line
    rest = line[found.end() :]
    return rest.rstrip(b"\n") if found[3] == b"P" else rest
