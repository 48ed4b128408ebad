"""REST: GPU alerts and invalid rows, for administrators."""

from __future__ import annotations

from functools import partial

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from agents.xid_catalog import XidSeverity
from portal.api.framework.pagination import NEWEST
from portal.api.framework.request_parsing import QueryBooleanField, StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import AdminView, ListQuery, operation
from portal.api.serializers.references import Reference, UserReference
from portal.models import GpuAlert
from portal.models.nodes.alerts import AlertKind
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
        allow_null=True, help_text="XID; 0 for uncorrected memory errors; null if it is not an XID alert."
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


class AlertsView(AdminView):
    @operation(
        "alerts_list", "List GPU alerts", tag="nodes", scope=Scope.ADMIN, query=AlertsQuery, response=[Alert]
    )
    def get(self, request: Request) -> HttpResponse:
        """Alerts, newest first; by default only unacknowledged ones."""
        return self.paginated_response(
            alerts(acknowledged=self.query["acknowledged"]), Alert.represent, NEWEST
        )


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


class InvalidRowsView(AdminView):
    @operation(
        "invalid_rows_list",
        "List invalid rows",
        tag="scheduler",
        scope=Scope.ADMIN,
        query=InvalidRowsQuery,
        response=[InvalidRowSummary],
        detail="Jobs that depend on an invalid row get the verdict `invalid_data`; all others are scheduled.",
    )
    def get(self, request: Request) -> HttpResponse:
        return self.paginated_response(
            invalid_rows(resolved=self.query["resolved"]), InvalidRowSummary.represent, NEWEST
        )


_action = partial(
    action_route,
    get_row=lambda user, public_id: public_id,
    segment="acknowledge",
    body=AcknowledgeBody,
    idempotent=False,
    error_statuses=[409],
)
ROUTES = [
    path("alerts/", AlertsView.as_view()),
    _action(
        "alerts/<slug:alert>/",
        name="alerts_acknowledge",
        summary="Acknowledge a GPU alert",
        detail="The next event creates a new alert. A quarantined GPU stays so until it is returned to service.",
        perform=lambda user, alert, note: do_acknowledge_alert(user, alert, note),
        represent=lambda user, _key, alert: Alert.represent(alert),
        response=Alert,
        tag="nodes",
    ),
    path("scheduler/invalid-rows/", InvalidRowsView.as_view()),
    _action(
        "scheduler/invalid-rows/<slug:row>/",
        name="invalid_rows_acknowledge",
        summary="Acknowledge an invalid row",
        detail="The alert is resolved when the row is valid.",
        perform=lambda user, row, note: do_acknowledge_invalid_row(user, row, note),
        represent=lambda user, _key, row: InvalidRowSummary.represent(row),
        response=InvalidRowSummary,
        tag="scheduler",
    ),
]
