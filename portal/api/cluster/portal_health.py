"""REST: the portal's own machine, for administrators."""

from __future__ import annotations

import datetime as dt

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import AdminView, operation
from portal.domain.cluster.portal_health import PortalAlertKind
from portal.selectors.cluster.portal_alerts import PortalHealth, portal_health
from portal.services.accounts.tokens import Scope


def _time(seconds: float | None) -> dt.datetime | None:
    return None if seconds is None else dt.datetime.fromtimestamp(seconds, dt.UTC)


class PortalDisk(ResponseSerializer):
    """A file system of the portal's machine."""

    name = serializers.CharField(help_text="The first folder on it: data, logs, artifacts or temporary.")
    path = serializers.CharField()
    total_bytes = serializers.IntegerField()
    free_bytes = serializers.IntegerField()
    total_inodes = serializers.IntegerField(help_text="0 if the file system does not count them.")
    free_inodes = serializers.IntegerField()


class PortalAlertItem(ResponseSerializer):
    """A condition that needs an administrator."""

    kind = serializers.ChoiceField([kind.value for kind in PortalAlertKind], source="alert.kind.value")
    urgent = serializers.BooleanField(source="alert.urgent")
    title = serializers.CharField()
    message = serializers.CharField(allow_blank=True)
    action = serializers.CharField(help_text="What to do.")


class PortalHealthStatus(ResponseSerializer):
    """The portal's own machine; null: not known."""

    measured_at = serializers.DateTimeField(allow_null=True)
    disks = PortalDisk(many=True, source="measured_disks")
    log_bytes = serializers.IntegerField(allow_null=True, source="measurement.log_bytes")
    log_files = serializers.IntegerField(allow_null=True, source="measurement.log_files")
    last_backup_at = serializers.DateTimeField(
        allow_null=True, help_text="null: never, as far as was reported."
    )
    certificate_expires_at = serializers.DateTimeField(allow_null=True)
    alerts = PortalAlertItem(many=True)

    @staticmethod
    def get_measured_at(row: PortalHealth, context: None) -> dt.datetime | None:
        return _time(row.measurement.measured_s if row.measurement else None)

    @staticmethod
    def get_last_backup_at(row: PortalHealth, context: None) -> dt.datetime | None:
        return _time(row.measurement.backup_s if row.measurement else None)

    @staticmethod
    def get_certificate_expires_at(row: PortalHealth, context: None) -> dt.datetime | None:
        certificate = row.measurement.certificate if row.measurement else None
        return _time(certificate.expires_s if certificate else None)


class PortalHealthView(AdminView):
    @operation(
        "portal_health_get",
        "Get the state of the portal's machine",
        tag="scheduler",
        scope=Scope.ADMIN,
        response=PortalHealthStatus,
        detail="Disks, size of the logs, last backup and TLS certificate, measured each minute.",
    )
    def get(self, request: Request) -> HttpResponse:
        return self.json_response(PortalHealthStatus.represent(portal_health()))
