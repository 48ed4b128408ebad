"""What a terminal shows of a line that a program wrote, without colors."""

from __future__ import annotations

import re
import unicodedata

TAB_STOP = 8
MAX_COLUMNS = 16_384
_IGNORED = re.compile(
    r"(?:\x1b\[[0-?]*[ -/]*[@ABH-IL-OQ-WY-_a-~]"
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b\[[0-?]*[ -/]*\Z"  # the beginning of a sequence, whose rest is not written yet
    r"|\x1b[ -/]+[0-~]|\x1b(?!\[)[0-~]|\x1b(?!\[[0-?]*[ -/]*[C-GJKPX`])"
    r"|[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f\x80-\x84\x86-\x9f])+"
)
"""What changes nothing in the line: colors, movements to other lines, strings such as titles and links (ECMA-48,
section 5). No match extends past the next escape, so malformed lines need one pass."""
_TOKEN = re.compile(
    r"(?P<text>[^\x08-\x0d\x1b\x85]+)|\x1b\[(?P<parameters>[0-?]*)[ -/]*(?P<command>[C-GJKPX`])|(?P<control>.)",
    re.DOTALL,
)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_MOVEMENT = re.compile(r"[\x08\x0a-\x0d\x1b\x85]")
_LIKE_SPACES = "\x0b\x0c\x85"
"""Vertical tab, form feed and next line: what they separate stays separate."""


def terminal_text(text: str) -> str:
    """Return a line as a terminal of unlimited width shows it in the end.

    A carriage return, a backspace and cursor movements within the line overwrite what is there. Movements to other
    lines are left out: a log is shown line by line.
    """
    if not _CONTROL.search(text):
        return text
    text = _IGNORED.sub("", text)
    if not _MOVEMENT.search(text):
        return text
    row = _Row()
    for token in _TOKEN.finditer(text):
        if token["text"]:
            row.write(token["text"])
        elif token["command"]:
            row.control(token["command"], token["parameters"])
        elif control := token["control"]:
            if control == "\r":
                row.column = 0
            elif control == "\b":
                row.column = max(0, row.column - 1)
            elif control == "\t":
                row.move_to(row.column + TAB_STOP - row.column % TAB_STOP)
            elif control in _LIKE_SPACES:
                row.write(" ")
    return "".join(row.cells).rstrip(" ")


class _Row:
    """The cells of a line and the cursor. The second cell of a wide character is empty."""

    def __init__(self) -> None:
        self.cells: list[str] = []
        self.column = 0

    def write(self, text: str) -> None:
        cells = list(text) if text.isascii() else _cells(text)
        if self.column > len(self.cells):
            self.cells += [" "] * (self.column - len(self.cells))
        if cells and not cells[0].isascii() and unicodedata.combining(cells[0][0]) and self.column:
            self.cells[self.column - 1] += cells.pop(0)
        end = self.column + len(cells)
        self._split_wide(self.column)
        self._split_wide(end)
        self.cells[self.column : end] = cells
        self.column = min(end, MAX_COLUMNS)

    def move_to(self, column: int) -> None:
        self.column = max(0, min(column, MAX_COLUMNS))

    def control(self, command: str, parameters: str) -> None:
        first = parameters.split(";")[0]
        count = int(first[:6]) if first.isdecimal() else 0
        match command:
            case "C":
                self.move_to(self.column + max(1, count))
            case "D":
                self.move_to(self.column - max(1, count))
            case "E" | "F":
                self.move_to(0)
            case "G" | "`":
                self.move_to(count - 1)
            case "K":
                self._erase(count)
            case "J" if count in (0, 2):
                self._erase(count)
            case "P":
                del self.cells[self.column : self.column + max(1, count)]
            case "X":
                end = min(self.column + max(1, count), len(self.cells))
                self.cells[self.column : end] = [" "] * max(0, end - self.column)

    def _erase(self, mode: int) -> None:
        if mode == 0:
            self._split_wide(self.column)
            del self.cells[self.column :]
        elif mode == 1:
            end = min(self.column + 1, len(self.cells))
            self.cells[:end] = [" "] * end
        else:
            self.cells.clear()

    def _split_wide(self, column: int) -> None:
        """Erase a wide character of which only the second cell is at or after ``column``."""
        if 0 < column < len(self.cells) and self.cells[column] == "":
            self.cells[column - 1 : column + 1] = [" ", " "]


def _cells(text: str) -> list[str]:
    cells: list[str] = []
    for each in text:
        if cells and (unicodedata.combining(each) or each in "\u200d\ufe0e\ufe0f"):
            place = -1 if cells[-1] or len(cells) == 1 else -2
            cells[place] += each
        elif unicodedata.east_asian_width(each) in "WF":
            cells += [each, ""]
        else:
            cells.append(each)
    return cells
