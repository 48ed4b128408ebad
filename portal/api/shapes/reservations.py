"""The shape of a reservation, as one person may see it."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from portal.api.shapes.words import Named, named, when
from portal.models import Reservation as ReservationRow
from portal.selectors.reservations import Phase, Shown


class InTheWay(serializers.Serializer[Any]):
    """A job of others that stands on reserved nodes."""

    job = Named(allow_null=True, help_text="null: a job that you may not see.")
    nodes = serializers.ListField(child=serializers.CharField())
    until = serializers.DateTimeField(allow_null=True, help_text="By its time limit; null: it has none.")


class Reservation(Named):
    """Nodes kept for projects, and those below them; for none: maintenance."""

    pool = Named()
    phase = serializers.ChoiceField([phase.value for phase in Phase])
    nodes = serializers.ListField(child=serializers.CharField(), help_text="By name.")
    projects = Named(many=True)
    hidden_projects = serializers.IntegerField(help_text="How many more, which you may not see.")
    maintenance = serializers.BooleanField(help_text="It is for nobody.")
    begin = serializers.DateTimeField()
    end = serializers.DateTimeField(help_text="Not included.")
    reason = serializers.CharField(allow_blank=True)
    clears = serializers.BooleanField(help_text="Who still stands there when it begins is asked to leave.")
    cancelled_at = serializers.DateTimeField(allow_null=True)
    etag = serializers.CharField(help_text="For If-Match.")
    in_the_way = InTheWay(many=True, help_text="Who stands there and may stay beyond its begin.")


def etag_of(row: ReservationRow) -> str:
    """The entity tag of a reservation as it stands."""
    return f'"{row.public_id}-{row.version}"'


def reservation(shown: Shown) -> dict[str, Any]:
    """A reservation as the reader may see it."""
    row = shown.row
    return {
        "id": row.public_id,
        "name": row.name,
        "pool": named(row.pool),
        "phase": shown.phase.value,
        "nodes": shown.nodes,
        "projects": [named(project) for project in shown.projects],
        "hidden_projects": shown.hidden,
        "maintenance": shown.maintenance,
        "begin": when(row.begin),
        "end": when(row.end),
        "reason": row.reason,
        "clears": row.clears,
        "cancelled_at": when(row.cancelled_at),
        "etag": etag_of(row),
        "in_the_way": [
            {"job": named(one.job), "nodes": list(one.nodes), "until": when(one.until)}
            for one in shown.in_the_way
        ],
    }
