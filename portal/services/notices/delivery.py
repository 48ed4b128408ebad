"""Sends notices by e-mail and webhook, and retries until each delivery is sent or given up.

A delivery is claimed before it is sent, so that no other process sends it; the claim of a process that dies lapses.
If it dies after the server accepted the message, the message is sent again with the same Message-ID or
``Fairway-Delivery``: delivery is at least once.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import smtplib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from django.conf import settings
from django.core.mail import get_connection
from django.core.mail.backends.base import BaseEmailBackend
from django.db import connection, transaction
from django.db.models import F, Q
from django.db.models.functions import Now

from portal.database.pool_middleware import release_connection
from portal.domain.jobs.end_states import backoff_s
from portal.domain.notices.notices import (
    EVENTS,
    MAIL_CHANNELS,
    MAX_DELIVERY_ATTEMPTS,
    RETRY_BASE_S,
    RETRY_MAX_S,
    Channel,
    DeliveryState,
    NoticeKind,
)
from portal.failpoints import failpoint
from portal.models import NoticeDelivery, NoticeWebhook
from portal.services.encryption import DecryptionError, decrypt
from portal.services.notices.messages import build_email, build_webhook_body, signature
from portal.services.notices.web_push import BrowserKeys, encrypt_push, push_headers
from portal.services.notices.webhook_client import WebhookError, post_body
from portal.services.notices.webhooks import allows_private_addresses, encryption_context

log = logging.getLogger(__name__)

BATCH_SIZE = 500
CLAIM_S = 300
"""A claim lasts longer than a pass with its last message."""
PASS_LIMIT_S = 60.0
"""Messages that are not begun by then are returned for the next pass."""
SMTP_TIMEOUT_S = 15.0
THREADS = 8
EXPIRED_STATUSES = (404, 410)
"""A push service answers so when the browser has unsubscribed."""
_SMTP_BACKEND = "django.core.mail.backends.smtp.EmailBackend"

_pass_lock = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """The result of one delivery. ``error`` is empty if it was sent, None if it was not tried."""

    delivery: NoticeDelivery
    error: str | None = ""
    permanent: bool = False
    is_expired: bool = False
    """The push service no longer knows the browser, whose row is deleted."""


Report = Callable[[Outcome], None]
Group = Callable[[float, Report], None]
"""Sends the messages of one server until a deadline (monotonic), and reports each."""


def start_delivery() -> None:
    """Deliver in a thread of its own, unless this process does so now: servers that hang delay nothing else."""
    if _pass_lock.acquire(blocking=False):
        threading.Thread(target=_deliver_and_unlock, name="notices", daemon=True).start()


def _deliver_and_unlock() -> None:
    try:
        deliver_notices()
    except Exception:
        log.exception("notices were not delivered; claimed ones are tried again in %s s", CLAIM_S)
    finally:
        connection.close()
        _pass_lock.release()


def deliver_notices() -> int:
    """Send the deliveries that are due; return the number of messages tried."""
    rows = _claim()
    if not rows:
        return 0
    groups = _groups(rows)
    release_connection()  # do not hold a database connection during remote calls
    deadline_s = time.monotonic() + PASS_LIMIT_S
    outcomes: SimpleQueue[Outcome | None] = SimpleQueue()

    def run(send: Group) -> None:
        try:
            send(deadline_s, outcomes.put)
        finally:
            outcomes.put(None)

    with ThreadPoolExecutor(min(THREADS, len(groups)), thread_name_prefix="notices") as threads:
        running = [threads.submit(run, send) for send in groups]
        for _ in groups:
            while (outcome := outcomes.get()) is not None:
                _record(outcome)
                release_connection()
    for each in running:
        each.result()
    return len(rows)


def _claim() -> list[NoticeDelivery]:
    """Return due deliveries, which no other process sends for ``CLAIM_S``."""
    with transaction.atomic():
        free = Q(claimed_until__isnull=True) | Q(claimed_until__lte=Now())
        due = NoticeDelivery.objects.filter(free, state=DeliveryState.PENDING.value, due_at__lte=Now())
        if not settings.SMTP_URL:
            due = due.exclude(channel__in=MAIL_CHANNELS)
        locked = due.select_for_update(skip_locked=True).order_by("due_at", "id")[:BATCH_SIZE]
        ids = [row.pk for row in locked]
        claim = Now() + dt.timedelta(seconds=CLAIM_S)
        NoticeDelivery.objects.filter(pk__in=ids).update(
            claimed_until=claim, attempt_count=F("attempt_count") + 1
        )
    rows = NoticeDelivery.objects.filter(pk__in=ids).order_by("id").select_related("webhook")
    return list(rows.select_related("notice__recipient", "notice__job", "notice__node", "notice__project"))


def _record(outcome: Outcome) -> None:
    """Store a result, unless the claim was lost meanwhile."""
    row, error = outcome.delivery, outcome.error
    values: dict[str, object]
    if error is None:
        values = {"attempt_count": F("attempt_count") - 1}
    elif not error:
        values = {"state": DeliveryState.SENT.value, "finished_at": Now(), "last_error": ""}
    elif outcome.permanent or row.attempt_count >= MAX_DELIVERY_ATTEMPTS:
        values = {"state": DeliveryState.FAILED.value, "finished_at": Now(), "last_error": error[:300]}
    else:
        wait = dt.timedelta(seconds=backoff_s(row.attempt_count, RETRY_BASE_S, RETRY_MAX_S))
        values = {"due_at": Now() + wait, "last_error": error[:300]}
    claimed = Q(pk=row.pk, state=DeliveryState.PENDING.value, attempt_count=row.attempt_count)
    NoticeDelivery.objects.filter(claimed).update(claimed_until=None, **values)
    if outcome.is_expired and row.webhook_id:
        NoticeWebhook.objects.filter(pk=row.webhook_id).delete()


def _groups(rows: Iterable[NoticeDelivery]) -> list[Group]:
    """Return functions that may run at the same time: one for all e-mails, one for each address."""
    mails: list[list[NoticeDelivery]] = []
    digests: dict[int, list[NoticeDelivery]] = defaultdict(list)
    posts: dict[int | None, list[NoticeDelivery]] = defaultdict(list)
    for row in rows:
        if row.channel == Channel.EMAIL:
            mails.append([row])
        elif row.channel == Channel.DIGEST:
            digests[row.notice.recipient_id or 0].append(row)
        else:
            posts[row.webhook_id].append(row)
    groups: list[Group] = []
    messages = [*mails, *digests.values()]
    if messages:
        groups.append(lambda deadline_s, report: _send_mails(messages, deadline_s, report))
    private = bool(posts) and allows_private_addresses()
    groups += [_poster(mine, private) for mine in posts.values()]
    return groups


def _poster(rows: Sequence[NoticeDelivery], allow_private: bool) -> Group:
    return lambda deadline_s, report: _post(rows, allow_private, deadline_s, report)


# -- in threads, without the database ---------------------------------------------------------------


def _send_mails(messages: Sequence[Sequence[NoticeDelivery]], deadline_s: float, report: Report) -> None:
    """Send e-mails over one connection. If the server fails, the others wait for the next attempt, too."""
    password, failure = _smtp_password()
    server = get_connection(_SMTP_BACKEND, timeout=SMTP_TIMEOUT_S, password=password)
    for rows in messages:
        message: str | None = failure
        permanent = False
        if time.monotonic() > deadline_s:
            message = failure or None
        elif not failure:
            message, permanent, lost = _send_mail(server, rows)
            failure = message if lost else ""
        for row in rows:
            report(Outcome(row, message, permanent))
    try:
        server.close()
    except (OSError, smtplib.SMTPException) as error:
        log.debug("the mail server did not say goodbye: %s", error)


def _smtp_password() -> tuple[str | None, str]:
    """Return the password, None for that of the address, and why there is none."""
    try:
        path = settings.SMTP_PASSWORD_FILE
        return (Path(path).read_text().strip() if path else None), ""
    except OSError as error:
        return None, f"The password of the mail server cannot be read: {error.strerror}."


def _send_mail(server: BaseEmailBackend, rows: Sequence[NoticeDelivery]) -> tuple[str, bool, bool]:
    """Return the error, whether it is permanent, and whether the server is lost for the others."""
    recipient = rows[0].notice.recipient
    address = recipient.email if recipient else ""
    if not (recipient and address and recipient.is_active):
        return "The account is inactive or has no e-mail address.", True, False
    try:
        server.open()
        failpoint("notice.before_send")
        server.send_messages([build_email(rows, address)])
        failpoint("notice.sent")
    except smtplib.SMTPRecipientsRefused as error:
        code, text = next(iter(error.recipients.values()))
        return f"The mail server refused {address}: {code} {_text(text)}", code >= 500, False
    except smtplib.SMTPResponseException as error:
        message = f"The mail server refused the message: {error.smtp_code} {_text(error.smtp_error)}"
        lost = not isinstance(
            error, smtplib.SMTPDataError
        )  # our sender, login or greeting: for every message
        return message, error.smtp_code >= 500 and not lost, lost
    except (OSError, smtplib.SMTPException, ValueError) as error:
        return f"The mail server did not answer: {error or type(error).__name__}", False, True
    return "", False, False


def _post(
    rows: Sequence[NoticeDelivery],
    allow_private: bool,
    deadline_s: float,
    report: Report,
) -> None:
    """Post to one address, oldest first. After a failure the others wait for the next attempt, too."""
    hook, recipient = rows[0].webhook, rows[0].notice.recipient
    gone = hook is None or (recipient is not None and not recipient.is_active)
    failure = "The address was removed, or the account is inactive." if gone else ""
    expired = False
    for row in rows:
        message: str | None = failure
        if hook is not None and not failure:
            if time.monotonic() > deadline_s:
                message = None
            else:
                failure, status = _post_one(hook, row, allow_private)
                message, expired = failure, hook.channel == Channel.PUSH and status in EXPIRED_STATUSES
        report(Outcome(row, message, permanent=gone or expired, is_expired=expired))


def _post_one(hook: NoticeWebhook, row: NoticeDelivery, allow_private: bool) -> tuple[str, int | None]:
    """Return the error, and the status of a response that caused it."""
    try:
        url = decrypt(hook.encrypted_url, encryption_context(hook, "encrypted_url"))
        body = build_webhook_body(row)
        headers = {"Fairway-Delivery": row.public_id}
        if hook.encrypted_secret:
            secret = decrypt(hook.encrypted_secret, encryption_context(hook, "encrypted_secret"))
            if hook.channel == Channel.PUSH:
                keys = BrowserKeys(**json.loads(secret))
                event = EVENTS.get(NoticeKind(row.notice.kind))
                headers |= push_headers(url, keys, urgent=event is None or event.urgent)
                body = encrypt_push(body, keys)
            else:
                headers["Fairway-Signature"] = signature(secret, body)
        post_body(url, body, headers, allow_private=allow_private)
    except DecryptionError as error:
        return f"The address cannot be decrypted: {error}. Enter it again.", None
    except WebhookError as error:
        return str(error), error.status
    except ValueError as error:
        return str(error), None
    return "", None


def _text(reply: bytes | str) -> str:
    return " ".join((reply.decode(errors="replace") if isinstance(reply, bytes) else reply).split())
