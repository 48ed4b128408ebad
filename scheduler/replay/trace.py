"""Job traces: who asked for how many GPUs when, and for how long each job then ran.

A trace is a comma-separated table, plain or gzip, with at least the columns ``timestamp`` (ISO, without a
zone), ``duration`` (s), ``num_gpus`` and ``cluster`` (the project); Microsoft's Philly trace has this shape.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from scheduler.replay.input_files import MalformedFileError, TableRow, read_json, read_rows

COLUMNS = ("timestamp", "duration", "num_gpus", "cluster")
MAX_DURATION_S = 10**9
MAX_GPUS = 10**6


class TraceJob(NamedTuple):
    """One job: times in whole seconds since the epoch (the zone of the trace taken for UTC)."""

    number: int  # its place in the trace, by time of submit
    project: str
    submitted_s: int
    duration_s: int
    gpus: int


class ClusterSize(NamedTuple):
    """A cluster of equal nodes."""

    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        """All GPUs together."""
        return self.nodes * self.gpus_per_node

    def split_gpus(self, gpus: int) -> list[int]:
        """How a job spreads over nodes: within one node, or on whole nodes and one part of another."""
        if gpus <= self.gpus_per_node:
            return [gpus]
        whole, rest = divmod(gpus, self.gpus_per_node)
        return [self.gpus_per_node] * whole + ([rest] if rest else [])


def parse_time(text: str) -> int:
    """Seconds of an ISO time without zone.

    Raises:
        ValueError: it is none.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is not None:
        raise ValueError("a time with a zone, where the trace has none")
    return int(moment.replace(tzinfo=UTC).timestamp())


def read_trace(
    path: str | Path,
    from_s: float = -math.inf,
    to_s: float = math.inf,
    projects: Collection[str] | None = None,
) -> list[TraceJob]:
    """The jobs submitted from ``from_s`` to ``to_s`` by ``projects`` (None is all), by time of submit.

    Jobs of one second go by duration, then as in the file: the published figures were made in this order.

    Raises:
        MalformedFileError: a column is missing, a cell is none of its kind, or no job is left.
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
        raise MalformedFileError(path, "", "no job in this window is of these projects")
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
    """A JSON list of project names.

    Raises:
        MalformedFileError: it is none, or a name stands there twice.
    """
    names = read_json(path)
    if not isinstance(names, list) or not names:
        raise MalformedFileError(path, "$", "a list of project names is expected")
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise MalformedFileError(path, f"$[{i}]", "this is not the name of a project")
        if name in names[:i]:
            raise MalformedFileError(path, f"$[{i}]", f"{name!r} stands there twice")
    return names


def read_quotas(path: str | Path, projects: Collection[str]) -> Mapping[str, int]:
    """Guaranteed GPUs of each project: a JSON object from name to whole number.

    Raises:
        MalformedFileError: it is none, or it names none of ``projects``.
    """
    quotas = read_json(path)
    if not isinstance(quotas, dict):
        raise MalformedFileError(path, "$", "an object from project to guaranteed GPUs is expected")
    for project, gpus in quotas.items():
        if project not in projects:
            raise MalformedFileError(path, f"$.{project}", "this is none of the projects that are replayed")
        if not isinstance(gpus, int) or isinstance(gpus, bool) or not 0 <= gpus <= MAX_GPUS:
            raise MalformedFileError(path, f"$.{project}", f"{gpus!r} is not a number of GPUs")
    return quotas
