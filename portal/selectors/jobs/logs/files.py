"""The path of a task's mirrored log, and reading it in chunks."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from asgiref.sync import sync_to_async
from django.conf import settings

MAX_LOG_BYTES = 256 * 1024 * 1024
"""Maximum size of one task's mirrored log; the rest is counted and dropped."""
RAW_FORMAT = "raw"
LOG_FORMATS = ("k8s", RAW_FORMAT)
TIMESTAMP_PREFIX = re.compile(rb"(\d{4}-\d\d-\d\dT[0-9:.]+(?:Z|[+-]\d\d:\d\d)) (stdout|stderr) ([FP]) ?")
"""The start of a line in the format k8s: time, stream, and whether the line is full (F) or partial (P)."""
_PUBLIC_ID = re.compile(r"[a-z0-9]{1,16}")


def log_path(job: str, attempt: int, rank: int, log_format: str) -> Path:
    """Return the path of a task's mirrored log; ``log_format`` is k8s (time and stream per line) or raw.

    All parts are validated, so that no path outside LOG_DIR is possible.
    """
    if log_format not in LOG_FORMATS:
        raise ValueError(f"{log_format!r} is not a log format")
    if not _PUBLIC_ID.fullmatch(job) or attempt < 0 or rank < 0:
        raise ValueError(f"{job!r}/{attempt}/{rank} is not a task")
    return Path(settings.LOG_DIR) / job / f"{attempt:d}" / f"{rank:d}.{log_format}"


async def iterate_in_thread(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield chunks that are read in a thread, one at a time.

    Django would read a synchronous iterator completely before the first byte is sent.
    """

    def following() -> bytes | None:
        return next(chunks, None)

    while (piece := await sync_to_async(following)()) is not None:
        yield piece
