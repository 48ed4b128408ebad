"""Answers questions of the portal, read only: would this start now, and if not, what would."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import replace
from typing import Any

from django.utils import timezone
from redis.exceptions import RedisError

from portal.ask import ALIVE_FOR_S, ALIVE_KEY, ANSWER_KEPT_S, answer_key
from portal.models import ClusterSettings, Environment, Job, Question
from portal.valkey import valkey
from portal.words.states import JobKind
from scheduler.awaited import still_awaited
from scheduler.company import side_of_columns, without
from scheduler.core.cluster import (
    WHOLE_MILLI,
    JobId,
    NodeId,
    PendingRow,
    PoolId,
    ProjectId,
    Snapshot,
    UserId,
)
from scheduler.core.company import closed_to
from scheduler.core.decide import would_start
from scheduler.core.delaying import delays
from scheduler.core.plan import Answer, Eviction, Verdict
from scheduler.expectations import Expectations
from scheduler.isolation import use_valid_rows
from scheduler.read_running import min_tasks_of, near_of
from scheduler.read_waiting import launcher_of
from scheduler.snapshot import ASKED, Photo, take_photo
from scheduler.standings import change_fields, verdict_fields

log = logging.getLogger(__name__)

PHOTO_KEPT_S = 1.0
STORE_WITHIN_S = 3.0
"""Questions that come within this time share one photograph: a launch form asks at each change."""

_photo: tuple[float, Photo] | None = None
_expectations = Expectations()


def answer_question(public_id: str) -> None:
    """Writes the answer into the question's row and tells who waits. Answered before: only tells again."""
    question = Question.objects.filter(public_id=public_id).first()
    if question is None:
        return
    if question.answer is None:
        question.answer = _answer(question.kind, question.body)
        question.answered_at = timezone.now()
        question.save(update_fields=["answer", "answered_at"])
    with valkey(STORE_WITHIN_S).pipeline() as pipe:
        pipe.rpush(answer_key(public_id), "1")
        pipe.expire(answer_key(public_id), ANSWER_KEPT_S)
        pipe.execute()


def say_alive(stopping: threading.Event) -> None:
    """Says every few seconds that questions are answered here, until told to stop."""
    while not stopping.is_set():
        try:
            valkey(STORE_WITHIN_S).set(ALIVE_KEY, "1", ex=ALIVE_FOR_S)
        except RedisError as away:
            log.warning("nobody can hear that questions are answered here: %s", away)
        stopping.wait(ALIVE_FOR_S / 3)


