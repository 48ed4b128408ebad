"""Report files: files by which a program reports progress, metrics, checkpoints and its code to the agent.

They are in the task's folder, belong to the task's account and are initially empty; a container sees only
these files. Their time is zero until the task writes or touches them. They are untrusted: links are not
followed, reads never block, and other content is ignored. A checkpoint file may contain the step.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import Any, Dict, List, NamedTuple, Optional, Tuple


class ReportFile(NamedTuple):
    """A report file: its environment variable and its name in the folder."""

    variable: str
    name: str

    def path(self, folder: str) -> str:
        return os.path.join(folder, self.name)

    @property
    def container_path(self) -> str:
        return f"/run/fairway-{self.name}"


CHECKPOINT_FILE = ReportFile("FAIRWAY_CHECKPOINT_FILE", "checkpoint")
PROGRESS_FILE = ReportFile("FAIRWAY_PROGRESS_FILE", "progress")
METRIC_FILE = ReportFile("FAIRWAY_METRIC_FILE", "metric")
CODE_FILE = ReportFile("FAIRWAY_CODE_FILE", "code")
REPORT_FILES = (CHECKPOINT_FILE, PROGRESS_FILE, METRIC_FILE, CODE_FILE)
MAX_BYTES = 64
MAX_METRIC_BYTES = 4096
MAX_METRIC_LINES = 100
_METRIC = re.compile(
    rb"\s*([0-9]{1,14}(?:\.[0-9]{0,9})?)\s+"
    rb"([+-]?(?:nan|inf(?:inity)?|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?))\s*",
    re.IGNORECASE,
)
_MAX_VALUE = 1e15
"""Larger values, infinite ones included, are no numbers for the portal."""
_COMMIT = re.compile(rb"([0-9a-f]{40,64})\n?\Z")
_NUMBERS = re.compile(rb"\s*([0-9]{1,14}(?:\.[0-9]*)?)(?:[ \t]+([0-9]{1,14}(?:\.[0-9]*)?))?\s*\Z")
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def create_report_file(file: ReportFile, folder: str, uid: Optional[int], gid: Optional[int]) -> None:
    """Create the file before its task, owned by ``uid`` (the agent when None); idempotent."""
    path = file.path(folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, flags, 0o600))
    if uid is not None:
        os.chown(path, uid, gid if gid is not None else -1, follow_symlinks=False)
    os.utime(path, (0, 0), follow_symlinks=False)


def report_file_variables(folder: str) -> Dict[str, str]:
    """Return the variables for a task that sees its folder."""
    return {file.variable: file.path(folder) for file in REPORT_FILES}


def container_report_file_variables() -> Dict[str, str]:
    """Return the variables for a container."""
    return {file.variable: file.container_path for file in REPORT_FILES}


def report_age_s(modified_s: float, started_s: Optional[float], now_s: float) -> Optional[float]:
    """Return seconds since the task (started at ``started_s``) wrote the file; None when it never did.

    The age is limited to 0 and the task's run time, because a task can set any file time.
    """
    if modified_s == 0:
        return None
    first_s = modified_s if started_s is None else max(modified_s, started_s)
    return max(0.0, now_s - first_s)


class ProgressReport(NamedTuple):
    """Last report of a task: finite numbers from 0 (None: not written), and its age in seconds.

    ``value`` is the amount of work done, or the step; ``busy_s`` the seconds that the task itself worked.
    """

    value: Optional[float]
    age_s: float
    busy_s: Optional[float] = None


def read_progress(folder: str, started_s: Optional[float], now_s: float) -> Optional[ProgressReport]:
    """Return the last report; None when there is none or it is invalid."""
    report = _read_report(PROGRESS_FILE, folder, started_s, now_s)
    return report if report is not None and report.value is not None else None


def read_checkpoint(folder: str, started_s: Optional[float], now_s: float) -> Optional[ProgressReport]:
    """Return the last reported checkpoint with its step; None without a report."""
    return _read_report(CHECKPOINT_FILE, folder, started_s, now_s)


def _read_report(
    file: ReportFile, folder: str, started_s: Optional[float], now_s: float
) -> Optional[ProgressReport]:
    facts, content = _read_end(file.path(folder), MAX_BYTES + 1)
    since_s = report_age_s(facts.st_mtime, started_s, now_s) if facts is not None else None
    if facts is None or since_s is None:
        return None
    found = _NUMBERS.match(content) if facts.st_size <= MAX_BYTES else None
    value, busy_s = (
        None if each is None else float(each) for each in (found.groups() if found else (None, None))
    )
    return ProgressReport(value, since_s, busy_s)


def read_reports(
    folder: str, log_path: str, started_s: Optional[float], now_s: float
) -> Dict[str, Optional[float]]:
    """Return what a running task reported, and the age of its last output; keys as in ``NO_REPORTS``."""
    done = read_progress(folder, started_s, now_s)
    saved = read_checkpoint(folder, started_s, now_s)
    return {
        "checkpoint_age_s": saved.age_s if saved else None,
        "checkpoint_step": int(saved.value) if saved and saved.value is not None else None,
        "progress": done.value if done else None,
        "progress_age_s": done.age_s if done else None,
        "progress_busy_s": done.busy_s if done else None,
        "output_age_s": _output_age_s(log_path, started_s, now_s),
    }


NO_REPORTS: Dict[str, Optional[float]] = dict.fromkeys(
    ("checkpoint_age_s", "checkpoint_step", "progress", "progress_age_s", "progress_busy_s", "output_age_s")
)


def _output_age_s(log_path: str, started_s: Optional[float], now_s: float) -> Optional[float]:
    """Return seconds since the task wrote to its log; None where the engine keeps the log elsewhere."""
    try:
        written_s = os.stat(log_path).st_mtime
    except OSError:
        return None
    return report_age_s(written_s, started_s, now_s)


def read_metrics(folder: str) -> List[Tuple[float, Optional[float]]]:
    """Return step and value of the last whole lines of the metric file; None for a value that is no number.

    Lines of another form are left out.
    """
    facts, content = _read_end(METRIC_FILE.path(folder), MAX_METRIC_BYTES)
    if facts is None:
        return []
    lines = content.split(b"\n")[:-1]  # the last line may still be written
    if facts.st_size > MAX_METRIC_BYTES:
        del lines[:1]  # its begin is cut off
    found = [match for match in map(_METRIC.fullmatch, lines) if match]
    values = [(float(each.group(1)), float(each.group(2))) for each in found[-MAX_METRIC_LINES:]]
    return [(step, value if abs(value) <= _MAX_VALUE else None) for step, value in values]


def read_last_reports(folder: str) -> Dict[str, Any]:
    """Return what is also reported of an ended task."""
    commit, written_s = read_code_commit(folder)
    return {"metrics": read_metrics(folder), "code_commit": commit, "code_written_s": written_s}


def read_code_commit(folder: str) -> Tuple[Optional[str], Optional[float]]:
    """Return the commit of the code that was checked out and when (Unix time); None without a report."""
    facts, content = _read_end(CODE_FILE.path(folder), MAX_BYTES + 1)
    found = _COMMIT.match(content)
    return (found.group(1).decode(), max(0.0, facts.st_mtime)) if found and facts else (None, None)


def _read_end(path: str, size: int) -> Tuple[Optional[os.stat_result], bytes]:
    """Return facts and the last ``size`` bytes of a regular file; None without one."""
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError:
        return None, b""
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            return None, b""
        return facts, os.pread(descriptor, size, max(0, facts.st_size - size))
    except OSError:
        return None, b""
    finally:
        os.close(descriptor)
