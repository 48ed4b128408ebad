"""Stores the code and the packages of a job, which its node recorded beside the running task."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from django.utils import timezone

from portal.domain.states import AttemptState, JobKind
from portal.models import EnvironmentRecord, Task

MIN_RUN_S = 2.0
"""A job that ends earlier is not recorded; in this time its command reaches its working directory."""
MAX_PACKAGES = 3000
_INTERPRETER = re.compile(r"(.*/)?python[0-9.]*")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


def recording_wait_s(task: Task) -> float | None:
    """Return the seconds until the task may be recorded; None if its job is or cannot be recorded."""
    attempt = task.attempt
    if attempt.job.kind != JobKind.TRAINING.value or attempt.state != AttemptState.RUNNING:
        return None
    if attempt.running_at is None or getattr(task, "environment_recorded", True):
        return None
    if attempt.job.code_repository and not attempt.code_commit:
        return None  # its code is still being checked out
    return MIN_RUN_S - (timezone.now() - attempt.running_at).total_seconds()


def interpreters(command: list[str]) -> list[str]:
    """Return the commands with which the recording program is tried: that of the job first."""
    named = next((word for word in command if _INTERPRETER.fullmatch(word)), None)
    return list(dict.fromkeys([*([named] if named else []), "python3", "python"]))


def save_record(task: Task, output: bytes, problem: str = "") -> None:
    """Store what a node reported; nothing in it is trusted. A job has at most one record."""
    columns: dict[str, Any] = {}
    for line in output.split(b"\n")[:-1]:  # an incomplete line was cut off
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            columns |= _columns(found)
    if not columns and not problem:
        problem = "The image has no Python, or the job ended while it was recorded."
    gpu = task.allocations.order_by("gpu__index").values_list("gpu__model", flat=True).first()
    EnvironmentRecord.objects.get_or_create(
        job=task.attempt.job,
        defaults={
            "requested_at": timezone.now(),
            "recorded_at": timezone.now() if columns else None,
            "problem": problem[:300],
            "node": task.node.name,
            "driver": str(task.node.agent_info.get("driver") or "")[:40],
            "gpu_model": gpu or "",
            **columns,
        },
    )


def _columns(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of one line of the program, those of the right type only."""
    read: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "directory": ("git_directory", lambda value: _text(value, 1000)),
        "commit": ("git_commit", lambda value: value if _COMMIT.fullmatch(value) else ""),
        "branch": ("git_branch", lambda value: _text(value, 200)),
        "remote": ("git_remote", lambda value: _text(value, 500)),
        "diff": ("git_diff", lambda value: _text(value, 256 * 1024)),
        "diff_bytes": ("git_diff_bytes", lambda value: value if 0 <= value < 2**31 else None),
        "untracked": ("untracked_files", _lines),
        "executable": ("python", lambda value: _text(value, 400)),
        "version": ("python_version", lambda value: _text(value, 40)),
        "packages": ("packages", _lines),
        "conda": ("conda_packages", _lines),
    }
    types = {"diff_bytes": int, "untracked": list, "packages": list, "conda": list}
    return {
        column: parse(found[key])
        for key, (column, parse) in read.items()
        if isinstance(found.get(key), types.get(key, str))
    }


def _text(value: str, max_length: int) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", value)[:max_length]


def _lines(values: list[Any]) -> list[str]:
    return [_text(each, 300) for each in values[:MAX_PACKAGES] if isinstance(each, str)]
