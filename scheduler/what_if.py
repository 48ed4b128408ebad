"""Answers read-only what-if queries of the portal: would a job start now, and what would make it start."""

from __future__ import annotations

import datetime as dt
import itertools
import logging
import math
import threading
import time
from dataclasses import asdict, replace
from typing import Any

from django.utils import timezone
from redis.exceptions import RedisError

from portal.domain.jobs.job_spec import job_fields
from portal.engine_client import ANSWER_TTL_S, HEARTBEAT_KEY, HEARTBEAT_TTL_S, answer_key
from portal.models import ClusterSettings, EngineQuery, Environment
from portal.valkey.client import valkey_client
from scheduler import pipeline_plans
from scheduler.commit.verdict_store import change_fields, verdict_fields
from scheduler.core.decide import decide, preview_request
from scheduler.core.forecast.quota_effect import estimate_quota_effect, replace_quotas
from scheduler.core.forecast.start_times import estimate_delay_impact
from scheduler.core.model.plan import Eviction, RequestPreview, StartInterval
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    JobId,
    NodeId,
    PendingRow,
    PoolId,
    ProjectId,
    QuotaRow,
    Snapshot,
)
from scheduler.core.session.cache import DecisionCache
from scheduler.forecast.duration_estimates import DurationEstimator
from scheduler.forecast.forecast_pass import (
    absolute_interval,
    forecast_request,
    recent_calibration,
    request_runs,
)
from scheduler.python_gc import gc_paused
from scheduler.snapshot.decision_input import PREVIEW_JOB, DecisionInput, take_snapshot
from scheduler.snapshot.dependencies import unfinished_jobs
from scheduler.snapshot.invalid_rows import use_valid_rows
from scheduler.snapshot.network_isolation import exclude_nodes, isolation_excluded_nodes, isolation_side
from scheduler.snapshot.pending import build_placeable_row

log = logging.getLogger(__name__)

SNAPSHOT_MAX_AGE_S = 1.0
"""Queries within this time share one snapshot: a launch form queries at each change."""
VALKEY_TIMEOUT_S = 3.0
MAX_LISTED_EFFECTS = 20
"""Maximum number of jobs that an effect of quotas lists, the largest change first."""

_cached_inputs: tuple[float, DecisionInput] | None = None
_duration_estimator = DurationEstimator()
_answer_numbers = itertools.count(1)
_decision_cache = DecisionCache()
"""One query is answered at a time: worker-ask runs with ``-P solo``."""


def answer_query(public_id: str) -> None:
    """Store the answer of a query and notify the caller; an answered query is only notified again."""
    query = EngineQuery.objects.filter(public_id=public_id).first()
    if query is None:
        return
    if query.answer is None:
        query.answer = _answer(query.kind, query.body)
        query.acknowledged_at = timezone.now()
        query.save(update_fields=["answer", "acknowledged_at"])
    with valkey_client(VALKEY_TIMEOUT_S).pipeline() as pipe:
        pipe.rpush(answer_key(public_id), "1")
        pipe.expire(answer_key(public_id), ANSWER_TTL_S)
        pipe.execute()


def send_heartbeats(stopping: threading.Event) -> None:
    """Set the heartbeat key every few seconds until ``stopping`` is set."""
    while not stopping.is_set():
        try:
            valkey_client(VALKEY_TIMEOUT_S).set(HEARTBEAT_KEY, "1", ex=HEARTBEAT_TTL_S)
        except RedisError as error:
            log.warning("this worker could not announce that it answers what-if queries: %s", error)
        stopping.wait(HEARTBEAT_TTL_S / 3)


