"""What commands print: tables, fields, logs and texts, or JSON with --json. They return the exit code."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from .api import Job
from .options import OK

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


def write_log(given: argparse.Namespace, job: Job, **which: Any) -> int:
    """Write a log unchanged; with --json a JSON object, or one a line while it is followed."""
    if not given.json:
        return write_bytes(job.log_bytes(**which))
    place = {"job": job.id, "rank": which.get("rank", 0)}
    if not which["follow"]:
        print(json.dumps({**place, "text": "".join(job.logs(**which))}))
        return OK
    for text in job.logs(**which):
        print(json.dumps({**place, "text": text}), flush=True)
    return OK


def print_text(given: argparse.Namespace, name: str, text: str) -> int:
    """Print a text of several lines; with --json as the value of ``name``."""
    print(json.dumps({name: text})) if given.json else print(text, end="")
    return OK


def write_bytes(pieces: Iterable[bytes]) -> int:
    """Write bytes unchanged; a stream that takes only text gets them as text."""
    sink = getattr(sys.stdout, "buffer", None)
    sys.stdout.flush()
    for piece in pieces:
        if sink is None:
            sys.stdout.write(piece.decode("utf-8", "replace"))
        else:
            sink.write(piece)
        sys.stdout.flush()
    return OK


def print_fields(given: argparse.Namespace, data: Any, shown: dict[str, Any]) -> int:
    if given.json:
        print(json.dumps(data, indent=1))
        return OK
    width = max(map(len, shown))
    for name, value in shown.items():
        if value not in (None, ""):
            print(f"{name:{width}}  {clean(value)}")
    return OK


def print_rows(given: argparse.Namespace, rows: list[dict[str, Any]], columns: Sequence[str]) -> int:
    """Print a table; a column is a path such as project.name, and amounts of milli are whole units."""
    if given.json:
        print(json.dumps(rows, indent=1))
        return OK
    heads = [
        each.replace(".name", "").replace(".username", "").replace("_milli", "").upper() for each in columns
    ]
    table = [heads, *([cell(row, column) for column in columns] for row in rows)]
    widths = [max(len(line[number]) for line in table) for number in range(len(columns))]
    for line in table:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths)).rstrip())
    return OK


def cell(row: dict[str, Any], column: str) -> str:
    value: Any = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if column.endswith("_milli") and value is not None:
        return f"{value / 1000:g}"
    return "-" if value is None else clean(value)


def clean(value: object) -> str:
    """Return a text without control characters, which a terminal would interpret."""
    return _CONTROL.sub(" ", str(value))
