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

    acknowledged = QueryBooleanField(
        required=False, default=False, help_text="true: acknowledged alerts instead of unacknowledged ones."
    )


class AcknowledgeBody(StrictSerializer):
    """The acknowledgement of an alert."""

    note = StrictCharField(
        required=False, max_length=500, allow_blank=True, default="", help_text="Kept in the audit trail."
    )


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
        allow_null=True, help_text="null: not an XID alert; 0: uncorrected memory errors."
    )
    severity = serializers.ChoiceField(
        [*(each.value for each in XidSeverity), "foreign", "claimed"],
        help_text="fatal: the GPU is lost and its tasks were stopped; quarantine: it gets no new work; "
        "program: caused by a program; foreign: a foreign process uses it; claimed: another node reports the GPU.",
    )
    description = serializers.CharField(
        help_text="The XID according to NVIDIA's catalog, the owner of the foreign process, or the other node."
    )
    node = Reference(source="gpu.node", help_text="The node for which the GPU counts.")
    claiming_node = Reference(
        allow_null=True,
        source="claimant",
        help_text="Another node that reports the same GPU; the GPU does not count for it.",
    )
    gpu = serializers.CharField(source="gpu.uuid", help_text="Its UUID.")
    last_at = serializers.DateTimeField()
    repeat_count = serializers.IntegerField()
    resolved_at = serializers.DateTimeField(
        allow_null=True,
        help_text="When the foreign process had ended, or the claimant no longer reported the GPU.",
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
        "List GPU alerts",
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
        "Acknowledge a GPU alert",
        tag="nodes",
        scope=Scope.ADMIN,
        body=AcknowledgeBody,
        response=Alert,
        error_statuses=[409],
        detail="The next event creates a new alert. A quarantined GPU stays so until it is returned to service.",
    )
    def post(self, request: Request, alert: str) -> HttpResponse:
        """The acknowledged alert."""
        return self.json_response(Alert.represent(do_acknowledge_alert(self.user, alert, self.body["note"])))


class InvalidRowsQuery(ListQuery):
    """Filters of the list of invalid rows."""

    resolved = serializers.BooleanField(
        required=False, default=False, help_text="true: rows that are valid again instead of invalid ones."
    )


class InvalidRowSummary(_Acknowledged):
    """A row that the scheduler ignores until it is valid."""

    kind = serializers.CharField(help_text="node, running, pending, project, quota, pool, reservation ...")
    row = serializers.CharField(help_text="Its id; for a quota, the ids of project and pool.")
    field = serializers.CharField(help_text="The invalid column, such as nodes[n1].cpu_milli.")
    message = serializers.CharField()
    resolved_at = serializers.DateTimeField(
        allow_null=True, help_text="When the row was valid again or deleted."
    )


@access_policy(AccessPolicy.ADMIN)
class InvalidRowsView(ApiView):
    @operation(
        "invalid_rows_list",
        "List invalid rows",
        tag="scheduler",
        scope=Scope.ADMIN,
        query=InvalidRowsQuery,
        response=list_schema(InvalidRowSummary),
        detail="Jobs that depend on an invalid row get the verdict `invalid_data`; all others are scheduled.",
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
        detail="The alert is resolved when the row is valid.",
    )
    def post(self, request: Request, row: str) -> HttpResponse:
        """The acknowledged row."""
        return self.json_response(
            InvalidRowSummary.represent(do_acknowledge_invalid_row(self.user, row, self.body["note"]))
        )
