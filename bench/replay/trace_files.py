"""Job traces: submit time, requested GPUs and duration of each job.

A trace is a comma-separated table, plain or gzip, with at least the columns ``timestamp`` (ISO, without time
zone), ``duration`` (s), ``num_gpus`` and ``cluster`` (the project), as in Microsoft's Philly trace.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path

from bench.replay.tables import TableRow, read_json, read_rows
from scheduler.replay.input_files import MalformedFileError
from scheduler.replay.trace import TraceJob

COLUMNS = ("timestamp", "duration", "num_gpus", "cluster")
MAX_DURATION_S = 10**9
MAX_GPUS = 10**6


def parse_time(text: str) -> int:
    """Return the seconds of an ISO time without time zone. Raise ValueError otherwise."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is not None:
        raise ValueError("a time with a zone, but the trace has none")
    return int(moment.replace(tzinfo=UTC).timestamp())


def read_trace(
    path: str | Path,
    from_s: float = -math.inf,
    to_s: float = math.inf,
    projects: Collection[str] | None = None,
) -> list[TraceJob]:
    """Return the jobs submitted from ``from_s`` to ``to_s`` by ``projects`` (None is all), by submit time.

    Jobs of the same second are sorted by duration, then file order: published results used this order.

    Raise MalformedFileError when a column is missing, a cell is invalid, or no job is left.
    """
    found: list[tuple[int, int, str, int]] = []
    for row in read_rows(path, COLUMNS):
        submitted_s = _submit_time(row)
        duration_s = math.ceil(row.number("duration", 0.0, MAX_DURATION_S))
        gpus = row.integer("num_gpus", 1, MAX_GPUS)
        project = row.text("cluster", blank=False)
        if from_s <= submitted_s <= to_s and (projects is None or project in projects):
            found.append((submitted_s, duration_s, project, gpus))
    if not found:
        raise MalformedFileError(path, "", "no job in this window belongs to these projects")
    found.sort(key=lambda job: job[:2])
    return [
        TraceJob(number, project, submitted_s, duration_s, gpus)
        for number, (submitted_s, duration_s, project, gpus) in enumerate(found)
    ]


def _submit_time(row: TableRow) -> int:
    text = row.text("timestamp", blank=False)
    try:
        return parse_time(text)
    except ValueError:
        row.fail("timestamp", f"{text[:40]!r} is not a time as in 2017-10-01T08:00:00")


def read_projects(path: str | Path) -> list[str]:
    """Return a JSON list of project names. Raise MalformedFileError when it is invalid or has duplicates."""
    names = read_json(path)
    if not isinstance(names, list) or not names:
        raise MalformedFileError(path, "$", "a list of project names is expected")
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise MalformedFileError(path, f"$[{i}]", "this is not the name of a project")
        if name in names[:i]:
            raise MalformedFileError(path, f"$[{i}]", f"{name!r} is listed twice")
    return names


def read_quotas(path: str | Path, projects: Collection[str]) -> Mapping[str, int]:
    """Return guaranteed GPUs by project, from a JSON object of whole numbers.

    Raise MalformedFileError when it is invalid or names a project that is not replayed.
    """
    quotas = read_json(path)
    if not isinstance(quotas, dict):
        raise MalformedFileError(path, "$", "an object from project to guaranteed GPUs is expected")
    for project, gpus in quotas.items():
        if project not in projects:
            raise MalformedFileError(path, f"$.{project}", "not one of the replayed projects")
        if not isinstance(gpus, int) or isinstance(gpus, bool) or not 0 <= gpus <= MAX_GPUS:
            raise MalformedFileError(path, f"$.{project}", f"{gpus!r} is not a number of GPUs")
    return quotas
