"""Columns of a job that its snapshot rows are made of, and their conversion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from agents.launchers import REQUIRES_RENDEZVOUS
from portal.domain.jobs.job_spec import JobSpec, job_fields, placement_fields
from portal.domain.states import JobKind
from scheduler.core.model.snapshot import (
    REQUEST_FIELDS,
    WHOLE_MILLI,
    GpuConstraints,
    NodeId,
    PendingRow,
    RunningRow,
    TaskRequest,
    TopologyConstraint,
)

PLACEMENT_COLUMNS = tuple(name for name in placement_fields() if name != "start_after")
"""Without the start time, which is read in seconds."""
_COMPUTED = {"tasks", "min_tasks", "launcher", "ignore_dependency_failure", "allow_mixed_gpus"}
"""Fields whose value in a row is not simply that of the column."""


def _copied_columns(names: Collection[str], prefix: str = "") -> tuple[tuple[str, str, bool], ...]:
    """Return the placement fields among ``names``: field, column, and whether blank is None in a snapshot."""
    rules = [rule for rule in job_fields().values() if rule.affects_placement and rule.is_scalar]
    return tuple((rule.name, prefix + rule.name, rule.default == "") for rule in rules if rule.name in names)


_OF_PENDING = _copied_columns({each.name for each in fields(PendingRow)} - _COMPUTED)
_OF_RUNNING = _copied_columns({each.name for each in fields(RunningRow)} - _COMPUTED, "job__")
_OF_REQUEST = _copied_columns(REQUEST_FIELDS)
_OF_CONSTRAINTS = _copied_columns(GpuConstraints._fields, "job__")
RUNNING_COLUMNS = tuple(column for _, column, _ in (*_OF_RUNNING, *_OF_CONSTRAINTS))


def _values(row: Mapping[str, Any], columns: tuple[tuple[str, str, bool], ...]) -> dict[str, Any]:
    return {name: (row[column] or None) if blank else row[column] for name, column, blank in columns}


def pending_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``PendingRow`` that are copied from columns of a job, and its request."""
    return {**_values(row, _OF_PENDING), "request": _shared_request(**_values(row, _OF_REQUEST))}


def running_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``RunningRow`` that are copied from ``RUNNING_COLUMNS``, and its constraints."""
    return {**_values(row, _OF_RUNNING), "constraints": _shared_constraints(**_values(row, _OF_CONSTRAINTS))}


@lru_cache(maxsize=10_000)
def _shared_request(**values: Any) -> TaskRequest:
    """Return the request of a job; equal ones are one object, which saves memory and comparisons."""
    return TaskRequest(0, WHOLE_MILLI, 0, 0).change(values)


@lru_cache(maxsize=1_000)
def _shared_constraints(**values: Any) -> GpuConstraints:
    return GpuConstraints(**values)


def rank_amounts(row: Mapping[str, Any], prefix: str = "") -> Callable[[int], tuple[int, int]]:
    """Return the function from a rank to its CPU and memory, which the roles of ``row`` give.

    With unreadable roles, they are the largest of a task.
    """
    each = row[f"{prefix}cpu_milli"], row[f"{prefix}memory_mib"]
    try:
        amounts = [
            (int(role["cpu_milli"]), int(role["memory_mib"]))
            for role in row[f"{prefix}roles"]
            for _ in range(role["tasks"])
        ]
    except (KeyError, TypeError, ValueError):
        amounts = []
    return lambda rank: amounts[rank] if 0 <= rank < len(amounts) else each


def role_requests(roles: Sequence[Mapping[str, Any]], largest: TaskRequest) -> tuple[TaskRequest, ...]:
    """Return the request of each rank, which differ from ``largest`` in amounts; empty if all are equal."""
    requests = tuple(
        largest._replace(
            gpus=int(role["gpus_per_task"]),
            milli=largest.milli if role["gpus_per_task"] else WHOLE_MILLI,
            cpu_milli=int(role["cpu_milli"]),
            memory_mib=int(role["memory_mib"]),
        )
        for role in roles
        for _ in range(role["tasks"])
    )
    return requests if any(request != largest for request in requests) else ()


def home_node(kind: str, owner: str, home_nodes: dict[str, NodeId]) -> NodeId | None:
    """Return the node of the owner's home for a workspace; None otherwise."""
    return home_nodes.get(owner) if kind == JobKind.WORKSPACE.value else None


def elastic_min_tasks(tasks: int, min_tasks: int | None) -> int | None:
    """Return the fewest tasks a job starts with; None when it is not elastic."""
    return min_tasks if min_tasks is not None and min_tasks < tasks else None


def parse_topology_constraint(requested: dict[str, Any] | None) -> TopologyConstraint | None:
    """Return the topology constraint; None when blank. Raise ValueError for an invalid one."""
    if not requested:
        return None
    near = TopologyConstraint(requested["topology"], requested.get("required"), requested.get("preferred"))
    if not all(
        each is None or isinstance(each, str) for each in (near.required, near.preferred, near.topology)
    ):
        raise ValueError(f"near {requested!r} is no topology with levels")
    return near


def spans_nodes(tasks: int, min_tasks: int | None, launcher: str) -> bool:
    """Return True for a gang, or an elastic job with a launcher: its tasks connect to each other."""
    return tasks > 1 and (elastic_min_tasks(tasks, min_tasks) is None or launcher != JobSpec.launcher)


def mixes_gpus(row: Mapping[str, Any], prefix: str = "") -> bool:
    """Return True if its tasks may use different GPUs: on request, or since they do not connect to each other."""
    job = (row[f"{prefix}{name}"] for name in ("tasks", "min_tasks", "launcher"))
    return row[f"{prefix}allow_mixed_gpus"] or not spans_nodes(*job)


def gang_launcher(tasks: int, launcher: str) -> str | None:
    """Return the launcher of a job whose tasks must reach each other; None otherwise."""
    return launcher if tasks > 1 and launcher in REQUIRES_RENDEZVOUS else None
