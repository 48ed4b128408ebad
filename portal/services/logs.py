"""Keeps a copy of each task's log on the portal's disk: written by byte offset, so that a repeat is harmless."""

from __future__ import annotations

import os
from pathlib import Path

from django.conf import settings
from django.db.models.functions import Greatest

from portal.models import Task

MAX_LOG_BYTES = 256 * 1024 * 1024
"""What is kept of one task's log; the rest is counted and dropped."""
FORMATS = ("k8s", "raw")


def log_path(job: str, attempt: int, rank: int, form: str) -> Path:
    """Where the mirrored log of a task stands; ``form`` is k8s (time and stream before each line) or raw."""
    if form not in FORMATS:
        raise ValueError(f"{form!r} is not a log format")
    return Path(settings.LOG_DIR) / job / str(attempt) / f"{rank}.{form}"


def write_log_bytes(job: str, attempt: int, rank: int, form: str, offset: int, data: bytes) -> int:
    """Puts bytes of a node's log file at the same offset of ours; gives the offset after them.

    Beyond ``MAX_LOG_BYTES`` nothing is written. Raises OSError when the portal's disk is full.
    """
    kept = data[: max(0, MAX_LOG_BYTES - offset)]
    path = log_path(job, attempt, rank, form)
    if kept or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        try:
            written = 0
            while written < len(kept):
                written += os.pwrite(descriptor, kept[written:], offset + written)
        finally:
            os.close(descriptor)
    return offset + len(data)


def note_log_progress(task_id: int, next_offset: int, *, complete: bool) -> None:
    """Notes how far a task's log has been mirrored; it never goes back."""
    fields: dict[str, object] = {"log_bytes": Greatest("log_bytes", next_offset)}
    if complete:
        fields["log_complete"] = True
    Task.objects.filter(pk=task_id).update(**fields)
