"""Finds the Python exception with which a program ended in its log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_LINES_AFTER = 20
"""Of other output after a traceback, such as what mpirun and Weights & Biases report at the end; after more, the
program caught the exception and continued."""
MAX_LINES_AFTER_WRAPPER = 80
"""The same where a launcher reports the end, which takes more lines."""
MAX_MESSAGE_LINES = 4
MAX_PREFIX_CHARACTERS = 80
_HEADING = "Traceback (most recent call last):"
_GROUP = "+ Exception Group "
_TYPE = r"[^\W\d]\w*(?:\.(?:\w+|<locals>))*"
_EXCEPTION = re.compile(rf"{_TYPE}(?::(?= |$).*)?$")
_NOTEBOOK = re.compile(rf"{_TYPE} {{2,}}Traceback \(most recent call last\)$")
"""The heading of IPython, after the type of the exception."""
_FILE = re.compile(r'  File "[^"]+", line \d+$')
_WRAPPERS = re.compile(
    r"(\w+\.)*(ChildFailedError|CalledProcessError|ProcessExitedException|BrokenProcessPool|SignalException"
    r"|RayTaskError|TuneError|CellExecutionError|PapermillExecutionError)$"
)
"""Exceptions of launchers, which report that a process failed; its own exception is the cause."""
_REPORT = re.compile(r"Exception in (thread|callback) |(Task|Future) exception was never retrieved|future: <")
"""Before an exception that ended a thread or an asyncio task: the cause only if there is no other."""
_IGNORED = re.compile(r"Exception ignored |--- Logging error ---|Error in atexit\.")
"""Before an exception that ended nothing."""


@dataclass
class _Traceback:
    """A traceback from line ``start``, before which ``introduction`` is.

    ``text`` is its exception, which the line before ``end`` completes. ``lines`` counts lines that are not indented:
    other output before the exception, and further lines of its message.
    """

    prefix: str
    start: int
    introduction: str = ""
    text: str = ""
    end: int = 0
    lines: int = 0
    message: list[str] = field(default_factory=list)

    @property
    def process(self) -> str:
        """The prefix of the process that wrote it, "" without one."""
        return self.prefix.removesuffix("|").rstrip()

    @property
    def is_wrapper(self) -> bool:
        return bool(_WRAPPERS.match(self.text.split(":", 1)[0]))


def last_exception(lines: Sequence[str]) -> str:
    """Return type and message of the last exception that is not caught, "" if the log does not end with one.

    Of a chain, that is the one that ended the program. A prefix before each line, such as [rank0]:, is left out; of
    several processes with a prefix, the one that failed first counts. The exception of a launcher, a thread or an
    asyncio task counts only if there is no other; one that Python ignored, and that of torchrun, which names no
    cause, never count. Of a message of several lines, the first one and indented ones after it are returned.
    """
    fallback = ""
    last: dict[str, _Traceback] = {}
    end, allowed = len(lines), MAX_LINES_AFTER
    covered: set[int] = set()
    for each in reversed(_tracebacks(lines)):
        covered.update(range(each.start, each.end))
        others = sum(bool(lines[at].strip()) for at in range(each.end, end) if at not in covered)
        if each.is_wrapper:
            fallback = fallback or ("" if "ChildFailedError" in each.text else each.text)
            end, allowed = each.start, MAX_LINES_AFTER_WRAPPER
        elif _IGNORED.match(each.introduction):
            continue
        elif others > allowed:
            break
        elif _REPORT.match(each.introduction):
            fallback = fallback or _quote(each)
        elif each.process not in last and (each.process or not last):
            last[each.process] = each
            if not each.process:
                break
    return _quote(min(last.values(), key=lambda each: each.start)) if last else fallback


def _quote(traceback: _Traceback) -> str:
    return " ".join([traceback.text, *traceback.message])


def _tracebacks(lines: Sequence[str]) -> list[_Traceback]:
    """Return the complete tracebacks in the order in which they begin."""
    found: list[_Traceback] = []
    open_ones: dict[str, _Traceback] = {}
    groups: dict[str, _Traceback] = {}

    def open_one(gutter: str, opened: _Traceback) -> None:
        if gutter in open_ones:
            found.append(open_ones.pop(gutter))
        open_ones[gutter] = opened

    for at, line in enumerate(lines):
        for base, each in groups.items():
            if each.end == at and line.startswith(base) and line[len(base) :].lstrip()[:1] in ("|", "+"):
                each.end = at + 1  # the exceptions of the group
        if "  File " in line and not open_ones and _FILE.match(line):
            open_one("", _Traceback("", at))  # a syntax error of the program itself has no heading
            continue
        shown = line.rstrip()
        before = "" if _NOTEBOOK.match(shown) else shown.removesuffix(_HEADING)
        if before != shown and len(before) <= MAX_PREFIX_CHARACTERS:
            before, is_group = before.removesuffix(_GROUP), before.endswith(_GROUP)
            prefix = before.rstrip()
            introduction = lines[at - 1].removeprefix(prefix).lstrip() if at else ""
            if is_group:
                gutter = f"{before}|"
                groups[prefix] = group = _Traceback(gutter, at, introduction)
                open_one(gutter, group)
            elif not (prefix.endswith("|") and prefix[:-1].rstrip() in groups):
                open_one(prefix, _Traceback(prefix, at, introduction))
            continue
        for gutter, each in list(open_ones.items()):
            if line.startswith(gutter):
                _continue(each, line[len(gutter) :], at)
                break
        for gutter, each in list(open_ones.items()):
            if each.lines > MAX_MESSAGE_LINES:
                found.append(open_ones.pop(gutter))
    complete = (each for each in [*found, *open_ones.values()] if each.text)
    return sorted(complete, key=lambda each: each.start)


def _continue(traceback: _Traceback, text: str, at: int) -> None:
    """Take the next line of a traceback, without its prefix."""
    shown = text[1:] if traceback.prefix and text.startswith(" ") else text
    is_indented = shown.startswith((" ", "\t"))
    if not shown.strip() or (not traceback.text and shown.startswith("...<")):
        return
    if traceback.text:
        traceback.lines += not is_indented
        traceback.end = at + 1 if is_indented else traceback.end
        if is_indented and not traceback.lines and len(traceback.message) < MAX_MESSAGE_LINES:
            traceback.message.append(shown.strip())
    elif not is_indented and _EXCEPTION.match(shown.rstrip()):
        traceback.text, traceback.end = shown.strip(), at + 1
        if " " not in traceback.text:
            traceback.text = traceback.text.removesuffix(":")
    elif not is_indented:
        traceback.lines += 1
