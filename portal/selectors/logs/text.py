"""A mirrored log as plain text by byte offset: a chunk, the tail, or all of it, for scripts and downloads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from portal.selectors.logs.files import TIMESTAMP_PREFIX
from portal.selectors.logs.lines import LogFile, open_log

CHUNK_BYTES = 256 * 1024
MAX_TAIL_LINES = 5000


@dataclass(frozen=True)
class LogChunk:
    """Bytes of a log file from offset ``start``; ``size_bytes`` is the size of the file."""

    data: bytes
    start: int
    size_bytes: int

    @property
    def end(self) -> int:
        """The offset at which reading continues."""
        return self.start + len(self.data)


def read_chunk(log: LogFile, offset: int, limit: int) -> LogChunk:
    """Return complete lines from ``offset``, at most ``limit`` bytes; a longer line is split."""
    size = log.size_bytes
    start = min(offset, size)
    with open_log(log) as file:
        file.seek(start)
        data = file.read(limit)
    lines_end = data.rfind(b"\n") + 1
    return LogChunk(data[: lines_end or len(data)] if len(data) == limit else data, start, size)


def read_tail(log: LogFile, lines: int) -> LogChunk:
    """Return the last lines, within ``CHUNK_BYTES``."""
    size = log.size_bytes
    start = max(0, size - CHUNK_BYTES)
    with open_log(log) as file:
        file.seek(start)
        data = file.read(CHUNK_BYTES)
    if start:
        data = data[data.find(b"\n") + 1 :]
    last = b"".join(data.splitlines(keepends=True)[-lines:])
    return LogChunk(last, size - len(last), size)


def read_all(log: LogFile, *, timestamps: bool, max_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the mirrored log, or its first ``max_bytes``; ``timestamps`` keeps time and stream per line."""
    left = log.size_bytes if max_bytes is None else max_bytes
    with open_log(log) as file:
        while left > 0 and (lines := file.readlines(min(CHUNK_BYTES, left))):
            piece = b"".join(lines)[:left]
            left -= len(piece)
            yield piece if timestamps else strip_timestamps(log, piece)


def text_size(log: LogFile, *, timestamps: bool, max_bytes: int) -> int:
    """Return the number of bytes that ``read_all`` yields; without timestamps the log is read for it."""
    if timestamps or log.log_format != "k8s":
        return max_bytes
    return sum(map(len, read_all(log, timestamps=False, max_bytes=max_bytes)))


def slice_chunks(chunks: Iterator[bytes], start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes of ``chunks`` from ``start`` up to, not including, ``stop``."""
    at = 0
    for piece in chunks:
        if at >= stop:
            return
        if at + len(piece) > start:
            yield piece[max(0, start - at) : stop - at]
        at += len(piece)


def strip_timestamps(log: LogFile, data: bytes) -> bytes:
    """Return the lines without time and stream, if the format has them; pieces of a line are joined."""
    if log.log_format != "k8s":
        return data
    return b"".join(_strip_timestamp(line) for line in data.splitlines(keepends=True))


def _strip_timestamp(line: bytes) -> bytes:
    found = TIMESTAMP_PREFIX.match(line)
    if found is None:
        return line
    rest = line[found.end() :]
    return rest.rstrip(b"\n") if found[3] == b"P" else rest
