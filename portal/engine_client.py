"""Asks the engine a question and waits at most a second: the row holds the answer, Redis says that it is there."""

from __future__ import annotations

import logging
from typing import Any

import redis
from django.conf import settings
from django.db import connection
from kombu.exceptions import OperationalError as BrokerAway

from portal.config.celery import app
from portal.models import EngineQuery

log = logging.getLogger(__name__)

ANSWER_TTL_S = 30
HEARTBEAT_KEY = "fairway:engine-query:heartbeat"
"""Set by every worker-ask that lives; without it nobody waits for an answer that cannot come."""
HEARTBEAT_TTL_S = 15


def answer_key(query: str) -> str:
    """The Redis list on which somebody waits for the answer to a question (public id)."""
    return f"fairway:answer:{query}"


def query_engine(kind: str, body: dict[str, Any], wait_s: float = 1.0) -> dict[str, Any] | None:
    """The engine's answer, or None when it gives none in time; callers then do without.

    Must not run inside a transaction: the engine could not see the question.
    """
    if connection.in_atomic_block:
        log.debug("not asked inside a transaction: %s", kind)
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
            told = store.blpop([answer_key(question.public_id)], timeout=wait_s)
    except (BrokerAway, redis.RedisError, OSError) as problem:
        log.warning("no answer to %s: %s", kind, problem)
        return None
    if told is None:
        return None
    question.refresh_from_db(fields=["answer"])
    answer: dict[str, Any] | None = question.answer
    return answer


def query_would_start(request: dict[str, Any], wait_s: float = 1.0) -> dict[str, Any] | None:
    """Whether a request would start now: ``{starts_now, never, where, verdict, alternatives, interval,
    victims}``, or None. ``victims`` are the running jobs that would be asked to leave, with the work they would lose.

    ``request`` holds the columns of a Job by name, with public ids for ``project``, ``user``, ``environment``
    and ``pool``; what is missing has the model's default.
    """
    return query_engine("would_start", request, wait_s)


def query_delay_impact(job: str, end_s: float, later_s: float, wait_s: float = 4.0) -> dict[str, Any] | None:
    """Whom it would delay if a running job (public id) might run until ``later_s`` (Unix time), or None.

    ``{delays: [{job, by_s}], reservations: [name], whole}``, the longest delay first; ``by_s`` null: nobody knows how
    long. ``whole`` False: more wait than were looked at.
    """
    answer = query_engine("delays", {"job": job, "end_s": end_s, "later_s": later_s}, wait_s)
    return None if answer is None or "error" in answer else answer
