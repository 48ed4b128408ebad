"""The frame of a log: new lines for browsers that watch it."""

from __future__ import annotations

from typing import Any

from portal.selectors.jobs.logs.lines import LogPage


def log_frame(attempt: int, rank: int, page: LogPage | None, *, more: bool = False) -> dict[str, Any]:
    """Return the frame; no page: nothing was written yet.

    ``cursor`` is the next position; with ``more``, there are further lines that the browser fetches. Each frame
    replaces the ``unfinished`` lines of the one before.
    """
    return {
        "kind": "logs",
        "attempt": attempt,
        "rank": rank,
        "start": page.start if page else 0,
        "cursor": page.cursor if page else 0,
        "more": more,
        "lines": [
            {"at": line.at, "stream": line.stream, "text": line.text, "cursor": line.cursor}
            for line in (page.lines if page else ())
            if not line.is_overwritten
        ],
        "unfinished": [
            {"at": line.at, "stream": line.stream, "text": line.text, "cursor": line.cursor}
            for line in (page.unfinished if page else ())
            if not line.is_overwritten
        ],
    }
