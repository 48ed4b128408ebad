"""Leaves invalid rows out of a snapshot before it is decided on, and reports them to administrators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from django.db import transaction

from portal.services.alarms import InvalidRowReport, report_invalid_rows
from scheduler import leases
from scheduler.core.check import Fault, SnapshotError
from scheduler.core.cluster import Snapshot
from scheduler.core.fault_messages import message_for_admins, names_of
from scheduler.core.isolate import isolate
from scheduler.leases import Held
from scheduler.snapshot import Photo

Answer = TypeVar("Answer")


def without_invalid_rows(photo: Photo) -> Photo:
    """Return the photograph without its invalid rows. Raise ``SnapshotError`` where that is not enough."""
    found = isolate(photo.snapshot, photo.faults)
    return replace(
        photo,
        snapshot=found.snapshot,
        faults=found.faults,
        left_out=(*photo.left_out, *found.verdicts),
    )


def use_valid_rows(
    photo: Photo, use: Callable[[Snapshot], Answer], *, had_faults: bool = False
) -> tuple[Answer, Photo]:
    """Return what ``use`` makes of the snapshot, and the photograph that it used.

    A snapshot is checked where it is decided on, so one without faults costs nothing here. ``had_faults``: the last
    photograph had some, and it is cheaper to look for them first.
    """
    if photo.faults or had_faults:
        photo = without_invalid_rows(photo)
        return use(photo.snapshot), photo
    try:
        return use(photo.snapshot), photo
    except SnapshotError:
        photo = without_invalid_rows(photo)
        return use(photo.snapshot), photo


def report_faults(leader: Held, before: Snapshot, faults: tuple[Fault, ...]) -> None:
    """Write the alarms about ``faults`` of ``before``, and end those of rows that are valid again. Raise Deposed."""
    names = names_of(before)
    with transaction.atomic():
        leases.check(leader)
        report_invalid_rows(
            [
                InvalidRowReport(fault.kind.value, fault.row, fault.field, message_for_admins(fault, names))
                for fault in faults
            ]
        )
