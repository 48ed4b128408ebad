"""REST: alarms about GPUs, for administrators."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from agents.xids import Grade
from portal.access import Policy, policy
from portal.api.bodies import Closed, Text
from portal.api.cursors import NEWEST
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes.words import Named, PersonName, named, person_name, when
from portal.models import GpuAlarm
from portal.models.alarms import AlarmKind
from portal.selectors.alarms import Alarm, alarms
from portal.services.alarms import do_acknowledge_alarm
from portal.services.tokens import Scope


class AlarmsQuery(PageQuery):
    """Which alarms."""

    acknowledged = serializers.BooleanField(required=False, default=False, help_text="Those instead.")


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
