"""Does a thing once per ``Idempotency-Key``: the same key and body give the same answer again (I12).

After draft-ietf-httpapi-idempotency-key-header. The key's row is committed before the work and locked while
it goes on; the answer is written in the transaction of the work. So a crash leaves either both or a row
without an answer, which the next try takes over; a lock means "in flight".
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.utils import timezone

from portal.errors import Conflict, FairwayError, MalformedRequest, Unsatisfiable
from portal.models import IdempotencyKey, User

RETENTION_DAYS = 7
KEY_PATTERN = r"[\x21-\x7e]{1,255}"


@dataclass(frozen=True)
class StoredResponse:
    """What was answered: the status and the JSON body; ``again`` when it is a repetition."""

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
) -> StoredResponse:
    """Runs ``work`` unless this key has its answer already; refusals are not kept and may be tried again.

    ``work`` runs in a transaction. What must not, such as a question to the engine, goes into ``check``: it
    runs before, unless the answer is there, and refuses by raising.

    Raises MalformedRequest for a key that is none, Impossible (422) when the key came with another body, and
    Conflict (409) while the first request with it is still being served.
    """
    if not re.fullmatch(KEY_PATTERN, key):
        raise MalformedRequest(
            "The Idempotency-Key must be 1 to 255 printable ASCII characters without spaces.",
            code="invalid_idempotency_key",
        )
    fingerprint = fingerprint_of(route, body)
    IdempotencyKey.objects.bulk_create(
        [IdempotencyKey(user=user, key=key, route=route, body_sha256=fingerprint)], ignore_conflicts=True
    )
    try:
        if check is not None and not _has_response(user, key):
            check()
        return _run_locked(user, key, fingerprint, perform)
    except (_InProgressError, _KeyReusedError):
        raise
    except FairwayError:
        IdempotencyKey.objects.filter(
            user=user, key=key, body_sha256=fingerprint, status__isnull=True
        ).delete()
        raise


def delete_expired_keys() -> int:
    """Deletes keys older than a week; how many went. For the periodic sweep."""
    old = timezone.now() - dt.timedelta(days=RETENTION_DAYS)
    return IdempotencyKey.objects.filter(created_at__lt=old).delete()[0]


def fingerprint_of(route: str, body: Any) -> str:
    """SHA-256 of route and body; the order of the body's fields does not matter."""
    text = json.dumps([route, body], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _run_locked(
    user: User, key: str, fingerprint: str, perform: Callable[[], tuple[int, Any]]
) -> StoredResponse:
    with transaction.atomic():
        row = IdempotencyKey.objects.select_for_update(skip_locked=True).filter(user=user, key=key).first()
        if row is None:
            raise _InProgressError(
                "A request with this Idempotency-Key is being served.", code="idempotency_in_flight"
            )
        if row.body_sha256 != fingerprint:
            raise _KeyReusedError(
                "This Idempotency-Key was used for another request.", code="idempotency_key_reused"
            )
        if row.status is not None and row.body is not None:
            return StoredResponse(row.status, json.loads(row.body), is_replay=True)
        status, answered = perform()
        # kept as text: jsonb would lose the order of the fields, and the answer must be the same to the byte
        text = json.dumps(answered)
        row.status, row.body = status, text
        row.save(update_fields=["status", "body"])
        return StoredResponse(status, json.loads(text), is_replay=False)


def _has_response(user: User, key: str) -> bool:
    return IdempotencyKey.objects.filter(user=user, key=key, status__isnull=False).exists()


class _InProgressError(Conflict):
    """The twin is still being served; nothing of it may be deleted."""


class _KeyReusedError(Unsatisfiable):
    """The key belongs to another body."""
