"""Leaves invalid rows out of a snapshot before it is decided on, and reports them to administrators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from django.db import transaction

from portal.services.nodes.alerts import InvalidRowReport, report_invalid_rows
from scheduler import leases
from scheduler.core.model.fault_messages import message_for_admins, names_of
from scheduler.core.model.isolation import isolate_faults
from scheduler.core.model.snapshot import Snapshot
from scheduler.core.model.validation import Fault, SnapshotError
from scheduler.leases import HeldLease
from scheduler.snapshot.decision_input import DecisionInput

UseResult = TypeVar("UseResult")


def without_invalid_rows(inputs: DecisionInput) -> DecisionInput:
    """Return the photograph without its invalid rows. Raise ``SnapshotError`` where that is not enough."""
    found = isolate_faults(inputs.snapshot, inputs.faults)
    return replace(
        inputs,
        snapshot=found.snapshot,
        faults=found.faults,
        excluded=(*inputs.excluded, *found.verdicts),
    )


def use_valid_rows(
    inputs: DecisionInput, use: Callable[[Snapshot], UseResult], *, had_faults: bool = False
) -> tuple[UseResult, DecisionInput]:
    """Return what ``use`` makes of the snapshot, and the photograph that it used.

    A snapshot is checked where it is decided on, so one without faults costs nothing here. ``had_faults``: the last
    photograph had some, and it is cheaper to look for them first.
    """
    if inputs.faults or had_faults:
        inputs = without_invalid_rows(inputs)
        return use(inputs.snapshot), inputs
    try:
        return use(inputs.snapshot), inputs
    except SnapshotError:
        inputs = without_invalid_rows(inputs)
        return use(inputs.snapshot), inputs


def report_faults(leader: HeldLease, before: Snapshot, faults: tuple[Fault, ...]) -> None:
    """Write the alarms about ``faults`` of ``before``, and end those of rows that are valid again. Raise LeaseLostError."""
    names = names_of(before)
    with transaction.atomic():
        leases.check(leader)
        report_invalid_rows(
            [
                InvalidRowReport(fault.kind.value, fault.row, fault.field, message_for_admins(fault, names))
                for fault in faults
            ]
        )
