"""Reads JSON and comma-separated tables, plain or gzip; errors in tables name file, line and column."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from scheduler.replay.input_files import MalformedFileError, read_text

INTEGER = re.compile(r"[+-]?[0-9]+")
MAX_INTEGER = 10**15
"""Larger amounts (milli, MiB, seconds) are rejected, so that sums stay within 64 bits."""


def read_json(path: str | Path) -> Any:
    """Return the JSON value of a file. Raise MalformedFileError with line and column when it is invalid."""
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        location = f"line {error.lineno}, column {error.colno}"
        raise MalformedFileError(path, location, f"not valid JSON ({error.msg})") from None
    except RecursionError:
        raise MalformedFileError(path, "", "the JSON is nested too deeply") from None


class TableRow:
    """One row of a table; each accessor raises MalformedFileError with line and column."""

    __slots__ = ("_cells", "line", "path")

    def __init__(self, path: str | Path, line: int, cells: dict[str, str]) -> None:
        self.path = path
        self.line = line
        self._cells = cells

    def fail(self, column: str, message: str) -> NoReturn:
        """Raise MalformedFileError for the cell under ``column``."""
        raise MalformedFileError(self.path, f"line {self.line}, column {column}", message)

    def text(self, column: str, *, blank: bool = True) -> str:
        """Return the stripped cell; "" when the table lacks the column."""
        cell = self._cells.get(column, "").strip()
        if not cell and not blank:
            self.fail(column, "it is empty")
        return cell

    def integer(self, column: str, low: int = 0, high: int = MAX_INTEGER) -> int:
        """Return a whole number from ``low`` to ``high``, inclusive."""
        cell = self.text(column)
        if not INTEGER.fullmatch(cell) or len(cell) > 20:
            self.fail(column, f"{_quote(cell)} is not a whole number")
        number = int(cell)
        if not low <= number <= high:
            self.fail(column, f"{number} is not between {low} and {high}")
        return number

    def number(self, column: str, low: float = 0.0, high: float = float(MAX_INTEGER)) -> float:
        """Return a finite number from ``low`` to ``high``, inclusive."""
        cell = self.text(column)
        try:
            number = float(cell)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self.fail(column, f"{_quote(cell)} is not a number")
        if not low <= number <= high:
            self.fail(column, f"{cell} is not between {low:g} and {high:g}")
        return number


def read_rows(path: str | Path, columns: tuple[str, ...]) -> Iterator[TableRow]:
    """Yield the rows of a comma-separated table whose header has at least ``columns``; empty lines are
    skipped.

    Raise MalformedFileError when a column is missing, or a row has another number of cells than the header.
    """
    lines = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        names = [name.strip() for name in next(lines, [])]
        for column in columns:
            if names.count(column) != 1:
                how_often = "missing" if column not in names else "named twice"
                raise MalformedFileError(path, "line 1", f"the column {column} is {how_often}")
        for cells in lines:
            if not cells:
                continue
            if len(cells) != len(names):
                wrong = f"{len(cells)} cells, but the header has {len(names)}"
                raise MalformedFileError(path, f"line {lines.line_num}", wrong)
            yield TableRow(path, lines.line_num, dict(zip(names, cells, strict=True)))
    except csv.Error as error:
        raise MalformedFileError(path, f"line {lines.line_num}", f"not a valid CSV line ({error})") from None


def _quote(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else cell[:40] + "…")
