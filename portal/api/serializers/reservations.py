"""Serializers of reservations, as one user may see them."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from portal.api.serializers.references import Reference, reference, timestamp
from portal.models import Reservation as ReservationRow
from portal.selectors.scheduling.reservations import ReservationPhase, ReservationView


class BlockingJob(serializers.Serializer[Any]):
    """A job of another project that runs on reserved nodes."""

    job = Reference(allow_null=True, help_text="null: a job that you may not see.")
    nodes = serializers.ListField(child=serializers.CharField())
    until = serializers.DateTimeField(allow_null=True, help_text="By its time limit; null: it has none.")


class Reservation(Reference):
    """Nodes reserved for projects and their descendants; without projects: maintenance."""

    pool = Reference()
    phase = serializers.ChoiceField([phase.value for phase in ReservationPhase])
    nodes = serializers.ListField(child=serializers.CharField(), help_text="By name.")
    projects = Reference(many=True)
    hidden_projects = serializers.IntegerField(help_text="How many more, which you may not see.")
    maintenance = serializers.BooleanField(help_text="It is for nobody.")
    starts_at = serializers.DateTimeField()
    ends_at = serializers.DateTimeField(help_text="Not included.")
    reason = serializers.CharField(allow_blank=True)
    drain_at_start = serializers.BooleanField(
        help_text="Who still stands there when it begins is asked to leave."
    )
    cancelled_at = serializers.DateTimeField(allow_null=True)
    etag = serializers.CharField(help_text="For If-Match.")
    blocking_jobs = BlockingJob(many=True, help_text="Who stands there and may stay beyond its begin.")


def etag_of(row: ReservationRow) -> str:
    return f'"{row.public_id}-{row.version}"'


def reservation(shown: ReservationView) -> dict[str, Any]:
    row = shown.row
    return {
        "id": row.public_id,
        "name": row.name,
        "pool": reference(row.pool),
        "phase": shown.phase.value,
        "nodes": shown.nodes,
        "projects": [reference(project) for project in shown.projects],
        "hidden_projects": shown.hidden_project_count,
        "maintenance": shown.is_maintenance,
        "starts_at": timestamp(row.starts_at),
        "ends_at": timestamp(row.ends_at),
        "reason": row.reason,
        "drain_at_start": row.drain_at_start,
        "cancelled_at": timestamp(row.cancelled_at),
        "etag": etag_of(row),
        "blocking_jobs": [
            {"job": reference(one.job), "nodes": list(one.nodes), "until": timestamp(one.until)}
            for one in shown.blocking_jobs
        ],
    }