def _answer(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    if kind not in ("would_start", "delays"):
        return {"error": f"unknown question {kind}"}
    global _photo
    try:
        photo = _recent_photo()
        found, used = use_valid_rows(
            photo, lambda snapshot: _ask(kind, body, replace(photo, snapshot=snapshot))
        )
        if used is not photo and _photo is not None:
            _photo = (_photo[0], replace(used, faults=()))  # the next question finds it so
        return found
    except (ValueError, KeyError) as wrong:
        log.warning("no answer to %s: %s", kind, wrong)
        return {"error": str(wrong)}


def _ask(kind: str, body: dict[str, Any], photo: Photo) -> dict[str, Any]:
    if kind == "delays":
        return _delays(body, photo)
    request = _expectations.expect(request_row(body, photo), body.get("template"), photo.policy)
    return as_json(would_start(photo.snapshot, photo.policy, request), photo)


def _recent_photo() -> Photo:
    global _photo
    if _photo is None or time.monotonic() - _photo[0] > PHOTO_KEPT_S:
        photo = take_photo(ClusterSettings.objects.get_or_create(id=1)[0])
        expected = _expectations.fill(photo.snapshot, photo.policy)
        _photo = (time.monotonic(), replace(photo, snapshot=expected))
    return _photo[1]


def request_row(body: dict[str, Any], photo: Photo) -> PendingRow:
    """A request that was not submitted yet, as if it waited last in the queue."""

    defaults = Job()

    def value(name: str) -> Any:
        return body[name] if body.get(name) is not None else getattr(defaults, name)

    environment = Environment.objects.get(public_id=body["environment"])
    pool = body.get("pool")
    user = str(body["user"])
    kind = value("kind")
    launcher = launcher_of(value("tasks"), value("launcher"))
    cannot = photo.unfit.nodes(
        environment.pk,
        value("gpus_per_task"),
        shares=value("milli_per_gpu") < WHOLE_MILLI,
        gang=value("tasks") > 1 and min_tasks_of(value("tasks"), body.get("min_tasks")) is None,
        meets=bool(launcher),
        volumes=value("volumes"),
        project=str(body["project"]),
    )
    row = PendingRow(
        job=ASKED,
        name=str(body.get("name") or "the request"),
        project=ProjectId(body["project"]),
        user=UserId(user),
        pools=(PoolId(pool),) if pool else tuple(row.id for row in photo.snapshot.pools),
        submitted_s=photo.snapshot.now_s,
        priority=value("priority"),
        preemptible=value("preemptible"),
        tasks=value("tasks"),
        min_tasks=min_tasks_of(value("tasks"), body.get("min_tasks")),
        gpus_per_task=value("gpus_per_task"),
        milli_per_gpu=value("milli_per_gpu"),
        gpu_model=body.get("gpu_model") or None,
        min_gpu_memory_mib=body.get("min_gpu_memory_mib"),
        cpu_milli=value("cpu_milli"),
        memory_mib=value("memory_mib"),
        time_limit_s=body.get("time_limit_s"),
        near=near_of(body.get("near")),
        mig_profile=body.get("mig_profile") or None,
        min_compute_capability=body.get("min_compute_capability"),
        avoid_nodes=cannot,
        unfit_nodes=cannot,
        cuda=photo.unfit.cuda_of(environment.pk, value("gpus_per_task")),
        launcher=launcher,
        node_affinity=photo.homes.get(user) if kind == JobKind.WORKSPACE.value else None,
        after=still_awaited(body.get("after") or ()),
        after_any=bool(body.get("after_any")),
    )
    side = side_of_columns(kind, row.tasks, row.min_tasks)
    return row if side is None else without(row, closed_to(side, row.project, photo.guests))


def _delays(body: dict[str, Any], photo: Photo) -> dict[str, Any]:
    """Whom a later end of a running job would delay."""
    found = delays(
        photo.snapshot,
        photo.policy,
        JobId(body["job"]),
        float(body["end_s"]),
        float(body["later_s"]),
        _expectations.durations,
        _expectations.template_of,
    )
    late = [{"job": one.job, "by_s": one.by_s if one.by_s < math.inf else None} for one in found.jobs]
    return {"delays": late, "reservations": list(found.reservations), "whole": found.whole}


def as_json(answer: Answer, photo: Photo) -> dict[str, Any]:
    """An answer for pages and the API."""
    names = {node.id: node.name for node in photo.snapshot.nodes}
    places: list[NodeId] = [task.node for task in answer.start.tasks] if answer.start else []
    return {
        "starts_now": answer.starts_now,
        "never": answer.never,
        "where": sorted({names[place] for place in places}),
        "verdict": verdict_fields(answer.verdict) if answer.verdict else None,
        "alternatives": [change_fields(change) for change in answer.alternatives],
        "interval": interval_fields(answer.verdict),
        "victims": [victim_fields(eviction, photo.snapshot) for eviction in answer.evictions],
    }


def interval_fields(verdict: Verdict | None) -> dict[str, float] | None:
    """When else it would start, seconds since the epoch; None while nobody has worked that out."""
    if verdict is None or verdict.interval is None:
        return None
    return {"p10_s": verdict.interval.p10_s, "p50_s": verdict.interval.p50_s, "p90_s": verdict.interval.p90_s}


def victim_fields(eviction: Eviction, snapshot: Snapshot) -> dict[str, Any]:
    """A running job that would leave: what it holds, and the work it would lose since it last saved, GPU-seconds.

    ``saved_s`` is when that was, Unix time; None: it never said so, and would lose all since its start.
    """
    row = next(row for row in snapshot.running if row.job == eviction.job)
    milli = sum(
        share.milli
        for rank, task in enumerate(row.tasks)
        if not eviction.ranks or (rank if task.rank is None else task.rank) in eviction.ranks
        for share in task.gpus
    )
    saved_s = max(row.started_s, row.checkpoint_s or row.started_s)
    return {
        "job": eviction.job,
        "reason": eviction.reason.value,
        "milli": milli,
        "lost_gpu_s": milli / WHOLE_MILLI * max(0.0, snapshot.now_s - saved_s),
        "saved": row.checkpoint_s is not None,
        "saved_s": row.checkpoint_s,
    }
