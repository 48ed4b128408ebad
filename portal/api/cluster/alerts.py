"""REST: GPU alerts and invalid rows, for administrators."""

from __future__ import annotations

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from agents.xid_catalog import XidSeverity
from portal.access import AccessPolicy, access_policy
from portal.api.framework.pagination import NEWEST
from portal.api.framework.request_parsing import QueryBooleanField, StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import ApiView, ListQuery, list_schema, operation
from portal.api.serializers.references import Reference, UserReference
from portal.models import GpuAlert
from portal.models.alerts import AlertKind
from portal.selectors.nodes.alerts import AlertView, alerts, invalid_rows
from portal.services.accounts.tokens import Scope
from portal.services.nodes.alerts import do_acknowledge_alert, do_acknowledge_invalid_row


class AlertsQuery(ListQuery):
    """Filters of the alert list."""

    acknowledged = QueryBooleanField(required=False, default=False, help_text="Those instead.")


class AcknowledgeBody(StrictSerializer):
    """The acknowledgement of an alert."""

    note = StrictCharField(required=False, max_length=500, allow_blank=True, default="", help_text="Audited.")


class _Acknowledged(ResponseSerializer):
    id = serializers.CharField(source="public_id")
    first_at = serializers.DateTimeField()
    acknowledged_at = serializers.DateTimeField(allow_null=True)
    acknowledged_by = UserReference(allow_null=True)
    note = serializers.CharField(allow_blank=True)


class Alert(_Acknowledged):
    """An event of a GPU that an administrator acknowledges."""

    kind = serializers.ChoiceField(AlertKind.values)
    xid = serializers.IntegerField(
        allow_null=True, help_text="null: of another kind; 0: uncorrected memory errors were counted."
    )
    severity = serializers.ChoiceField(
        [*(each.value for each in XidSeverity), "foreign", "claimed"],
        help_text="fatal: the GPU is out and its work was ended; quarantine: it takes nothing new; "
        "program: of a program, no alarm; claimed: another node reports the same GPU.",
    )
    description = serializers.CharField(
        help_text="Of the XID after NVIDIA's catalog; whose the foreign program is; which node reports it too."
    )
    node = Reference(source="gpu.node", help_text="The node to which the GPU counts.")
    claiming_node = Reference(
        allow_null=True,
        source="claimant",
        help_text="Another node that reports the same GPU, and cannot use it.",
    )
    gpu = serializers.CharField(source="gpu.uuid", help_text="Its UUID.")
    last_at = serializers.DateTimeField()
    repeat_count = serializers.IntegerField()
    resolved_at = serializers.DateTimeField(
        allow_null=True, help_text="When the foreign program was gone, or the claimant stopped."
    )

    @staticmethod
    def get_xid(row: GpuAlert, context: None) -> int | None:
        return row.code if row.kind == AlertKind.XID else None

    @staticmethod
    def get_severity(row: GpuAlert, context: None) -> str:
        return AlertView(row).severity

    @staticmethod
    def get_description(row: GpuAlert, context: None) -> str:
        return AlertView(row).meaning


@access_policy(AccessPolicy.ADMIN)
class AlertsView(ApiView):
    @operation(
        "alerts_list",
        "List alarms about GPUs",
        tag="nodes",
        scope=Scope.ADMIN,
        query=AlertsQuery,
        response=list_schema(Alert),
    )
    def get(self, request: Request) -> HttpResponse:
        """Alerts, newest first; by default only unacknowledged ones."""
        return self.paginated_response(
            alerts(acknowledged=self.query["acknowledged"]), Alert.represent, NEWEST
        )


@access_policy(AccessPolicy.ADMIN)
class AlertAcknowledgeView(ApiView):
    @operation(
        "alerts_acknowledge",
        "Acknowledge an alarm",
        tag="nodes",
        scope=Scope.ADMIN,
        body=AcknowledgeBody,
        response=Alert,
        error_statuses=[409],
        detail="Somebody has looked; the next time begins a new alarm. A GPU in quarantine stays there until it is "
        "given back.",
    )
    def post(self, request: Request, alert: str) -> HttpResponse:
        """The acknowledged alert."""
        return self.json_response(Alert.represent(do_acknowledge_alert(self.user, alert, self.body["note"])))


class InvalidRowsQuery(ListQuery):
    """Filters of the list of invalid rows."""

    resolved = serializers.BooleanField(
        required=False, default=False, help_text="Those that are valid again instead."
    )


class InvalidRowSummary(_Acknowledged):
    """A row that the scheduler ignores until it is valid."""

    kind = serializers.CharField(help_text="node, running, pending, project, quota, pool, reservation ...")
    row = serializers.CharField(help_text="Its id; of a quota those of project and pool.")
    field = serializers.CharField(help_text="The value that is wrong, such as nodes[n1].cpu_milli.")
    message = serializers.CharField()
    resolved_at = serializers.DateTimeField(allow_null=True, help_text="When it was valid again, or gone.")


@access_policy(AccessPolicy.ADMIN)
class InvalidRowsView(ApiView):
    @operation(
        "invalid_rows_list",
        "List invalid rows",
        tag="scheduler",
        scope=Scope.ADMIN,
        query=InvalidRowsQuery,
        response=list_schema(InvalidRowSummary),
        detail="All that does not depend on them is scheduled. A job that does has the verdict `invalid_data`.",
    )
    def get(self, request: Request) -> HttpResponse:
        """Invalid rows, newest first."""
        return self.paginated_response(
            invalid_rows(resolved=self.query["resolved"]), InvalidRowSummary.represent, NEWEST
        )


@access_policy(AccessPolicy.ADMIN)
class InvalidRowAcknowledgeView(ApiView):
    @operation(
        "invalid_rows_acknowledge",
        "Acknowledge an invalid row",
        tag="scheduler",
        scope=Scope.ADMIN,
        body=AcknowledgeBody,
        response=InvalidRowSummary,
        error_statuses=[409],
        detail="The alarm itself ends once the row is valid.",
    )
    def post(self, request: Request, row: str) -> HttpResponse:
        """The acknowledged row."""
        return self.json_response(
            InvalidRowSummary.represent(do_acknowledge_invalid_row(self.user, row, self.body["note"]))
        )
