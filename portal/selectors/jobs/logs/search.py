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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.errors import InvalidRequest, ServiceUnavailable
from portal.selectors.jobs.logs.line_assembly import LogLine
from portal.selectors.jobs.logs.lines import MAX_LINES, LogFile, read_lines

SEARCH_TIMEOUT_S = 3.0
MAX_SEARCH_BYTES = 32 * 1024 * 1024
MAX_QUERY_LENGTH = 200
MAX_MATCHED_LINE_LENGTH = 4096
"""Patterns see only this much of a line."""
EXCERPT_CHARACTERS = 1000
_BEFORE_CHARACTERS = 200
MAX_MATCHES = 200
MAX_CONCURRENT_PATTERNS = 3
"""Per process; each pattern search is a child process."""
_REGEX_WORKER = Path(__file__).with_name("regex_worker.py")
_pattern_slots = threading.BoundedSemaphore(MAX_CONCURRENT_PATTERNS)

Matcher = Callable[[Sequence[LogLine]], list[int]]
"""Returns the places of the lines that match."""


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
    """``line`` has the text around the match if the line is long and the match is not near its beginning."""

    rank: int
    line: LogLine
    label: str


@dataclass(frozen=True)
class SearchCursor:
    """Where a search continues: an offset in the log of a rank."""

    rank: int
    offset: int = 0


@dataclass(frozen=True)
class SearchGap:
    """What was not searched in the log of a rank, with a stable ``code``."""

    rank: int
    label: str
    code: str
    message: str


@dataclass(frozen=True)
class SearchResult:
    """Matches in order, and where to continue; None if everything that is stored was searched, except ``gaps``."""

    matches: list[Match]
    next: SearchCursor | None
    gaps: list[SearchGap] = field(default_factory=list)


class _SearchTimeout(Exception):
    pass


def search(
    logs: Sequence[LogFile],
    query: LogSearchQuery,
    start: SearchCursor | None = None,
    limit: int = MAX_MATCHES,
) -> SearchResult:
    """Return up to ``limit`` matches in the logs of ranks from ``start`` on, rank by rank.

    Stops after 32 MiB or 3 s and returns where to continue. The present text of unfinished lines is searched too.
    Raise InvalidRequest for a text or pattern that is invalid or takes too long on a few lines, ServiceUnavailable
    while too many pattern searches run.
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
    gaps: list[SearchGap] = []
    at = start or SearchCursor(min((log.rank for log in logs), default=0))
    left_bytes = MAX_SEARCH_BYTES
    moved = False
    with _matcher(query, until_s) as matching:
        for log in sorted(logs, key=lambda each: each.rank):
            if log.rank < at.rank:
                continue
            cursor = at.offset if log.rank == at.rank else 0
            gaps += _stored_gaps(log)
            is_end, cut = False, 0
            while not is_end and not (log.complete and 0 < cursor >= log.size_bytes):
                at = SearchCursor(log.rank, cursor)
                if len(found) >= limit or left_bytes <= 0 or (moved and time.monotonic() >= until_s):
                    return SearchResult(found, at, gaps)
                page = read_lines(log, cursor, MAX_LINES)
                is_end = page.cursor == cursor
                lines = page.unfinished if is_end else page.lines
                try:
                    places = matching(lines)
                except _SearchTimeout:
                    if not moved:
                        raise InvalidRequest(
                            fields={"q": _("This pattern takes too long. Simplify it.")}
                        ) from None
                    return SearchResult(found, at, gaps)
                moved = True
                if query.is_regex:
                    cut += sum(len(line.searched_text) > MAX_MATCHED_LINE_LENGTH for line in lines)
                hits = [lines[place] for place in places]
                hits = [line for line in hits if not query.stream or line.stream in ("", query.stream)]
                taken = _fitting(hits, limit - len(found), is_first=not found)
                found += [Match(log.rank, _excerpt(line, query), log.label) for line in hits[:taken]]
                if taken < len(hits):
                    beyond = page.cursor if is_end else hits[taken].end_cursor
                    return SearchResult(found, SearchCursor(log.rank, beyond), gaps)
                left_bytes -= page.cursor - cursor
                cursor = page.cursor
            if cut:
                gaps.append(
                    _gap(log, "long_lines", _LONG_LINES, lines=cut, characters=MAX_MATCHED_LINE_LENGTH)
                )
    return SearchResult(found, None, gaps)


def _excerpt(line: LogLine, query: LogSearchQuery) -> LogLine:
    whole = line.preceding + line.searched_text
    if query.is_regex or len(whole) <= MAX_MATCHED_LINE_LENGTH:
        return line
    at = _folded(whole, query).find(_folded(query.text, query))
    if at < EXCERPT_CHARACTERS and "\r" not in whole:
        return line
    start = max(whole.rfind("\r", 0, at) + 1, at - _BEFORE_CHARACTERS)
    state = whole[start : start + EXCERPT_CHARACTERS].split("\r", 1)[0]
    return replace(line, text=f"… {state}")


def _fitting(hits: Sequence[LogLine], space: int, *, is_first: bool) -> int:
    """Return how many of the hits to return; those that end at the same place, where a search continues, together."""
    count = min(space, len(hits))
    while 0 < count < len(hits) and hits[count - 1].end_cursor == hits[count].end_cursor:
        count -= 1
    if count == 0 and is_first and hits:
        return sum(line.end_cursor == hits[0].end_cursor for line in hits)
    return count


_LONG_LINES = gettext_noop(
    "A pattern sees only the first {characters} characters of a line; {lines} are longer."
)
_REMOVED = gettext_noop("This log was removed after the retention period.")
_TRUNCATED = gettext_noop("{bytes} bytes beyond the size limit of a log are not stored.")


def _stored_gaps(log: LogFile) -> list[SearchGap]:
    """Return what of a log is not stored here."""
    gaps: list[SearchGap] = []
    if log.is_expired:
        gaps.append(_gap(log, "removed", _REMOVED))
    elif log.truncated_bytes:
        gaps.append(_gap(log, "truncated", _TRUNCATED, bytes=log.truncated_bytes))
    if log.connection_loss:
        gaps.append(SearchGap(log.rank, log.label, "node_unreachable", log.connection_loss.message))
    return gaps


def _gap(log: LogFile, code: str, message: str, **values: int) -> SearchGap:
    return SearchGap(log.rank, log.label, code, _(message).format(**values))


@contextlib.contextmanager
def _matcher(query: LogSearchQuery, deadline_s: float) -> Iterator[Matcher]:
    if query.is_regex:
        with _regex_matcher(query, deadline_s) as matching:
            yield matching
        return
    wanted = _folded(query.text, query)
    reach = len(query.text) - 1
    yield lambda lines: [
        place
        for place, line in enumerate(lines)
        if wanted
        in _folded(line.preceding[-reach:] if reach else "", query) + _folded(line.searched_text, query)
    ]


def _folded(text: str, query: LogSearchQuery) -> str:
    return text if query.case_sensitive else text.casefold()


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

            def matching(lines: Sequence[LogLine]) -> list[int]:
                texts = [line.searched_text[:MAX_MATCHED_LINE_LENGTH] for line in lines]
                block = json.dumps(texts).encode()
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
