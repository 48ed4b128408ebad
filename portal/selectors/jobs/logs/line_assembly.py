"""Joins the pieces of a log to lines, with a limit on how long one is awaited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from portal.selectors.jobs.logs.pieces import PIECE_BYTES, Piece, incomplete_suffix

MAX_LINE_CHARACTERS = 16_384
MAX_PRECEDING_CHARACTERS = 200
CUT = "… (cut)"
"""After what is shown of a longer text."""
CONTEXT_BLOCKS = 4


@dataclass(frozen=True)
class LogLine:
    """One line, or a part of a very long one. ``at`` is an ISO time or None; ``stream`` is stdout, stderr, or blank
    if unknown. ``cursor`` is the byte offset of its first piece, ``end_cursor`` of the piece that ended it.
    """

    at: str | None
    stream: str
    text: str
    cursor: int
    end_cursor: int = 0
    whole_text: str = ""
    """The text if it is longer than ``text``, which is cut."""
    preceding: str = ""
    """The end of the part before it of the same line, so that a search finds what is divided between the two."""
    is_overwritten: bool = False
    """True if what follows in the same line replaces this on a terminal, as the later states of a progress bar do."""

    @property
    def searched_text(self) -> str:
        return self.whole_text or self.text


@dataclass
class _OpenLine:
    """The pieces of a line so far."""

    at: str | None
    start: int
    parts: list[bytes]
    preceding: str = ""
    last_at: str | None = None


@dataclass
class _Block:
    """What the pieces that end in a block of the file say about each stream."""

    has_end: set[str] = field(default_factory=set)
    is_open: dict[str, bool] = field(default_factory=dict)


class LineAssembler:
    """Joins pieces, in their order, to lines.

    A line that the program does not end would be awaited for ever. So before the first piece that ends in a new
    block of ``PIECE_BYTES`` of the file, the unfinished line of a stream is cut if the stream ended no line in the
    block before and had an unfinished one at the end of the block before that, or wrote nothing in the block before.
    ``CONTEXT_BLOCKS`` before an offset thus determine what is unfinished there, and reading can start anywhere with
    the same result.

    A line is cut after its last carriage return, because a terminal shows only what follows; without one, after its
    last complete character.
    """

    def __init__(self) -> None:
        self._open: dict[str, _OpenLine] = {}
        self._block, self._end = -1, 0
        self._current, self._last, self._before_last = _Block(), _Block(), _Block()

    def add(self, piece: Piece) -> list[LogLine]:
        """Return the lines that end with the piece, or before it because they are too long."""
        block = max(0, piece.end - 1) // PIECE_BYTES
        cut = list(self._advance_to(block, piece.start)) if block > self._block else []
        line = self._open.get(piece.stream)
        if line is None:
            line = self._open[piece.stream] = _OpenLine(piece.at, piece.start, [])
        self._end = piece.start
        line.parts.append(piece.text)
        line.last_at = piece.at
        self._current.is_open[piece.stream] = not piece.ends_line
        if not piece.ends_line:
            return cut
        self._current.has_end.add(piece.stream)
        del self._open[piece.stream]
        return [*cut, _line(piece.stream, line, b"".join(line.parts), piece.start)]

    def unfinished(self) -> list[LogLine]:
        """Return the lines that have not ended, as they are now."""
        lines = (_line(stream, line, b"".join(line.parts), self._end) for stream, line in self._open.items())
        return sorted((line for line in lines if line.text), key=lambda line: line.cursor)

    def _advance_to(self, block: int, offset: int) -> Iterator[LogLine]:
        for _ in range(min(block - self._block, 3) if self._block >= 0 else 0):
            self._before_last, self._last, self._current = self._last, self._current, _Block()
            for stream in list(self._open):
                if stream not in self._last.is_open:
                    line = self._open.pop(stream)
                    data = b"".join(line.parts)
                    yield from [_line(stream, line, data, offset)] if data else []
                elif stream not in self._last.has_end and self._before_last.is_open.get(stream):
                    yield self._cut(stream, offset)
        self._block = block

    def _cut(self, stream: str, offset: int) -> LogLine:
        line = self._open.pop(stream)
        data = b"".join(line.parts)
        end = data.rfind(b"\r", 0, len(data) - 1) + 1
        is_overwritten = end > 0 and len(data) - end <= MAX_LINE_CHARACTERS
        if not is_overwritten:
            end = len(data) - incomplete_suffix(data)
        part = _line(stream, line, data[:end], offset, is_overwritten=is_overwritten)
        preceding = part.searched_text[-MAX_PRECEDING_CHARACTERS:]
        self._open[stream] = _OpenLine(line.last_at, offset, [data[end:]], preceding)
        return part


def _line(stream: str, line: _OpenLine, data: bytes, end: int, *, is_overwritten: bool = False) -> LogLine:
    text = data.decode("utf-8", "replace")
    shown, whole = text, ""
    if len(text) > MAX_LINE_CHARACTERS:
        last = text.find("\r", -MAX_LINE_CHARACTERS, -1) + 1
        shown, whole = text[last:] if last else f"{text[:MAX_LINE_CHARACTERS]} {CUT}", text
    return LogLine(line.at, stream, shown, line.start, end, whole, line.preceding, is_overwritten)
