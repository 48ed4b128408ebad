"""Liveness (``/healthz``) and readiness (``/readyz``) of this process; no sign-in."""

from __future__ import annotations

import datetime as dt
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from django.db import DatabaseError, connection
from django.db.models.functions import Now
from django.http import HttpRequest, JsonResponse
from django.utils import timezone
from django.views.decorators.http import require_safe
from redis.exceptions import RedisError

from portal.access import AccessPolicy, access_policy
from portal.models import Cycle, Lease
from portal.valkey.client import valkey_client

log = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 2.0
SCHEDULER_LEASE = "leader"
SCHEDULER_STALE_AFTER_S = 30
"""A working scheduler finishes a cycle every few seconds; this is six missed periods."""


HEALTHZ_PATH = "/healthz"
ALIVE_BODY = {"ok": True}


@access_policy(AccessPolicy.PUBLIC)
@require_safe
def healthz(request: HttpRequest) -> JsonResponse:
    """Answer 200 as long as this process answers at all."""
    return _json_response(ALIVE_BODY, 200)


async def send_healthz(scope: Any, send: Any) -> None:
    """Answer /healthz before Django: needs no thread, session or connection, which may be exhausted."""
    body = json.dumps(ALIVE_BODY).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


@access_policy(AccessPolicy.PUBLIC)
@require_safe
def readyz(request: HttpRequest) -> JsonResponse:
    """Answer 200 when database and Valkey answer, else 503. The scheduler's state is only reported."""
    parts = {"database": _check(_database), "redis": _check(_redis)}
    alive = parts["database"]["ok"] and _check(_scheduler)["ok"]
    parts["scheduler"] = {"ok": alive}
    ready = parts["database"]["ok"] and parts["redis"]["ok"]
    return _json_response({"ok": ready and alive, "ready": ready, "parts": parts}, 200 if ready else 503)


def _check(probe: Callable[[], bool]) -> dict[str, Any]:
    began_s = time.monotonic()
    try:
        ok = probe()
    except (DatabaseError, RedisError, OSError) as problem:
        log.warning("%s: %s", probe.__name__.strip("_"), problem)
        ok = False
    return {"ok": ok, "milliseconds": round((time.monotonic() - began_s) * 1000, 1)}


def _database() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        return bool(cursor.fetchone() == (1,))


def _redis() -> bool:
    return bool(valkey_client(REDIS_TIMEOUT_S).ping())


def _scheduler() -> bool:
    """Return whether a cycle runs or finished recently; the lease is released between cycles."""
    if Lease.objects.filter(name=SCHEDULER_LEASE, expires_at__gt=Now()).exists():
        return True
    newest = Cycle.objects.order_by("-id").values_list("started_at", flat=True).first()
    return newest is not None and timezone.now() - newest < dt.timedelta(seconds=SCHEDULER_STALE_AFTER_S)


def _json_response(body: dict[str, Any], status: int) -> JsonResponse:
    answer = JsonResponse(body, status=status)
    answer["Cache-Control"] = "no-store"
    if status == 503:
        answer["Retry-After"] = "5"
    return answer
