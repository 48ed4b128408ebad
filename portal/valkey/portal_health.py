"""The last measurement of the portal's machine, in Valkey: each process stores what only it can see."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace

from redis.exceptions import RedisError

from portal.domain.cluster.portal_health import CertificateStatus, DiskUsage, PortalMeasurement
from portal.valkey.client import record_valkey_error, valkey_client

log = logging.getLogger(__name__)

_KEY = "fairway:portal-health"
_MACHINE, _CERTIFICATE = "machine", "certificate"
TTL_S = 86_400
VALKEY_TIMEOUT_S = 2.0


def store_measurement(found: PortalMeasurement) -> None:
    """Store what the process with the data folder measured. Raise RedisError."""
    _store(_MACHINE, json.dumps(asdict(found)))


def store_gateway_certificate(found: CertificateStatus) -> None:
    """Store the certificate that the gateway serves; it precedes one that was asked for. Raise RedisError."""
    _store(_CERTIFICATE, json.dumps(asdict(found)))


def forget_gateway_certificate() -> None:
    """Record that the gateway serves no certificate. Raise RedisError."""
    valkey_client(VALKEY_TIMEOUT_S).hdel(_KEY, _CERTIFICATE)


def _store(field: str, text: str) -> None:
    with valkey_client(VALKEY_TIMEOUT_S).pipeline() as pipe:
        pipe.hset(_KEY, field, text)
        pipe.expire(_KEY, TTL_S)
        pipe.execute()


def last_measurement() -> PortalMeasurement | None:
    """Return the last measurement in one round trip; None without one, or when Valkey does not answer."""
    try:
        machine, certificate = valkey_client(VALKEY_TIMEOUT_S).hmget(_KEY, _MACHINE, _CERTIFICATE)
    except RedisError as error:
        record_valkey_error(error)
        log.warning("no measurements of the portal's machine: %s", error)
        return None
    try:
        if machine is None:
            return None
        values = json.loads(machine)
        values["disks"] = tuple(DiskUsage(**disk) for disk in values["disks"])
        if values["certificate"] is not None:
            values["certificate"] = CertificateStatus(**values["certificate"])
        found = PortalMeasurement(**values)
        return (
            found
            if certificate is None
            else replace(found, certificate=CertificateStatus(**json.loads(certificate)))
        )
    except (TypeError, ValueError, KeyError) as error:  # written by another version
        log.warning("the measurements of the portal's machine cannot be read: %s", error)
        return None
