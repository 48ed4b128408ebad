"""Mirrors each task's log to the portal's disk by byte offset, so that repeated writes are harmless."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings
from django.db.models.functions import Greatest
from django.utils import timezone

from agents.node.host.atomic_files import make_folder
from portal.models import Job, Task
from portal.selectors.jobs.logs.files import LOG_FORMATS, MAX_LOG_BYTES, RAW_FORMAT, log_path

DELETE_BATCH_SIZE = 500
"""Maximum number of jobs whose logs one pass deletes."""
DELETE_MAX_S = 10.0
"""The logs of no further job are deleted in a pass; those of one job are a few files for each attempt."""


def write_log_bytes(job: str, attempt: int, rank: int, log_format: str, offset: int, data: bytes) -> int:
    """Write bytes of a node's log file at the same offset; return the next offset to request.

    That is the end of ``data``, or the end of the local file if bytes before ``offset`` are missing (nothing
    is written then, because a file with a hole would look complete). Bytes beyond MAX_LOG_BYTES are dropped.
    An unknown format is stored and shown as raw bytes. Raise OSError if the portal's disk is full.
    """
    kept = data[: max(0, MAX_LOG_BYTES - offset)]
    path = log_path(job, attempt, rank, log_format if log_format in LOG_FORMATS else RAW_FORMAT)
    make_folder(str(path.parent), 0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if offset > size and offset <= MAX_LOG_BYTES:
            return size
        written = 0
        while written < len(kept):
            written += os.pwrite(descriptor, kept[written:], offset + written)
    finally:
        os.close(descriptor)
    return offset + len(data)


def record_log_progress(task_id: int, next_offset: int, *, complete: bool) -> None:
    """Record how far a task's log is mirrored; the offset never decreases."""
    fields: dict[str, object] = {"log_bytes": Greatest("log_bytes", next_offset)}
    if complete:
        fields["log_complete"] = True
    Task.objects.filter(pk=task_id).update(**fields)


def delete_expired_logs() -> int:
    """Delete the logs of jobs that ended before the retention period; return how many jobs. Repeatable."""
    if settings.LOG_RETENTION_DAYS <= 0:
        return 0
    before = timezone.now() - dt.timedelta(days=settings.LOG_RETENTION_DAYS)
    deadline_s, deleted = time.monotonic() + DELETE_MAX_S, 0
    for job in _expired_folders(before):
        if deleted >= DELETE_BATCH_SIZE or time.monotonic() > deadline_s:
            break
        delete_logs(job)
        deleted += 1
    return deleted


def _expired_folders(before: dt.datetime) -> Iterator[str]:
    """Yield the names of old folders, except those of jobs that have not ended before; those without a job, too."""
    with contextlib.suppress(FileNotFoundError), os.scandir(settings.LOG_DIR) as folders:
        old = (folder for folder in folders if folder.is_dir(follow_symlinks=False))
        names = [folder.name for folder in old if folder.stat().st_mtime < before.timestamp()]
        for begin in range(0, len(names), DELETE_BATCH_SIZE):
            batch = names[begin : begin + DELETE_BATCH_SIZE]
            jobs = Job.objects.filter(public_id__in=batch).exclude(ended_at__lt=before)
            kept = set(jobs.values_list("public_id", flat=True))
            yield from (name for name in batch if name not in kept)


def delete_logs(job: str) -> None:
    """Delete the logs of a job, given its public id. Repeatable."""
    shutil.rmtree(Path(settings.LOG_DIR) / job, ignore_errors=True)
