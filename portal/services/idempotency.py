"""Executes a request once per ``Idempotency-Key``: the same key and body get the same response (I12).

Follows draft-ietf-httpapi-idempotency-key-header. The key's row is committed before the work and locked
during it; the response is written in the transaction of the work. A crash therefore leaves both, or a row
without a response, which the next request takes over; a locked row means in progress.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import transaction

from portal.errors import Conflict, FairwayError, MalformedRequest, Unsatisfiable
from portal.models import IdempotencyKey, User
from portal.services.encryption import DecryptionError, EncryptionContext, decrypt, encrypt

KEY_PATTERN = r"[\x21-\x7e]{1,255}"


@dataclass(frozen=True)
class StoredResponse:
    """Status and JSON body of the response; ``is_replay`` if it is a repetition."""

    status: int
    body: Any
    is_replay: bool


def run_once(
    user: User,
    key: str,
    route: str,
    body: Any,
    perform: Callable[[], tuple[int, Any]],
    *,
    check: Callable[[], object] | None = None,
    has_secret: bool = False,
) -> StoredResponse:
    """Execute ``perform`` unless this key already has a response. Errors are not stored and may be retried.

    ``perform`` runs in a transaction. What must not, such as a query to the scheduler, goes into ``check``,
    which runs before it, unless there is a response, and rejects by raising. A response that ``has_secret`` is
    stored encrypted.

    Raise MalformedRequest for an invalid key, Unsatisfiable (422) if the key was used with another body,
    Conflict (409) while the first request with it is in progress.
    """
    if not re.fullmatch(KEY_PATTERN, key):
        message = "The Idempotency-Key must be 1 to 255 printable ASCII characters without spaces."
        raise MalformedRequest(message, code="invalid_idempotency_key")
    fingerprint = fingerprint_of(route, body)
    IdempotencyKey.objects.bulk_create(
        [IdempotencyKey(user=user, key=key, route=route, body_sha256=fingerprint)], ignore_conflicts=True
    )
    try:
        answered = IdempotencyKey.objects.filter(user=user, key=key, status__isnull=False)
        if check is not None and not answered.exists():
            check()
        return _run_locked(user, key, fingerprint, perform, has_secret)
    except (_InProgressError, _KeyReusedError):
        raise
    except FairwayError:
        IdempotencyKey.objects.filter(
            user=user, key=key, body_sha256=fingerprint, status__isnull=True
        ).delete()
        raise


def fingerprint_of(route: str, body: Any) -> str:
    """Return the SHA-256 of route and body, independent of the order of the body's fields."""
    text = json.dumps([route, body], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _run_locked(
    user: User, key: str, fingerprint: str, perform: Callable[[], tuple[int, Any]], has_secret: bool
) -> StoredResponse:
    with transaction.atomic():
        row = IdempotencyKey.objects.select_for_update(skip_locked=True).filter(user=user, key=key).first()
        if row is None:
            message = "A request with this Idempotency-Key is in progress."
            raise _InProgressError(message, code="idempotency_in_flight")
        if row.body_sha256 != fingerprint:
            message = "This Idempotency-Key was used for another request."
            raise _KeyReusedError(message, code="idempotency_key_reused")
        if row.status is not None and row.body is not None:
            return StoredResponse(row.status, json.loads(_stored_text(row)), is_replay=True)
        status, answered = perform()
        # stored as text: jsonb loses the order of fields, and a replay must be identical
        text = json.dumps(answered)
        row.status, row.body = status, {"encrypted": encrypt(text, _context(row))} if has_secret else text
        row.save(update_fields=["status", "body"])
        return StoredResponse(status, json.loads(text), is_replay=False)


def _stored_text(row: IdempotencyKey) -> str:
    """Return the response as JSON. Raise Conflict if its key of encryption is gone."""
    body: Any = row.body
    if isinstance(body, str):
        return body
    try:
        return decrypt(body["encrypted"], _context(row))
    except DecryptionError as error:
        message = "The request was done, but its response can no longer be read. Send it with another key."
        raise _KeyReusedError(message, code="idempotency_key_reused") from error


def _context(row: IdempotencyKey) -> EncryptionContext:
    return EncryptionContext("idempotency_key", str(row.pk), "body")


class _InProgressError(Conflict):
    """The first request is in progress; its row must not be deleted."""


class _KeyReusedError(Unsatisfiable):
    """The key was used with another body."""
