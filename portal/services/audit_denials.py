"""Audit rows of failed sign-ins and denied requests, rate-limited so that clients cannot fill the table."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from django.db import transaction

from portal.models import AuditEntry, User
from portal.services.audit import request_address
from portal.valkey.rate_limits import RateLimit, consume, rate_limit_address

HOUR_S = 3600
SIGN_INS_OF_ADDRESS = RateLimit("audit_sign_ins_of_address", 100, HOUR_S)
SIGN_INS = RateLimit("audit_sign_ins", 1000, HOUR_S)
LOCKOUTS_OF_ADDRESS = RateLimit("audit_pauses", 1, 300)
REQUESTS_OF_USER = RateLimit("audit_requests_of_user", 60, HOUR_S)


def record_failed_sign_in(name: str, *, by: str, locked_out: bool = False) -> None:
    """Write a row for a wrong password, link or invitation; ``locked_out`` marks attempts rejected unchecked.

    ``name`` is empty if the typed text is not a valid name, because it may be a password.
    """
    address = rate_limit_address(request_address.get() or "")
    if locked_out and consume(LOCKOUTS_OF_ADDRESS, f"{address}:{name}"):
        return
    _write(
        [(SIGN_INS_OF_ADDRESS, address), (SIGN_INS, "all")],
        actor_name="nobody",
        action="user.sign_in_paused" if locked_out else "user.sign_in_failed",
        object_kind="user",
        object_id=name[:64],
        object_name=name,
        after={"by": by},
    )


def record_denied_request(user: User, *, method: str, path: str, route: str) -> None:
    """Write a row for a request that the user may not make."""
    _write(
        [(REQUESTS_OF_USER, user.public_id)],
        actor=user,
        actor_name=user.username,
        action="request.refused",
        object_kind="route",
        object_id=route[:64],
        object_name=f"{method} {quote(path)}"[:200],
    )


def _write(rates: list[tuple[RateLimit, str]], **columns: Any) -> None:
    """Write the row unless the limits are reached; the last row says so."""
    reason = _rate_limit_note(rates)
    if reason is not None:
        with transaction.atomic():
            AuditEntry.objects.create(**columns, reason=reason, address=request_address.get())


def _rate_limit_note(rates: list[tuple[RateLimit, str]]) -> str | None:
    """Return blank while rows may be written, a message for the last row of the hour, then None."""
    for rate, who in rates:
        if consume(rate, who):
            if consume(RateLimit(f"{rate.name}_last", 1, rate.period_s), who):
                return None
            return f"More than {rate.limit} within an hour; further ones are only in the log of web."
    return ""
