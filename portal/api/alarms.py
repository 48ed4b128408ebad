"""REST: alarms about GPUs and about invalid rows, for administrators."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from agents.xids import Grade
from portal.access import Policy, policy
from portal.api.bodies import Closed, Flag, Text
from portal.api.cursors import NEWEST
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes.words import Named, PersonName, named, person_name, when
from portal.models import GpuAlarm, InvalidRow
from portal.models.alarms import AlarmKind
from portal.selectors.alarms import Alarm, alarms, invalid_rows
from portal.services.alarms import do_acknowledge_alarm, do_acknowledge_invalid_row
from portal.services.tokens import Scope


class AlarmsQuery(PageQuery):
    """Which alarms."""

    acknowledged = Flag(required=False, default=False, help_text="Those instead.")


class NoteBody(Closed):
    """What was found."""

    note = Text(required=False, max_length=500, allow_blank=True, default="", help_text="Audited.")


class AlarmOut(serializers.Serializer[Any]):
    """One thing that befalls a GPU, until somebody acknowledged it."""

    id = serializers.CharField()
    kind = serializers.ChoiceField(AlarmKind.values)
    xid = serializers.IntegerField(
        allow_null=True, help_text="null: of another kind; 0: uncorrected memory errors were counted."
    )
    grade = serializers.ChoiceField(
        [*(each.value for each in Grade), "foreign", "claimed"],
        help_text="fatal: the GPU is out and its work was ended; quarantine: it takes nothing new; "
        "program: of a program, no alarm; claimed: another node reports the same GPU.",
    )
    meaning = serializers.CharField(
        help_text="Of the XID after NVIDIA's catalog; whose the foreign program is; which node reports it too."
    )
    node = Named(help_text="The node to which the GPU counts.")
    claimant = Named(allow_null=True, help_text="Another node that reports the same GPU, and cannot use it.")
    gpu = serializers.CharField(help_text="Its UUID.")
    first_at = serializers.DateTimeField()
    last_at = serializers.DateTimeField()
    times = serializers.IntegerField()
    over_at = serializers.DateTimeField(
        allow_null=True, help_text="When the foreign program was gone, or the claimant stopped."
    )
    acknowledged_at = serializers.DateTimeField(allow_null=True)
    acknowledged_by = PersonName(allow_null=True)
    note = serializers.CharField(allow_blank=True)


def shown(row: GpuAlarm) -> dict[str, Any]:
    """An alarm as JSON."""
    alarm = Alarm(row)
    return {
        "id": row.public_id,
        "kind": row.kind,
        "xid": row.code if row.kind == AlarmKind.XID else None,
        "grade": alarm.grade,
        "meaning": alarm.meaning,
        "node": named(row.gpu.node),
        "claimant": named(row.claimant) if row.claimant else None,
        "gpu": row.gpu.uuid,
        "first_at": when(row.first_at),
        "last_at": when(row.last_at),
        "times": row.times,
        "over_at": when(row.over_at),
        "acknowledged_at": when(row.acknowledged_at),
        "acknowledged_by": person_name(row.acknowledged_by) if row.acknowledged_by else None,
        "note": row.note,
    }


@policy(Policy.ADMIN)
class AlarmsRoute(Route):
    """Alarms about GPUs."""

    @operation(
        "alarms_list",
        "List alarms about GPUs",
        tag="nodes",
        scope=Scope.ADMIN,
        query=AlarmsQuery,
        answer=page_of(AlarmOut),
    )
    def get(self, request: Request) -> HttpResponse:
        """Newest first; those that nobody has acknowledged."""
        return self.page(alarms(acknowledged=self.query["acknowledged"]), shown, NEWEST)


@policy(Policy.ADMIN)
class AlarmAcknowledgeRoute(Route):
    """Acknowledging one."""

    @operation(
        "alarms_acknowledge",
        "Acknowledge an alarm",
        tag="nodes",
        scope=Scope.ADMIN,
        body=NoteBody,
        answer=AlarmOut,
        refusals=[404, 409],
        detail="Somebody has looked; the next time begins a new alarm. A GPU in quarantine stays there until it is "
        "given back.",
    )
    def post(self, request: Request, alarm: str) -> HttpResponse:
        """The alarm, acknowledged."""
        return self.answer(shown(do_acknowledge_alarm(self.person, alarm, self.body["note"])))


class InvalidRowsQuery(PageQuery):
    """Which invalid rows."""

    over = serializers.BooleanField(
        required=False, default=False, help_text="Those that are valid again instead."
    )


class InvalidRowOut(serializers.Serializer[Any]):
    """A row that the scheduler leaves out of its decisions until it is valid."""

    id = serializers.CharField()
    kind = serializers.CharField(help_text="node, running, pending, project, quota, pool, reservation ...")
    row = serializers.CharField(help_text="Its id; of a quota those of project and pool.")
    field = serializers.CharField(help_text="The value that is wrong, such as nodes[n1].cpu_milli.")
    message = serializers.CharField()
    first_at = serializers.DateTimeField()
    over_at = serializers.DateTimeField(allow_null=True, help_text="When it was valid again, or gone.")
    acknowledged_at = serializers.DateTimeField(allow_null=True)
    acknowledged_by = PersonName(allow_null=True)
    note = serializers.CharField(allow_blank=True)


def invalid_row(row: InvalidRow) -> dict[str, Any]:
    """An invalid row as JSON."""
    return {
        "id": row.public_id,
        "kind": row.kind,
        "row": row.row,
        "field": row.field,
        "message": row.message,
        "first_at": when(row.first_at),
        "over_at": when(row.over_at),
        "acknowledged_at": when(row.acknowledged_at),
        "acknowledged_by": person_name(row.acknowledged_by) if row.acknowledged_by else None,
        "note": row.note,
    }


@policy(Policy.ADMIN)
class InvalidRowsRoute(Route):
    """Rows that the scheduler leaves out."""

    @operation(
        "invalid_rows_list",
        "List invalid rows",
        tag="scheduler",
        scope=Scope.ADMIN,
        query=InvalidRowsQuery,
        answer=page_of(InvalidRowOut),
        detail="All that does not depend on them is scheduled. A job that does has the verdict `invalid_data`.",
    )
    def get(self, request: Request) -> HttpResponse:
        """Newest first."""
        return self.page(invalid_rows(over=self.query["over"]), invalid_row, NEWEST)


@policy(Policy.ADMIN)
class InvalidRowAcknowledgeRoute(Route):
    """Acknowledging one."""

    @operation(
        "invalid_rows_acknowledge",
        "Acknowledge an invalid row",
        tag="scheduler",
        scope=Scope.ADMIN,
        body=NoteBody,
        answer=InvalidRowOut,
        refusals=[404, 409],
        detail="The alarm itself ends once the row is valid.",
    )
    def post(self, request: Request, row: str) -> HttpResponse:
        """The alarm, acknowledged."""
        return self.answer(invalid_row(do_acknowledge_invalid_row(self.person, row, self.body["note"])))
