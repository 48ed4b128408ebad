"""Liveness (``/healthz``) and readiness (``/readyz``) of this process; no sign-in."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from django.db import DatabaseError, connection
from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_safe
from redis.exceptions import RedisError

from portal.access import AccessPolicy, access_policy
from portal.selectors.scheduling.cycles import CYCLE_WATCH
from portal.valkey.client import valkey_client

log = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 2.0
SCHEDULER = "scheduler"


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
    """Answer 200 when database and Valkey answer and scheduling cycles end, else 503 with the reason.

    With ``?exclude=scheduler``, the scheduler is reported only: pages and REST work without it.
    """
    parts = {"database": _check(_database), "redis": _check(_redis)}
    ready = parts["database"]["ok"] and parts["redis"]["ok"]
    parts[SCHEDULER] = _scheduler(parts["database"]["ok"])
    ok = ready and parts[SCHEDULER]["ok"]
    is_enough = ready if SCHEDULER in request.GET.getlist("exclude") else ok
    return _json_response({"ok": ok, "ready": ready, "parts": parts}, 200 if is_enough else 503)


def _check(probe: Callable[[], bool]) -> dict[str, Any]:
    began_s = time.monotonic()
    try:
        ok = probe()
    except (DatabaseError, RedisError, OSError) as error:
        log.warning("%s: %s", probe.__name__.strip("_"), error)
        ok = False
    return {"ok": ok, "milliseconds": round((time.monotonic() - began_s) * 1000, 1)}


def _database() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        return bool(cursor.fetchone() == (1,))


def _redis() -> bool:
    return bool(valkey_client(REDIS_TIMEOUT_S).ping())


def _scheduler(database_answers: bool) -> dict[str, Any]:
    if not database_answers:
        CYCLE_WATCH.pause()
        return {"ok": False}
    try:
        status = CYCLE_WATCH.observe()
    except DatabaseError as error:
        log.warning("scheduler: %s", error)
        return {"ok": False}
    ages = {"last_cycle_s": round(status.age_s, 1), "limit_s": round(status.limit_s, 1)}
    return {"ok": status.ok, **ages} | ({} if status.ok else {"reason": status.reason})


def _json_response(body: dict[str, Any], status: int) -> JsonResponse:
    answer = JsonResponse(body, status=status)
    answer["Cache-Control"] = "no-store"
    if status == 503:
        answer["Retry-After"] = "5"
    return answer
