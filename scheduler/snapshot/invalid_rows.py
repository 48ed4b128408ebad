"""Removes invalid rows from a snapshot before the decision, and reports them to administrators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from django.db import transaction

from portal.services.nodes.alerts import InvalidRowReport, report_invalid_rows
from scheduler import leases
from scheduler.core.model.invalid_rows import isolate_faults, message_for_admins, names_of
from scheduler.core.model.snapshot import Snapshot
from scheduler.core.model.validation import Fault, SnapshotError
from scheduler.leases import HeldLease
from scheduler.snapshot.decision_input import DecisionInput

UseResult = TypeVar("UseResult")


def without_invalid_rows(inputs: DecisionInput) -> DecisionInput:
    """Return the input without invalid rows. Raise SnapshotError when the snapshot stays invalid."""
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
    """Return the result of ``use(snapshot)``, and the input it used.

    ``use`` validates the snapshot itself, so a valid one costs nothing extra. With ``had_faults`` (the last
    snapshot was invalid) rows are checked before the first attempt.
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
    """Raise alerts for ``faults`` found in ``before``, and clear those of rows that are valid again.

    Raise LeaseLostError when the lease is lost.
    """
    names = names_of(before)
    with transaction.atomic():
        leases.check(leader)
        report_invalid_rows(
            [
                InvalidRowReport(fault.kind.value, fault.row, fault.field, message_for_admins(fault, names))
                for fault in faults
            ]
        )
