"""Conditions of the portal's own machine that need an administrator: disks, backups, certificates. No Django."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LOW_SHARE = 0.1
"""A disk with less free space or fewer free inodes than this share needs an administrator."""
FULL_SHARE = 0.03
CERTIFICATE_WARNING_S = 14 * 86_400.0
CERTIFICATE_URGENT_S = 3 * 86_400.0
OUTDATED_AFTER_S = 600.0
"""Measurements are made each minute; older ones say nothing about the present."""


class PortalAlertKind(StrEnum):
    DISK_SPACE = "disk_space"
    DISK_INODES = "disk_inodes"
    BACKUP_MISSING = "backup_missing"
    BACKUP_OLD = "backup_old"
    CERTIFICATE_EXPIRES = "certificate_expires"
    CERTIFICATE_REFUSED = "certificate_refused"
    NOT_MEASURED = "not_measured"


@dataclass(frozen=True)
class DiskUsage:
    """The file system of a folder, in bytes and inodes. Inodes are 0 where the file system does not count them."""

    name: str
    path: str
    total_bytes: int
    free_bytes: int
    total_inodes: int
    free_inodes: int


@dataclass(frozen=True)
class CertificateStatus:
    """The certificate of the public port. ``expires_s`` (Unix time): None if not known. ``refused``: why new
    files were not loaded; blank if they were."""

    source: str
    expires_s: float | None
    refused: str = ""


@dataclass(frozen=True)
class PortalMeasurement:
    """What was measured on the portal's machine; None where it is not known. Times are Unix times."""

    measured_s: float
    disks: tuple[DiskUsage, ...] = ()
    log_bytes: int | None = None
    log_files: int | None = None
    backup_s: float | None = None
    backup_limit_s: float = 0.0
    """Age of the last backup that needs an administrator; 0: none."""
    installed_s: float | None = None
    certificate: CertificateStatus | None = None


@dataclass(frozen=True)
class PortalAlert:
    """A condition. ``urgent``: service is about to fail. ``details``: values for its message."""

    kind: PortalAlertKind
    urgent: bool
    details: Mapping[str, Any]


def portal_alerts(found: PortalMeasurement | None, now_s: float | None = None) -> list[PortalAlert]:
    """Return the conditions that need an administrator, urgent ones first."""
    now_s = time.time() if now_s is None else now_s
    if found is None:
        return [PortalAlert(PortalAlertKind.NOT_MEASURED, False, {})]
    alerts = [*_disk_alerts(found.disks), *_backup_alerts(found, now_s)]
    if found.certificate is not None:
        alerts += _certificate_alerts(found.certificate, now_s)
    if abs(now_s - found.measured_s) > OUTDATED_AFTER_S:
        alerts.append(PortalAlert(PortalAlertKind.NOT_MEASURED, False, {"since_s": found.measured_s}))
    return sorted(alerts, key=lambda alert: not alert.urgent)


def _disk_alerts(disks: tuple[DiskUsage, ...]) -> list[PortalAlert]:
    alerts = []
    for disk in disks:
        for kind, total, free in (
            (PortalAlertKind.DISK_SPACE, disk.total_bytes, disk.free_bytes),
            (PortalAlertKind.DISK_INODES, disk.total_inodes, disk.free_inodes),
        ):
            if total and free < LOW_SHARE * total:
                details = {"disk": disk.name, "path": disk.path, "free": free, "total": total}
                alerts.append(PortalAlert(kind, free < FULL_SHARE * total, details))
    return alerts


def _backup_alerts(found: PortalMeasurement, now_s: float) -> list[PortalAlert]:
    limit_s = found.backup_limit_s
    if not limit_s:
        return []
    if found.backup_s is None:
        is_new = found.installed_s is None or now_s - found.installed_s < limit_s
        return [] if is_new else [PortalAlert(PortalAlertKind.BACKUP_MISSING, False, {})]
    if now_s - found.backup_s > limit_s:
        return [PortalAlert(PortalAlertKind.BACKUP_OLD, False, {"at_s": found.backup_s})]
    return []


def _certificate_alerts(certificate: CertificateStatus, now_s: float) -> list[PortalAlert]:
    alerts = []
    if certificate.expires_s is not None and certificate.expires_s - now_s < CERTIFICATE_WARNING_S:
        details = {"source": certificate.source, "at_s": certificate.expires_s}
        urgent = certificate.expires_s - now_s < CERTIFICATE_URGENT_S
        alerts.append(PortalAlert(PortalAlertKind.CERTIFICATE_EXPIRES, urgent, details))
    if certificate.refused:
        details = {"source": certificate.source, "problem": certificate.refused}
        alerts.append(PortalAlert(PortalAlertKind.CERTIFICATE_REFUSED, False, details))
    return alerts
