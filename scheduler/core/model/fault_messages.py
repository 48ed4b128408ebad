"""Messages about invalid rows of a snapshot, for administrators and for the jobs that they affect."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.core.model.snapshot import Snapshot
from scheduler.core.model.validation import Fault, RowKind

Names = Mapping[tuple[str, str], str]
"""The name of each row of a snapshot, by kind and id."""


def names_of(snapshot: Snapshot) -> Names:
    names: dict[tuple[str, str], str] = {}
    for row in snapshot.pools:
        names["pool", row.id] = row.name
    for node in snapshot.nodes:
        names["node", node.id] = node.name
    for project in snapshot.projects:
        names["project", project.id] = project.name
    for reservation in snapshot.reservations:
        names["reservation", reservation.id] = reservation.name
    names |= {("job", row.job): row.name for row in snapshot.running}
    names |= {("job", row.job): row.name for row in snapshot.pending}
    return names


def message_for_admins(fault: Fault, names: Names) -> str:
    """Return a message that names the row and its invalid value."""
    if fault.kind is RowKind.ENVIRONMENT:
        return f"The environment {fault.message}."
    return f"{_named(fault, names)} has an invalid value: {_what(fault)}."


def message_for_job(fault: Fault, names: Names) -> str:
    """Return why a job that was left out because of ``fault`` is pending, and who can correct it."""
    if fault.kind in (RowKind.RUNNING, RowKind.PENDING):
        return (
            f"The stored data of this job is invalid: {_what(fault)}. An administrator can correct it, or you can "
            "cancel the job and submit it again."
        )
    return f"{message_for_admins(fault, names)} This job waits until an administrator corrects it."


def _name(fault: Fault, names: Names) -> str:
    match fault.kind:
        case RowKind.QUOTA | RowKind.USAGE:
            project, pool, *_ = fault.row.split(",")
            return f"{names.get(('project', project), project)} in {names.get(('pool', pool), pool)}"
        case RowKind.RUNNING | RowKind.PENDING:
            return names.get(("job", fault.row)) or fault.row
    return names.get((fault.kind.value, fault.row)) or fault.row


def _named(fault: Fault, names: Names) -> str:
    name = _name(fault, names)
    match fault.kind:
        case RowKind.QUOTA:
            return f"The quota of {name}"
        case RowKind.USAGE:
            return f"The recorded use of {name}"
        case RowKind.RUNNING | RowKind.PENDING:
            return f"The job {name} ({fault.row})"
    return f"The {fault.kind.value} {name}"


def _what(fault: Fault) -> str:
    where = fault.field.rpartition("].")[2] if "]." in fault.field else ""
    return f"{where} {fault.message}".strip().rstrip(".")
