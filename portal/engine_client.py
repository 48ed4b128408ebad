"""Sends queries to the scheduler and waits briefly: the row holds the answer, Redis signals it."""

from __future__ import annotations

import logging
from typing import Any

import redis
from django.conf import settings
from django.db import connection
from kombu.exceptions import OperationalError as BrokerAway

from portal.admission import waiting_for_others
from portal.config.celery import app
from portal.models import EngineQuery

log = logging.getLogger(__name__)

ANSWER_TTL_S = 30
HEARTBEAT_KEY = "fairway:engine-query:heartbeat"
"""Set by every running worker-ask; without it, queries return at once."""
HEARTBEAT_TTL_S = 15


def answer_key(query: str) -> str:
    """Return the Redis list on which the caller waits for the answer to a query (public id)."""
    return f"fairway:answer:{query}"


def query_engine(kind: str, body: dict[str, Any], wait_s: float = 1.0) -> dict[str, Any] | None:
    """Return the scheduler's answer, or None if there is none within ``wait_s``.

    Must not run inside a transaction, because the scheduler could not see the query.
    """
    if connection.in_atomic_block:
        log.debug("query not sent inside a transaction: %s", kind)
        return None
    store = redis.Redis.from_url(settings.REDIS_URL, socket_timeout=wait_s + 1.0, socket_connect_timeout=1.0)
    try:
        with store:
            if not store.exists(HEARTBEAT_KEY):
                return None
            question = EngineQuery.objects.create(kind=kind, body=body)
            app.send_task(
                "scheduler.answer_query",
                args=[question.public_id],
                queue="ask",
                retry=False,
                ignore_result=True,
                expires=max(1.0, wait_s * 2),
            )
            with waiting_for_others():
                reported = store.blpop([answer_key(question.public_id)], timeout=wait_s)
    except (BrokerAway, redis.RedisError, OSError) as error:
        log.warning("no response to %s: %s", kind, error)
        return None
    if reported is None:
        return None
    question.refresh_from_db(fields=["answer"])
    answer: dict[str, Any] | None = question.answer
    return answer


def query_would_start(request: dict[str, Any], wait_s: float = 1.0) -> dict[str, Any] | None:
    """Ask whether a request would start now.

    Return ``{starts_now, unsatisfiable, where, verdict, alternatives, interval, interval_missing, victims}``,
    or None. ``where`` are node names, ``interval`` Unix times, ``interval_missing`` why there is none;
    ``victims`` are the running jobs that would be evicted, with the work that they would lose.

    ``request`` holds the columns of a Job by name, with public ids for ``project``, ``user``, ``environment``
    and ``pool``; missing columns have the model's default. ``replaces`` names a waiting job (public id) that it
    would change: the request keeps the age of that job, which does not wait beside it.
    """
    return query_engine("would_start", request, wait_s)


def query_delay_impact(job: str, end_s: float, later_s: float, wait_s: float = 4.0) -> dict[str, Any] | None:
    """Ask which jobs are delayed if a running job (public id) may run longer, or return None.

    ``end_s`` is its present time limit and ``later_s`` the proposed one (Unix time).

    Return ``{delays: [{job, by_s}], reservations: [name], whole}``. The longest delay is first; ``by_s`` is
    null if unknown. ``whole`` is False if not all pending jobs were examined.
    """
    answer = query_engine("delays", {"job": job, "end_s": end_s, "later_s": later_s}, wait_s)
    return None if answer is None or "error" in answer else answer


def query_profile(profile: Any, wait_s: float = 4.0) -> dict[str, Any] | None:
    """Return ``{model, batch_size, layers}`` of a decoded layer profile, or None.

    ``{error, invalid}`` if it is invalid.
    """
    return query_engine("profile", {"profile": profile}, wait_s)


def query_plan(
    profile: Any, levels: list[tuple[int, float]], memory_bytes: float | None, wait_s: float = 8.0
) -> dict[str, Any] | None:
    """Return the pipeline plans of a layer profile (docs/pipeline-plans.md), or None.

    ``levels`` are machines and bytes per second, innermost first. ``{error, invalid}`` if there is no plan.
    """
    body = {"profile": profile, "levels": levels, "memory_bytes": memory_bytes}
    return query_engine("plan", body, wait_s)


def query_quota_effect(quotas: list[dict[str, Any]], wait_s: float = 8.0) -> dict[str, Any] | None:
    """Ask what would change at once if these quotas were in force, or return None.

    Each quota has ``project`` and ``pool`` (public ids) and the values of a quota. Return ``{sooner, later,
    starts, victim_count, victims, holdings, whole}``. ``starts`` are the jobs whose start changes most, with
    ``before`` and ``after``: ``{wait_s, interval}``, null without a known start. ``holdings`` are the projects
    whose GPUs, guarantee or fair share change. ``whole`` is False if not all pending jobs were examined.
    """
    answer = query_engine("quota_effect", {"quotas": quotas}, wait_s)
    return None if answer is None or "error" in answer else answer
