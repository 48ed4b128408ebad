"""Conditions of the portal's own machine as administrators read them: what is wrong and what to do."""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass

from django.template.defaultfilters import filesizeformat
from django.utils import timezone
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.domain.cluster.portal_health import (
    OUTDATED_AFTER_S,
    DiskUsage,
    PortalAlert,
    PortalAlertKind,
    PortalMeasurement,
    portal_alerts,
)
from portal.valkey.portal_health import last_measurement

_STARTED_S = time.monotonic()
_Kind = PortalAlertKind
_TITLES = {
    _Kind.DISK_SPACE: gettext_noop("The disk of the portal is almost full."),
    _Kind.DISK_INODES: gettext_noop("The disk of the portal can hold few more files."),
    _Kind.BACKUP_MISSING: gettext_noop("This installation was never backed up."),
    _Kind.BACKUP_OLD: gettext_noop("The last backup is old."),
    _Kind.CERTIFICATE_EXPIRES: gettext_noop("The TLS certificate expires soon."),
    _Kind.CERTIFICATE_REFUSED: gettext_noop("The new TLS certificate cannot be used."),
    _Kind.NOT_MEASURED: gettext_noop("The portal's machine is not being watched."),
}
_MESSAGES = {
    _Kind.DISK_SPACE: gettext_noop("{free} of {total} are free in {path}."),
    _Kind.DISK_INODES: gettext_noop("{free} of {total} inodes are free in {path}."),
    _Kind.BACKUP_MISSING: "",
    _Kind.BACKUP_OLD: gettext_noop("It was made on {time}."),
    _Kind.CERTIFICATE_EXPIRES: gettext_noop("{source} is valid until {time}."),
    _Kind.CERTIFICATE_REFUSED: gettext_noop("{source}: {problem} The gateway keeps the previous one."),
    _Kind.NOT_MEASURED: "",
}
_ACTIONS = {
    _Kind.DISK_SPACE: gettext_noop(
        "Free space there, or set a retention of logs (docs/operations.md). A full disk stops the portal."
    ),
    _Kind.DISK_INODES: gettext_noop("Delete files there, or set a retention of logs (docs/operations.md)."),
    _Kind.BACKUP_MISSING: gettext_noop(
        "Run manage.py backup regularly, or report backups made by other means with manage.py record-backup."
    ),
    _Kind.BACKUP_OLD: gettext_noop(
        "Check what runs manage.py backup, or report backups made by other means with manage.py record-backup."
    ),
    _Kind.CERTIFICATE_EXPIRES: gettext_noop("Renew it; the gateway loads new files without a restart."),
    _Kind.CERTIFICATE_REFUSED: gettext_noop(
        "Check that the certificate and its key are complete and belong together."
    ),
    _Kind.NOT_MEASURED: gettext_noop("Check that worker-nodes and Valkey run; its log names the reason."),
}


@dataclass(frozen=True)
class PortalAlertView:
    alert: PortalAlert

    @property
    def title(self) -> str:
        return _(_TITLES[self.alert.kind])

    @property
    def message(self) -> str:
        """Return the numbers; blank if the title says everything."""
        text = _MESSAGES[self.alert.kind]
        return _(text).format(**self._details()) if text else ""

    @property
    def action(self) -> str:
        return _(_ACTIONS[self.alert.kind])

    def _details(self) -> dict[str, object]:
        details = dict(self.alert.details)
        if "at_s" in details:
            at = dt.datetime.fromtimestamp(details.pop("at_s"), dt.UTC)
            details["time"] = f"{timezone.localtime(at):%Y-%m-%d %H:%M %Z}"
        if self.alert.kind is _Kind.DISK_SPACE:
            details |= {name: filesizeformat(details[name]) for name in ("free", "total")}
        if self.alert.kind is _Kind.DISK_INODES:
            details |= {name: number_format(details[name], force_grouping=True) for name in ("free", "total")}
        return details


@dataclass(frozen=True)
class PortalHealth:
    """The last measurement, None if there is none, and what needs an administrator."""

    measurement: PortalMeasurement | None
    alerts: list[PortalAlertView]

    @property
    def measured_disks(self) -> tuple[DiskUsage, ...]:
        return self.measurement.disks if self.measurement else ()


def portal_health() -> PortalHealth:
    """Read no row: the measurement is in Valkey. A missing one is no alert soon after the start."""
    found = last_measurement()
    is_new = time.monotonic() - _STARTED_S < OUTDATED_AFTER_S
    alerts = [
        PortalAlertView(alert)
        for alert in portal_alerts(found)
        if not (is_new and alert.kind is PortalAlertKind.NOT_MEASURED)
    ]
    return PortalHealth(found, alerts)
