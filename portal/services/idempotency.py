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

from portal.errors import Conflict, FairwayError, Impossible, MalformedRequest
from portal.models import IdempotencyKey, User

KEPT_DAYS = 7
KEY_PATTERN = r"[\x21-\x7e]{1,255}"


@dataclass(frozen=True)
class Answer:
    """What was answered: the status and the JSON body; ``again`` when it is a repetition."""

    status: int
    body: Any
    again: bool


def once(
    user: User,
    key: str,
    route: str,
    body: Any,
    work: Callable[[], tuple[int, Any]],
    *,
    check: Callable[[], object] | None = None,
) -> Answer:
    """Runs ``work`` unless this key has its answer already; refusals are not kept and may be tried again.

    ``work`` runs in a transaction. What must not, such as a question to the engine, goes into ``check``: it
    runs before, unless the answer is there, and refuses by raising.

    Raises MalformedRequest for a key that is none, Impossible (422) when the key came with another body, and
    Conflict (409) while the first request with it is still being served.
    """
    if not re.fullmatch(KEY_PATTERN, key):
        raise MalformedRequest(
            "The Idempotency-Key must be 1 to 255 printable ASCII characters without spaces.",
            code="bad_idempotency_key",
        )
    fingerprint = fingerprint_of(route, body)
    IdempotencyKey.objects.bulk_create(
        [IdempotencyKey(user=user, key=key, route=route, body_sha256=fingerprint)], ignore_conflicts=True
    )
    try:
        if check is not None and not _answered(user, key):
            check()
        return _locked(user, key, fingerprint, work)
    except (_Busy, _Reused):
        raise
    except FairwayError:
        IdempotencyKey.objects.filter(
            user=user, key=key, body_sha256=fingerprint, status__isnull=True
        ).delete()
        raise


def forget_old_keys() -> int:
    """Deletes keys older than a week; how many went. For the periodic sweep."""
    old = timezone.now() - dt.timedelta(days=KEPT_DAYS)
    return IdempotencyKey.objects.filter(created_at__lt=old).delete()[0]


def fingerprint_of(route: str, body: Any) -> str:
    """SHA-256 of route and body; the order of the body's fields does not matter."""
    text = json.dumps([route, body], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _locked(user: User, key: str, fingerprint: str, work: Callable[[], tuple[int, Any]]) -> Answer:
    with transaction.atomic():
        row = IdempotencyKey.objects.select_for_update(skip_locked=True).filter(user=user, key=key).first()
        if row is None:
            raise _Busy("A request with this Idempotency-Key is being served.", code="idempotency_in_flight")
        if row.body_sha256 != fingerprint:
            raise _Reused("This Idempotency-Key was used for another request.", code="idempotency_key_reused")
        if row.status is not None and row.body is not None:
            return Answer(row.status, json.loads(row.body), again=True)
        status, answered = work()
        # kept as text: jsonb would lose the order of the fields, and the answer must be the same to the byte
        text = json.dumps(answered)
        row.status, row.body = status, text
        row.save(update_fields=["status", "body"])
        return Answer(status, json.loads(text), again=False)


def _answered(user: User, key: str) -> bool:
    return IdempotencyKey.objects.filter(user=user, key=key, status__isnull=False).exists()


class _Busy(Conflict):
    """The twin is still being served; nothing of it may be deleted."""


class _Reused(Impossible):
    """The key belongs to another body."""
