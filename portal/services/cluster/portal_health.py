"""Measures the portal's machine: disks, size of the log folder, age of the backup, certificate of the public URL."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from django.conf import settings

from portal.config.last_backup import last_backup_s
from portal.domain.cluster.portal_health import CertificateStatus, DiskUsage, PortalMeasurement
from portal.models import ClusterSettings
from portal.valkey.portal_health import store_measurement

log = logging.getLogger(__name__)

MAX_ENTRIES = 5_000
"""Files and folders that one pass counts; the sum is published when all have been seen."""
CERTIFICATE_EVERY_S = 3_600.0
CONNECT_TIMEOUT_S = 5.0


class FolderSize:
    """The size of a folder, counted a bounded number of entries at a time; follows no links."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._walk: Iterator[int] | None = None
        self._bytes = self._files = 0
        self.complete: tuple[int, int] | None = None
        """Bytes on disk and files of the last complete count; None before the first."""

    def count(self, max_entries: int = MAX_ENTRIES) -> None:
        """Count further entries, at most ``max_entries``, and begin anew in the next call when all were seen."""
        if self._walk is None:
            self._walk, self._bytes, self._files = _file_sizes(str(self._folder)), 0, 0
        for _ in range(max_entries):
            size = next(self._walk, None)
            if size is None:
                self.complete, self._walk = (self._bytes, self._files), None
                return
            if size >= 0:
                self._bytes, self._files = self._bytes + size, self._files + 1


def _file_sizes(root: str) -> Iterator[int]:
    """Yield the bytes on disk of each file, and -1 for each other entry."""
    folders = [root]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    try:
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                            yield -1
                        elif entry.is_file(follow_symlinks=False):
                            yield entry.stat(follow_symlinks=False).st_blocks * 512
                        else:
                            yield -1
                    except FileNotFoundError:
                        yield -1  # deleted meanwhile
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("a folder of logs cannot be read: %s", error)
            yield -1


_log_folder: FolderSize | None = None
_certificate: tuple[float, CertificateStatus | None] | None = None


def measure_portal() -> None:
    """Measure and store; runs each minute in a process with the data folder. Raise RedisError."""
    global _log_folder
    if _log_folder is None or _log_folder._folder != Path(settings.LOG_DIR):
        _log_folder = FolderSize(Path(settings.LOG_DIR))
    _log_folder.count()
    log_bytes, log_files = _log_folder.complete or (None, None)
    installed_at = ClusterSettings.objects.filter(id=1).values_list("created_at", flat=True).first()
    store_measurement(
        PortalMeasurement(
            time.time(),
            disk_usages(),
            log_bytes,
            log_files,
            last_backup_s(Path(settings.DATA_DIR)),
            settings.BACKUP_ALERT_HOURS * 3600.0,
            installed_at.timestamp() if installed_at else None,
            _public_certificate(),
        )
    )


def disk_usages() -> tuple[DiskUsage, ...]:
    """Return the file systems of the data folder, of logs, artifacts and temporary files, each once."""
    found: dict[int, DiskUsage] = {}
    for name, path in (
        ("data", Path(settings.DATA_DIR)),
        ("logs", Path(settings.LOG_DIR)),
        ("artifacts", Path(settings.DATA_DIR) / "artifacts"),
        ("temporary", Path(tempfile.gettempdir())),
    ):
        try:
            device, usage = path.stat().st_dev, os.statvfs(path)
        except OSError:
            continue  # not yet created
        found.setdefault(
            device,
            DiskUsage(
                name,
                str(path),
                usage.f_blocks * usage.f_frsize,
                usage.f_bavail * usage.f_frsize,
                usage.f_files,
                usage.f_favail,
            ),
        )
    return tuple(found.values())


def _public_certificate() -> CertificateStatus | None:
    """Return the certificate of the public URL, asked once an hour; None without https."""
    global _certificate
    if _certificate is None or time.monotonic() - _certificate[0] > CERTIFICATE_EVERY_S:
        _certificate = (time.monotonic(), read_public_certificate(settings.PORTAL_URL))
    return _certificate[1]


def read_public_certificate(url: str) -> CertificateStatus | None:
    """Return the certificate that a URL serves; None without https. Its chain is not checked: only its end counts."""
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        return None
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((parts.hostname, parts.port or 443), CONNECT_TIMEOUT_S) as connection,
            context.wrap_socket(connection, server_hostname=parts.hostname) as stream,
        ):
            encoded = stream.getpeercert(binary_form=True)
        expires_s = x509.load_der_x509_certificate(encoded or b"").not_valid_after_utc.timestamp()
    except (OSError, ValueError) as error:
        log.info("the certificate of %s is not known: %s", url, error)
        return CertificateStatus(url, None)
    return CertificateStatus(url, expires_s)