def _answer(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    if kind in pipeline_plans.KINDS:
        return pipeline_plans.answer_plan_query(kind, body)
    if kind not in ("would_start", "delays", "quota_effect"):
        return {"error": f"unknown query {kind}"}
    global _cached_inputs
    try:
        with gc_paused(next(_answer_numbers)):
            inputs = _recent_inputs()
            found, used = use_valid_rows(
                inputs, lambda snapshot: _preview(kind, body, replace(inputs, snapshot=snapshot))
            )
        if used is not inputs and _cached_inputs is not None:
            _cached_inputs = (_cached_inputs[0], replace(used, faults=()))  # without the invalid rows
        return found
    except (ValueError, KeyError) as error:
        log.warning("no answer to %s: %s", kind, error)
        return {"error": str(error)}


def _preview(kind: str, body: dict[str, Any], inputs: DecisionInput) -> dict[str, Any]:
    if kind == "delays":
        return _delays(body, inputs)
    if kind == "quota_effect":
        return _quota_effect(body, inputs)
    pending = inputs.snapshot.pending
    replaced = next((row for row in pending if row.job == body.get("replaces")), None)
    if replaced is not None:
        others = tuple(row for row in pending if row is not replaced)
        inputs = replace(inputs, snapshot=replace(inputs.snapshot, pending=others))
    request = _duration_estimator.estimate(
        build_request_row(body, inputs, replaced), body.get("template"), inputs.policy
    )
    answer = preview_request(inputs.snapshot, inputs.policy, request, _decision_cache)
    start = forecast_request(inputs.snapshot, inputs.policy, request, answer, _duration_estimator)
    return preview_fields(answer, inputs) | {
        "interval": interval_fields(start.interval),
        "interval_missing": start.missing_reason,
        **endless_fields(inputs.snapshot, request),
    }


def _recent_inputs() -> DecisionInput:
    global _cached_inputs
    if _cached_inputs is None or time.monotonic() - _cached_inputs[0] > SNAPSHOT_MAX_AGE_S:
        inputs = take_snapshot(ClusterSettings.objects.get_or_create(id=1)[0])
        expected = _duration_estimator.fill(inputs.snapshot, inputs.policy)
        _cached_inputs = (time.monotonic(), replace(inputs, snapshot=expected))
    return _cached_inputs[1]


def build_request_row(
    body: dict[str, Any], inputs: DecisionInput, replaced: PendingRow | None = None
) -> PendingRow:
    """Return the row of a request that is not submitted: the last of the queue, or with the age of ``replaced``."""
    columns: dict[str, Any] = {
        name: rule.default if body.get(name) is None else body[name] for name, rule in job_fields().items()
    }
    columns |= {
        "name": str(body.get("name") or "the request"),
        "public_id": PREVIEW_JOB,
        "project__public_id": str(body["project"]),
        "owner__public_id": str(body["user"]),
        "pool__public_id": body.get("pool"),
        "environment_id": Environment.objects.values_list("pk", flat=True).get(public_id=body["environment"]),
        "submitted_s": inputs.snapshot.now_s if replaced is None else replaced.submitted_s,
        "queue_rank": 0 if replaced is None else replaced.queue_rank,
        "version": 0,
        "reason": "",
        "nominated_placement": None,
        "start_after_s": dt.datetime.fromisoformat(start).timestamp()
        if (start := body.get("start_after"))
        else None,
    }
    pools = tuple(pool.id for pool in inputs.snapshot.pools)
    avoided = [] if replaced is None else _avoided_for_a_while(replaced)
    row = replace(
        build_placeable_row(columns, pools, inputs.ineligible, avoided, inputs.home_nodes),
        dependencies=unfinished_jobs(body.get("dependencies") or ()),
        ignore_dependency_failure=bool(columns["ignore_dependency_failure"]),
    )
    side = isolation_side(columns["kind"], row.tasks, row.min_tasks, columns["launcher"])
    return (
        row
        if side is None
        else exclude_nodes(row, isolation_excluded_nodes(side, row.project, inputs.isolated_workloads))
    )


def _avoided_for_a_while(row: PendingRow) -> list[str]:
    """Return the nodes that a job avoids because of an earlier failure, whatever it requests."""
    other_reasons = {*row.ineligible_nodes, *row.isolation_excluded_nodes}
    return [node for node in row.avoid_nodes if node not in other_reasons]


def _delays(body: dict[str, Any], inputs: DecisionInput) -> dict[str, Any]:
    """Return the jobs that a later end of a running job would delay."""
    found = estimate_delay_impact(
        inputs.snapshot,
        decide(inputs.snapshot, inputs.policy, _decision_cache),
        inputs.policy,
        JobId(body["job"]),
        float(body["end_s"]),
        float(body["later_s"]),
        _duration_estimator.durations,
        _duration_estimator.template_of,
    )
    late = [{"job": one.job, "by_s": one.delay_s if one.delay_s < math.inf else None} for one in found.jobs]
    return {"delays": late, "reservations": list(found.reservations), "whole": found.is_complete}


def _quota_effect(body: dict[str, Any], inputs: DecisionInput) -> dict[str, Any]:
    """Return what would change at once if the quotas of the body replaced the present ones."""
    snapshot, policy = inputs.snapshot, inputs.policy
    quotas = quota_rows(body["quotas"])
    changed = replace_quotas(snapshot, quotas)
    found = estimate_quota_effect(
        (snapshot, decide(snapshot, policy, _decision_cache)),
        (changed, decide(changed, policy)),
        sorted({row.pool for row in quotas}),
        policy,
        _duration_estimator.durations,
        _duration_estimator.template_of,
        request_runs(snapshot),
    )
    rows = {row.job: row for row in snapshot.pending}
    calibration = recent_calibration()

    def start_fields(job: JobId, wait_s: float | None) -> dict[str, Any] | None:
        """Return wait and start interval; None without a known start."""
        if wait_s is None or wait_s == math.inf:
            return None
        if not wait_s:
            return {"wait_s": 0.0, "interval": None}
        row = rows[job]
        interval = calibration.interval(row.total_milli, wait_s)
        found = absolute_interval(snapshot.now_s, interval, wait_s, row.not_before_s or 0.0)
        return {"wait_s": wait_s, "interval": interval_fields(found)}

    return {
        "sooner": sum(each.shift_s < 0 for each in found.shifts),
        "later": sum(each.shift_s > 0 for each in found.shifts),
        "starts": [
            {
                "job": each.job,
                "before": start_fields(each.job, each.before_s),
                "after": start_fields(each.job, each.after_s),
            }
            for each in found.shifts[:MAX_LISTED_EFFECTS]
        ],
        "victim_count": len(found.evictions),
        "victims": [victim_fields(each, snapshot) for each in found.evictions[:MAX_LISTED_EFFECTS]],
        "holdings": [
            {"project": project, "pool": pool, "before": asdict(was), "after": asdict(then)}
            for (project, pool), (was, then) in found.holdings.items()
        ],
        "whole": found.is_complete,
    }


def quota_rows(quotas: list[dict[str, Any]]) -> list[QuotaRow]:
    """Return the rows of changed quotas, as ``engine_quotas`` of the portal writes them."""
    return [
        QuotaRow(
            ProjectId(each["project"]),
            PoolId(each["pool"]),
            each["guaranteed_milli"],
            each["limit_milli"],
            each["weight"],
            each["priority"],
            user_limit_milli=each["user_limit_milli"],
        )
        for each in quotas
    ]


def preview_fields(answer: RequestPreview, inputs: DecisionInput) -> dict[str, Any]:
    names = {node.id: node.name for node in inputs.snapshot.nodes}
    places: list[NodeId] = [task.node for task in answer.placement.tasks] if answer.placement else []
    return {
        "starts_now": answer.starts_now,
        "unsatisfiable": answer.is_unsatisfiable,
        "where": sorted({names[place] for place in places}),
        "verdict": verdict_fields(answer.verdict) if answer.verdict else None,
        "alternatives": [change_fields(change) for change in answer.alternatives],
        "victims": [victim_fields(eviction, inputs.snapshot) for eviction in answer.evictions],
    }


def endless_fields(snapshot: Snapshot, request: PendingRow) -> dict[str, float]:
    """Return the GPUs that jobs hold in the pools of a request, and those of jobs of which no end is known."""
    held = endless = 0
    for row in snapshot.running:
        if row.pool in request.pools and not row.stopping:
            milli = sum(share.milli for task in row.tasks for share in task.gpus)
            held += milli
            if row.time_limit_s is None and row.predicted_end_s is None:
                endless += milli
    return {"held_gpus": held / WHOLE_MILLI, "endless_gpus": endless / WHOLE_MILLI}


def interval_fields(interval: StartInterval | None) -> dict[str, float] | None:
    """Return the start interval in seconds since the epoch; None when unknown."""
    if interval is None:
        return None
    return {"p10_s": interval.p10_s, "p50_s": interval.p50_s, "p90_s": interval.p90_s}


def victim_fields(eviction: Eviction, snapshot: Snapshot) -> dict[str, Any]:
    """Return a running job that would be evicted, with the GPUs it holds and the GPU-seconds it would lose.

    ``saved_s`` is its last checkpoint (Unix time); None when it reported none and would lose all since its
    start.
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
        "lost_gpu_seconds": milli / WHOLE_MILLI * max(0.0, snapshot.now_s - saved_s),
        "saved": row.checkpoint_s is not None,
        "saved_s": row.checkpoint_s,
    }
