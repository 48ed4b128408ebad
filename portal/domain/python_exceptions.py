"""Finds the Python exception with which a program ended in its log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_LINES_AFTER = 8
"""Of other output after a traceback; after more, the program caught the exception and continued."""
MAX_LINES_AFTER_WRAPPER = 80
"""The same where a launcher reports the end, which takes more lines."""
MAX_MESSAGE_LINES = 4
MAX_PREFIX_CHARACTERS = 80
_HEADING = "Traceback (most recent call last):"
_START = re.compile(r"(?P<prefix>.*?)(?P<group>\+ Exception Group )?Traceback \(most recent call last\):\s*$")
_EXCEPTION = re.compile(r"(?P<type>[^\W\d][\w.]*)(?::(?= |$).*)?$")
_FILE = re.compile(r'  File "[^"]+", line \d+$')
_WRAPPERS = re.compile(
    r"(\w+\.)*(ChildFailedError|CalledProcessError|ProcessExitedException|BrokenProcessPool|SignalException"
    r"|RayTaskError|TuneError)$"
)
"""Exceptions of launchers, which report that a process failed; its own exception is the cause."""


@dataclass
class _Traceback:
    """A traceback from line ``start``. ``text`` is its exception, which the line before ``end`` completes."""

    prefix: str
    start: int
    text: str = ""
    end: int = 0
    lines: int = 0
    message: list[str] = field(default_factory=list)

    @property
    def is_wrapper(self) -> bool:
        return bool(_WRAPPERS.match(self.text.split(":", 1)[0]))


def last_exception(lines: Sequence[str]) -> str:
    """Return type and message of the last exception that is not caught, "" if the log does not end with one.

    Of a chain, that is the one that ended the program. A prefix before each line, such as [rank0]:, is left out. The
    exception of a launcher counts only if there is no other; that of torchrun names no cause and never counts. Of a
    message of several lines, the first one and indented ones after it are returned.
    """
    found = _tracebacks(lines)
    wrapper = ""
    end, allowed = len(lines), MAX_LINES_AFTER
    covered: set[int] = set()
    for each in reversed(found):
        covered.update(range(each.start, each.end))
        if each.is_wrapper:
            wrapper = wrapper or ("" if "ChildFailedError" in each.text else each.text)
            end, allowed = each.start, MAX_LINES_AFTER_WRAPPER
            continue
        others = sum(bool(lines[at].strip()) for at in range(each.end, end) if at not in covered)
        if others <= allowed:
            return " ".join([each.text, *each.message])
        break
    return wrapper


def _tracebacks(lines: Sequence[str]) -> list[_Traceback]:
    """Return the complete tracebacks in the order in which they end."""
    found: list[_Traceback] = []
    open_ones: dict[str, _Traceback] = {}
    groups: dict[str, _Traceback] = {}
    for at, line in enumerate(lines):
        for base, each in groups.items():
            if each.end == at and line.startswith(base) and line[len(base) :].lstrip()[:1] in ("|", "+"):
                each.end = at + 1  # the exceptions of the group
        start = _START.match(line) if _HEADING in line else None
        if start is None and "  File " in line and not open_ones and _FILE.match(line):
            open_ones[""] = _Traceback("", at)  # a syntax error of the program itself has no heading
            continue
        if start is not None and len(start["prefix"]) <= MAX_PREFIX_CHARACTERS:
            prefix = start["prefix"].rstrip()
            gutter = f"{start['prefix']}|" if start["group"] else prefix
            if start["group"]:
                groups[prefix] = open_ones[gutter] = _Traceback(gutter, at)
            elif not (prefix.endswith("|") and prefix[:-1].rstrip() in groups):
                open_ones[gutter] = _Traceback(gutter, at)
            continue
        for gutter, each in list(open_ones.items()):
            if line.startswith(gutter):
                _continue(each, line[len(gutter) :], at)
                break
        for gutter, each in list(open_ones.items()):
            if each.text and (each.end <= at or each.lines > MAX_MESSAGE_LINES):
                found.append(open_ones.pop(gutter))
    found += [each for each in open_ones.values() if each.text]
    return [each for each in found if each.text]


def _continue(traceback: _Traceback, text: str, at: int) -> None:
    """Take the next line of a traceback, without its prefix."""
    shown = text[1:] if traceback.prefix and text.startswith(" ") else text
    if traceback.text:
        traceback.lines += 1
        if shown.startswith((" ", "\t")) and shown.strip():
            traceback.message.append(shown.strip())
            traceback.end = at + 1
        return
    if (
        not shown.strip()
        or shown.startswith((" ", "\t"))
        or shown.lstrip().startswith(("...<", "[Previous line"))
    ):
        return
    if _EXCEPTION.match(shown.rstrip()):
        text = shown.strip()
        traceback.text, traceback.end = text.removesuffix(":") if " " not in text else text, at + 1
