"""Searches mirrored logs, for words or by a pattern, within bounds of time and bytes, rank after rank."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portal.errors import Invalid, Unavailable
from portal.selectors.logs import MAX_LINES, LogFile, LogLine, read_lines

WITHIN_S = 3.0
MAX_SEARCH_BYTES = 32 * 1024 * 1024
MAX_WORDS = 200
MATCHED_CHARACTERS = 4096
"""Only so much of a line is looked at by a pattern."""
MATCHES = 200
PATTERNS_AT_ONCE = 3
"""In one process; each is a process of its own."""
_CHILD = Path(__file__).with_name("pattern_child.py")
_turns = threading.BoundedSemaphore(PATTERNS_AT_ONCE)

Matcher = Callable[[Sequence[str]], list[int]]


@dataclass(frozen=True)
class Sought:
    """What is searched for; ``stream`` is stdout, stderr or "" for both. A line that does not tell is of both."""

    words: str
    pattern: bool = False
    case: bool = False
    stream: str = ""


@dataclass(frozen=True)
class Match:
    """A line that matches, and whose it is."""

    rank: int
    line: LogLine


@dataclass(frozen=True)
class Place:
    """Where a search goes on: an offset in the log of a rank."""

    rank: int
    offset: int = 0


@dataclass(frozen=True)
class Found:
    """Matches in order, and where to go on; None when everything that is here was searched."""

    matches: list[Match]
    next: Place | None


class _TimeIsUp(Exception):
    pass


def search(
    logs: Sequence[LogFile], sought: Sought, start: Place | None = None, limit: int = MATCHES
) -> Found:
    """Up to ``limit`` matches in the logs of ranks, from ``start`` on, one rank after the other.

    It ends sooner after 32 MiB or 3 s, and says where to go on. Raises Invalid for words or a pattern that cannot be
    searched for, or that take too long on a few lines; Unavailable while too many patterns are searched for.
    """
    if not sought.words or len(sought.words) > MAX_WORDS:
        raise Invalid(fields={"q": f"Give between 1 and {MAX_WORDS} characters to search for."})
    until_s = time.monotonic() + WITHIN_S
    found: list[Match] = []
    at = start or Place(min((log.rank for log in logs), default=0))
    left_bytes = MAX_SEARCH_BYTES
    moved = False
    with _matcher(sought, until_s) as matching:
        for log in sorted(logs, key=lambda each: each.rank):
            if log.rank < at.rank:
                continue
            cursor = at.offset if log.rank == at.rank else 0
            while True:
                at = Place(log.rank, cursor)
                if len(found) >= limit or left_bytes <= 0 or (moved and time.monotonic() >= until_s):
                    return Found(found[:limit], at)
                page = read_lines(log, cursor, MAX_LINES)
                if page.cursor == cursor:
                    break
                try:
                    places = matching([line.text for line in page.lines])
                except _TimeIsUp:
                    if not moved:
                        raise Invalid(fields={"q": "This pattern takes too long. Make it simpler."}) from None
                    return Found(found[:limit], at)
                moved = True
                hits = [page.lines[place] for place in places]
                hits = [line for line in hits if not sought.stream or line.stream in ("", sought.stream)]
                if len(found) + len(hits) > limit:
                    beyond = hits[limit - len(found)]
                    found += [Match(log.rank, line) for line in hits[: limit - len(found)]]
                    return Found(found, Place(log.rank, beyond.cursor))
                found += [Match(log.rank, line) for line in hits]
                left_bytes -= page.cursor - cursor
                cursor = page.cursor
    return Found(found, None)


@contextlib.contextmanager
def _matcher(sought: Sought, until_s: float) -> Iterator[Matcher]:
    if sought.pattern:
        with _pattern(sought, until_s) as matching:
            yield matching
        return
    wanted = sought.words if sought.case else sought.words.casefold()
    yield lambda texts: [
        place for place, text in enumerate(texts) if wanted in (text if sought.case else text.casefold())
    ]


@contextlib.contextmanager
def _pattern(sought: Sought, until_s: float) -> Iterator[Matcher]:
    """A matcher in a process of its own: Python's ``re`` may take for ever, and cannot be ended within ours."""
    if not _turns.acquire(timeout=0.5):
        raise Unavailable("Others search for patterns now. Try again in a moment.")
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
        )
        try:
            asked = json.dumps({"pattern": sought.words, "case": sought.case}).encode() + b"\n"
            fault = _asked(child, asked, until_s)["fault"]
            if fault is not None:
                raise Invalid(fields={"q": f"This is no pattern: {fault}."})

            def matching(texts: Sequence[str]) -> list[int]:
                block = json.dumps([text[:MATCHED_CHARACTERS] for text in texts]).encode()
                places: list[int] = _asked(child, b"%d\n" % len(block) + block, until_s)
                return places

            yield matching
        finally:
            child.kill()
            child.communicate()
    finally:
        _turns.release()


def _asked(child: subprocess.Popen[bytes], question: bytes, until_s: float) -> Any:
    """The child's answer; raises _TimeIsUp where none comes in time, or it has reached its own bounds."""
    assert child.stdin is not None and child.stdout is not None  # noqa: S101 - for the types: both are pipes
    answer = b""
    try:
        child.stdin.write(question)
        child.stdin.flush()
    except BrokenPipeError:
        raise _TimeIsUp from None
    while not answer.endswith(b"\n"):
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, until_s - time.monotonic()))
        piece = os.read(child.stdout.fileno(), 65_536) if ready else b""
        if not piece:
            raise _TimeIsUp
        answer += piece
    return json.loads(answer)
