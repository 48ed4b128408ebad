"""Searches mirrored logs for text or a pattern, rank by rank, with limits on time and bytes."""

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

from django.utils.translation import gettext as _

from portal.errors import InvalidRequest, ServiceUnavailable
from portal.selectors.logs.lines import MAX_LINES, LogFile, LogLine, read_lines

SEARCH_TIMEOUT_S = 3.0
MAX_SEARCH_BYTES = 32 * 1024 * 1024
MAX_QUERY_LENGTH = 200
MAX_MATCHED_LINE_LENGTH = 4096
"""Patterns see only this much of a line."""
MAX_MATCHES = 200
MAX_CONCURRENT_PATTERNS = 3
"""Per process; each pattern search is a child process."""
_REGEX_WORKER = Path(__file__).with_name("regex_worker.py")
_pattern_slots = threading.BoundedSemaphore(MAX_CONCURRENT_PATTERNS)

Matcher = Callable[[Sequence[str]], list[int]]


@dataclass(frozen=True)
class LogSearchQuery:
    """The text and options of a search; ``stream`` is stdout, stderr or blank for both.

    A line of unknown stream belongs to both.
    """

    text: str
    is_regex: bool = False
    case_sensitive: bool = False
    stream: str = ""


@dataclass(frozen=True)
class Match:
    rank: int
    line: LogLine
    label: str


@dataclass(frozen=True)
class SearchCursor:
    """Where a search continues: an offset in the log of a rank."""

    rank: int
    offset: int = 0


@dataclass(frozen=True)
class SearchResult:
    """Matches in order, and where to continue; None if everything was searched."""

    matches: list[Match]
    next: SearchCursor | None


class _SearchTimeout(Exception):
    pass


def search(
    logs: Sequence[LogFile],
    query: LogSearchQuery,
    start: SearchCursor | None = None,
    limit: int = MAX_MATCHES,
) -> SearchResult:
    """Return up to ``limit`` matches in the logs of ranks from ``start`` on, rank by rank.

    Stops after 32 MiB or 3 s and returns where to continue. Raise InvalidRequest for a text or pattern that
    is invalid or takes too long on a few lines, ServiceUnavailable while too many pattern searches run.
    """
    if not query.text or len(query.text) > MAX_QUERY_LENGTH:
        raise InvalidRequest(
            fields={
                "q": _("Enter 1 to {max_query_length} characters to search for.").format(
                    max_query_length=MAX_QUERY_LENGTH
                )
            }
        )
    until_s = time.monotonic() + SEARCH_TIMEOUT_S
    found: list[Match] = []
    at = start or SearchCursor(min((log.rank for log in logs), default=0))
    left_bytes = MAX_SEARCH_BYTES
    moved = False
    with _matcher(query, until_s) as matching:
        for log in sorted(logs, key=lambda each: each.rank):
            if log.rank < at.rank:
                continue
            cursor = at.offset if log.rank == at.rank else 0
            while True:
                at = SearchCursor(log.rank, cursor)
                if len(found) >= limit or left_bytes <= 0 or (moved and time.monotonic() >= until_s):
                    return SearchResult(found[:limit], at)
                page = read_lines(log, cursor, MAX_LINES)
                if page.cursor == cursor:
                    break
                try:
                    places = matching([line.text for line in page.lines])
                except _SearchTimeout:
                    if not moved:
                        raise InvalidRequest(
                            fields={"q": _("This pattern takes too long. Simplify it.")}
                        ) from None
                    return SearchResult(found[:limit], at)
                moved = True
                hits = [page.lines[place] for place in places]
                hits = [line for line in hits if not query.stream or line.stream in ("", query.stream)]
                if len(found) + len(hits) > limit:
                    beyond = hits[limit - len(found)]
                    found += [Match(log.rank, line, log.label) for line in hits[: limit - len(found)]]
                    return SearchResult(found, SearchCursor(log.rank, beyond.cursor))
                found += [Match(log.rank, line, log.label) for line in hits]
                left_bytes -= page.cursor - cursor
                cursor = page.cursor
    return SearchResult(found, None)


@contextlib.contextmanager
def _matcher(query: LogSearchQuery, deadline_s: float) -> Iterator[Matcher]:
    if query.is_regex:
        with _regex_matcher(query, deadline_s) as matching:
            yield matching
        return
    wanted = query.text if query.case_sensitive else query.text.casefold()
    yield lambda texts: [
        place
        for place, text in enumerate(texts)
        if wanted in (text if query.case_sensitive else text.casefold())
    ]


@contextlib.contextmanager
def _regex_matcher(query: LogSearchQuery, deadline_s: float) -> Iterator[Matcher]:
    """Yield a matcher in a child process: Python's ``re`` can take exponential time and cannot be stopped."""
    if not _pattern_slots.acquire(timeout=0.5):
        raise ServiceUnavailable(_("Too many pattern searches are running. Try again in a moment."))
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_REGEX_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
        )
        try:
            asked = json.dumps({"pattern": query.text, "case": query.case_sensitive}).encode() + b"\n"
            fault = _query_worker(child, asked, deadline_s)["fault"]
            if fault is not None:
                raise InvalidRequest(
                    fields={"q": _("This is not a valid pattern: {fault}.").format(fault=fault)}
                )

            def matching(texts: Sequence[str]) -> list[int]:
                block = json.dumps([text[:MAX_MATCHED_LINE_LENGTH] for text in texts]).encode()
                places: list[int] = _query_worker(child, b"%d\n" % len(block) + block, deadline_s)
                return places

            yield matching
        finally:
            child.kill()
            child.communicate()
    finally:
        _pattern_slots.release()


def _query_worker(child: subprocess.Popen[bytes], request: bytes, deadline_s: float) -> Any:
    """Return the child's answer. Raise _SearchTimeout if it is late or has reached its own limits."""
    assert child.stdin is not None and child.stdout is not None  # noqa: S101 - for the types: both are pipes
    answer = b""
    try:
        child.stdin.write(request)
        child.stdin.flush()
    except BrokenPipeError:
        raise _SearchTimeout from None
    while not answer.endswith(b"\n"):
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
        piece = os.read(child.stdout.fileno(), 65_536) if ready else b""
        if not piece:
            raise _SearchTimeout
        answer += piece
    return json.loads(answer)
