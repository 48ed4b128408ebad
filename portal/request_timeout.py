"""A time limit for every request of the web process: a response starts in time, or the client gets a 503.

A request that finds too many others gets a 503 before any work (`portal.admission`). Files, those of pages among
them, use no slot and have more time.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable
from typing import Any

from django.conf import settings
from django.utils.translation import gettext_noop as _

from portal.admission import Admission, Slot, set_slot
from portal.api.framework import problems
from portal.domain.storage.uploads import UPLOAD_TIMEOUT_S, is_upload_path
from portal.static_error_page import CONTENT_SECURITY_POLICY, MEDIA_TYPE, static_error_page
from portal.tracking.endpoints import ARTIFACT_TIMEOUT_S, is_artifact_path

log = logging.getLogger(__name__)

RESPONSE_START_TIMEOUT_S = 8.0
"""Below the gateway's own timeout for web, and well below 10 s to leave time for the network."""
RETRY_AFTER_S = 5
TITLE = _("A required service is unavailable")
MESSAGE = _(
    "The request took longer than 8 s and may still be processed. Jobs and workspaces keep running. Check before you "
    "send a change again, or repeat it with the same Idempotency-Key."
)
BUSY_TITLE = _("Too many requests")
BUSY_MESSAGE = _(
    "The portal has too many requests at the moment. Nothing was done for this one. Jobs and workspaces keep "
    "running. Try again in a few seconds."
)
UNPOOLED_REQUESTS = 20
"""Requests at once where threads do not share connections."""
PROBE_PATHS = frozenset({"/readyz", "/metrics"})
"""They have slots and connections of their own: a busy portal must not look like one that is down."""
PROBES = 2


def requests_at_once() -> int:
    """Return how many requests other than probes have slots: each finds a connection, and so do probes."""
    return max(1, settings.DATABASE_POOL - PROBES) if settings.DATABASE_POOL else UNPOOLED_REQUESTS


Application = Callable[[Any, Any, Any], Awaitable[None]]


class RequestTimeoutApp:
    """Wrap an ASGI application. A response that has started has no time limit, so downloads are not cut off.

    A thread that waits for a stalled database cannot be stopped. It ends by itself (see `portal.database`)
    and its response is discarded. A 503 therefore does not mean that nothing was done; clients use an
    Idempotency-Key for that.
    """

    def __init__(self, application: Application, *, within_s: float = RESPONSE_START_TIMEOUT_S) -> None:
        self._application, self._within_s = application, within_s
        self._admission, self._probe_admission = Admission(requests_at_once()), Admission(PROBES)
        self._abandoned_tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        # A large file takes minutes of a disk and little of this process; a page without its script does nothing.
        is_file = is_artifact_path(path) or is_upload_path(path) or path.startswith(settings.STATIC_URL)
        admission = self._probe_admission if path in PROBE_PATHS else self._admission
        exchange = _RequestExchange(receive, send, None if is_file else Slot(admission))
        set_slot(exchange.slot)
        within_s = max(ARTIFACT_TIMEOUT_S, UPLOAD_TIMEOUT_S) + 1 if is_file else self._within_s
        work = asyncio.ensure_future(self._application(scope, exchange.receive, exchange.send))
        # an abandoned request keeps its slot until its thread ends
        work.add_done_callback(lambda _: exchange.release_slot())
        try:
            # a slow client does not use up the application's time
            await asyncio.wait(
                {work, exchange.response_started, exchange.received}, return_when=FIRST_COMPLETED
            )
            await asyncio.wait(
                {work, exchange.response_started}, timeout=within_s, return_when=FIRST_COMPLETED
            )
            exchange.abandoned = not (work.done() or exchange.response_started.done())
            if not exchange.abandoned:
                await work
                if exchange.refused:
                    await _send_unavailable(scope, send, BUSY_TITLE, BUSY_MESSAGE)
                return
        except asyncio.CancelledError:
            work.cancel()
            raise
        self._abandoned_tasks.add(work)
        work.add_done_callback(self._on_task_done)
        log.error("no response to %s %s within %g s", scope["method"], scope["path"], within_s)
        await _send_unavailable(scope, send, TITLE, MESSAGE)

    def _on_task_done(self, work: asyncio.Task[None]) -> None:
        self._abandoned_tasks.discard(work)
        if not work.cancelled() and work.exception() is not None:
            log.warning("an abandoned request ended with: %s", work.exception())


class _RequestExchange:
    """The messages of one request between server and application."""

    def __init__(self, receive: Any, send: Any, slot: Slot | None) -> None:
        self._receive, self._send, self.slot = receive, send, slot
        loop = asyncio.get_running_loop()
        self.response_started: asyncio.Future[None] = loop.create_future()
        self.received: asyncio.Future[None] = loop.create_future()
        self.abandoned = False
        """The application has not responded in time; its later messages are dropped."""
        self.refused = False
        """No slot became free in time. The application received ``http.disconnect`` and did nothing."""

    async def receive(self) -> Any:
        message = await self._receive()
        if not message.get("more_body", False) and not self.received.done():
            self.received.set_result(None)
            # only now: a client that sends slowly uses no slot
            if self.slot is not None and message["type"] == "http.request":
                self.refused = not await self.slot.acquire()
        return {"type": "http.disconnect"} if self.refused else message

    def release_slot(self) -> None:
        """Release the slot: the response has started, or the application has ended."""
        if self.slot is not None:
            self.slot.release()

    async def send(self, message: Any) -> None:
        if self.abandoned or self.refused:
            return
        if not self.response_started.done():
            self.response_started.set_result(None)
            self.release_slot()
        await self._send(message)


async def _send_unavailable(scope: Any, send: Any, title: str, message: str) -> None:
    asked = dict(scope["headers"])
    if scope["path"].startswith("/api/"):
        kind = problems.MEDIA_TYPE
        body: bytes = problems.problem_response(503, problems.CODES[503], message).content
    elif asked.get(b"hx-request"):
        kind, body = "text/plain; charset=utf-8", f"{title}. {message}".encode()
    else:
        kind = MEDIA_TYPE
        language = asked.get(b"accept-language", b"").decode("latin-1")
        again = ("", _("Try again")) if scope["method"] == "GET" else ("/", _("Back to my work"))
        body = static_error_page(
            title, message, link=again, is_temporary=True, accept_language=language
        ).encode()
    headers = {
        "content-type": kind,
        "content-length": str(len(body)),
        "retry-after": str(RETRY_AFTER_S),
        "cache-control": "no-store",
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "same-origin",
        "x-frame-options": "DENY",
    }
    if settings.HTTPS_ENABLED:
        headers["strict-transport-security"] = "max-age=31536000; includeSubDomains; preload"
    reported = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 503, "headers": reported})
    await send({"type": "http.response.body", "body": body})
