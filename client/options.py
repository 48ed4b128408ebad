"""Options of the command line: exit codes, what reads the values of options, and errors as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from .api import Refused

OK, REFUSED, USAGE, UNREACHABLE, JOB_FAILED, TIMED_OUT, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130
EXIT_CODES = {
    OK: "done; a job that was waited for completed",
    REFUSED: "the server refused the request, or the change of a job, or there is no address or token",
    USAGE: "the command line is wrong",
    UNREACHABLE: "the server did not answer, or could not work (502, 503, 504)",
    JOB_FAILED: "the job that was waited for ended without success",
    TIMED_OUT: "the job did not end in the given time",
    INTERRUPTED: "interrupted; the job goes on",
}


class Parser(argparse.ArgumentParser):
    wants_json = False
    """The command line has --json: what is wrong with it is then said as JSON, too."""

    def error(self, message: str) -> NoReturn:
        if self.wants_json:
            print_error(USAGE, ValueError(message))
        super().error(message)


def whole(name: str, low: int, high: int = 2**31) -> Callable[[str], int]:
    """Return what reads an option that takes a whole number from ``low`` to ``high``."""

    def read(text: str) -> int:
        if not re.fullmatch("-?[0-9]{1,18}", text) or not low <= int(text) <= high:
            upper = f" to {high}" if high < 2**31 else ""
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a {name}: give a whole number from {low}{upper}"
            )
        return int(text)

    return read


def seconds(name: str, *, least_s: float = 0.0) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value_s = float(text)
        except ValueError:
            value_s = math.nan
        if not least_s <= value_s < 1e9:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {name}: give seconds, such as 30")
        return value_s

    return read


_UNITS = {"_s": "seconds, such as 7200", "_mib": "MiB, such as 4096", "_milli": "thousandths, such as 500"}


def field_value(name: str, kind: type) -> Callable[[str], Any]:
    """Return what reads the option of a field. Texts with a unit, such as 2h, are for documents."""
    unit = next((text for end, text in _UNITS.items() if name.endswith(end)), "")

    def read(text: str) -> Any:
        if kind is str:
            return text
        try:
            value = kind(text)
            if math.isfinite(value):
                return value
        except (ValueError, OverflowError):
            pass
        sort = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{text!r} is not a {sort}{f'; give {unit}' if unit else ''}")

    return read


def print_error(code: int, error: Exception) -> None:
    """Print an error as JSON on standard output; standard error has it as text."""
    found: dict[str, Any] = {"exit_code": code, "message": str(error)}
    if isinstance(error, Refused):
        found |= {
            "status": error.status,
            "code": error.code,
            "errors": error.errors,
            "details": error.details,
        }
    with contextlib.suppress(OSError):  # the exit code remains
        print(json.dumps({"error": found}, indent=1), flush=True)
