"""Loads renewed TLS files while the gateway runs: new connections get them, open ones are left alone."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from pathlib import Path

from cryptography import x509
from redis.exceptions import RedisError

from portal.domain.cluster.portal_health import CertificateStatus
from portal.valkey.portal_health import forget_gateway_certificate, store_gateway_certificate

log = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0
REPORT_EVERY_S = 60.0

_Signature = tuple[tuple[int, ...] | None, ...]


class CertificateFiles:
    """The certificate that new connections get. Only ``check`` writes, in one thread.

    A context is never changed: a certificate without its key would break handshakes. Each renewal is a new
    context, which the callback for the server's name gives to a connection before a certificate is chosen.
    """

    def __init__(self, serving: ssl.SSLContext, certificate: Path, key: Path, ciphers: str | None) -> None:
        self._certificate, self._key, self._ciphers = certificate, key, ciphers
        self._loaded = self._seen = self._signature()
        self._current: ssl.SSLContext | None = None
        self.status = CertificateStatus(str(certificate), _expires_s(certificate))
        serving.sni_callback = self._use_current

    def _use_current(self, connection: ssl.SSLObject, name: str | None, serving: ssl.SSLContext) -> None:
        if self._current is not None:
            connection.context = self._current

    def check(self) -> None:
        """Load files that changed and were the same in two checks: one is written after the other."""
        now, before = self._signature(), self._seen
        self._seen = now
        if now == self._loaded or now != before:
            return
        self._loaded = now  # a refused pair is tried again only when it changes
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # without a callback, OpenSSL asks the terminal for the password of a key
            context.load_cert_chain(self._certificate, self._key, password=lambda: "")
            if self._ciphers is not None:
                context.set_ciphers(self._ciphers)
            expires_s = _expires_s(self._certificate)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = f"{error.__class__.__name__}: {error}."
            log.error("%s is not loaded, the previous certificate stays: %s", self._certificate, reason)
            self.status = CertificateStatus(str(self._certificate), self.status.expires_s, reason)
            return
        self._current = context
        self.status = CertificateStatus(str(self._certificate), expires_s)
        log.info("new connections get the changed certificate %s", self._certificate)

    def _signature(self) -> _Signature:
        """Return what changes with the files, also behind links; None for one that is not there."""
        found: list[tuple[int, ...] | None] = []
        for path in (self._certificate, self._key):
            try:
                status = path.stat()
            except OSError:
                found.append(None)
            else:
                found.append((status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)


def _expires_s(certificate: Path) -> float:
    """Return the end of the first certificate of a file (Unix time). Raise OSError or ValueError."""
    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc.timestamp()


def watch_certificate(
    serving: ssl.SSLContext, certificate: Path, key: Path, ciphers: str | None
) -> CertificateFiles:
    """Start a thread that checks the files and reports their state for metrics and alerts."""
    files = CertificateFiles(serving, certificate, key, ciphers)
    threading.Thread(target=_watch, args=(files,), name="certificates", daemon=True).start()
    return files


def report_no_certificate() -> None:
    """Record that this gateway serves no certificate: another server terminates TLS."""
    try:
        forget_gateway_certificate()
    except RedisError as error:
        log.warning("the certificate could not be reported: %s", error)


def _watch(files: CertificateFiles) -> None:
    reported: CertificateStatus | None = None
    reported_s = -REPORT_EVERY_S
    while True:
        try:
            files.check()
            now_s = time.monotonic()
            if files.status != reported or now_s - reported_s >= REPORT_EVERY_S:
                reported, reported_s = files.status, now_s
                store_gateway_certificate(files.status)
        except RedisError as error:
            log.warning("the certificate could not be reported: %s", error)
        except Exception:
            log.exception("the TLS files could not be checked; they are checked again")
        time.sleep(CHECK_EVERY_S)
