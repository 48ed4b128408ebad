"""A mirrored log as plain text by byte offset: a chunk, the tail, or all of it, for scripts and downloads.

Without timestamps these are the bytes that the program wrote, in the order in which its node stored them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from portal.selectors.jobs.logs.lines import LogFile, open_log
from portal.selectors.jobs.logs.pieces import Piece, incomplete_suffix, read_pieces

CHUNK_BYTES = 256 * 1024
MAX_TAIL_LINES = 5000
_MAX_CHARACTER_BYTES = 4


@dataclass(frozen=True)
class LogChunk:
    """What was read from offset ``start`` up to ``end``, where reading continues; ``size_bytes`` is that of the file.

    No character of UTF-8 is divided between two chunks.
    """

    data: bytes
    start: int
    end: int
    size_bytes: int


def read_chunk(log: LogFile, offset: int, limit: int, *, timestamps: bool = False) -> LogChunk:
    """Return what follows ``offset``: complete lines, of at most ``limit`` bytes of the file; a longer line is split.

    The first characters of a last, unfinished line are returned too.
    """
    size = log.size_bytes
    start = min(offset, size)
    if timestamps:
        data = _read(log, start, start + limit)
        if len(data) == limit:
            data = data[: data.rfind(b"\n") + 1 or len(data)]
        if not log.complete or start + len(data) < size:
            data = data[: len(data) - incomplete_suffix(data)]
        return LogChunk(data, start, start + len(data), size)
    return _chunk(log, start, start + limit, size)


def _read(log: LogFile, start: int, end: int) -> bytes:
    with open_log(log) as file:
        file.seek(start)
        return file.read(end - start)


def _chunk(log: LogFile, start: int, limit_end: int, size: int) -> LogChunk:
    """Return the program's bytes in a part of the file: whole pieces, or as much of a longer one as fits."""
    parts: list[tuple[int, bytes]] = []  # with the offset of each in the file
    end, count = start, 0
    with open_log(log) as file:
        for piece in read_pieces(file, log.log_format, start, size):
            if piece.end > limit_end and (count >= _MAX_CHARACTER_BYTES or piece.start >= limit_end):
                break
            is_hidden = not piece.finished and not piece.text and piece.end > piece.start
            if is_hidden and not log.complete:
                break  # the beginning of a header
            first, last = max(start, piece.text_start), min(piece.end, limit_end)
            data = piece.program_bytes[first - piece.text_start : max(0, last - piece.text_start)]
            parts.append((first, data))
            count += len(data)
            end = last
    if not log.complete or end < size:
        missing = incomplete_suffix(b"".join(data for _, data in parts))
        while missing:
            at, data = parts.pop()
            kept = data[: max(0, len(data) - missing)]
            missing -= len(data) - len(kept)
            if len(data) > len(kept):
                end = at + len(kept)
            parts += [(at, kept)] if kept else []
    return LogChunk(b"".join(data for _, data in parts), start, end, size)


def read_tail(log: LogFile, lines: int, *, timestamps: bool = False) -> LogChunk:
    """Return the last lines, within ``CHUNK_BYTES``. An unfinished line counts as one."""
    size = log.size_bytes
    window = max(0, size - CHUNK_BYTES)
    with open_log(log) as file:
        pieces = list(read_pieces(file, log.log_format, window, size))
    ends = [piece.end for piece in pieces if piece.ends_line]
    if pieces and not pieces[-1].ends_line:
        ends.append(size)
    start = ends[-lines - 1] if len(ends) > lines else window
    if start == window > 0 and len(ends) > 1:
        start = ends[0]  # the beginning of the first line is not in the window
    if timestamps:
        return read_chunk(log, start, size - start + 1, timestamps=True)
    return _chunk(log, start, size, size)


def read_all(log: LogFile, *, timestamps: bool, max_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the mirrored log, or its first ``max_bytes``; ``timestamps`` keeps time and stream per line."""
    size = log.size_bytes if max_bytes is None else max_bytes
    with open_log(log) as file:
        if timestamps:
            while size > 0 and (data := file.read(min(CHUNK_BYTES, size))):
                size -= len(data)
                yield data
            return
        waiting: list[Piece] = []
        for piece in read_pieces(file, log.log_format, 0, size):
            waiting.append(piece)
            if piece.end - waiting[0].start >= CHUNK_BYTES:
                yield b"".join(each.program_bytes for each in waiting)
                waiting.clear()
        if waiting:
            yield b"".join(each.program_bytes for each in waiting)


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
