"""Pass over running jobs with GPUs: derives idleness from metrics and applies the idle policy.

Each step is applied only if the rows it was decided on are unchanged, so passes may repeat or overlap.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from django.db.models import Q

from portal.domain.scheduling.policy_settings import IDLE_SETTINGS, SettingValue
from portal.domain.states import AttemptState, JobKind
from portal.domain.stored_texts import stored_text
from portal.models import Allocation, Attempt, AttemptActivity, IdleExemption, NodeMetricsMinute
from portal.selectors.scheduling.project_settings import effective_rules
from portal.services.jobs import idle
from portal.services.serving.advance import scale_idle_to_zero
from scheduler.core.idle_policy import (
    GpuActivity,
    GpuUsageMinute,
    IdlePolicy,
    IdleState,
    IdleStep,
    InactivePeriod,
    ToolActivity,
    inactive_since_s,
    next_step,
)
from scheduler.snapshot.cluster import read_now_s

LOOKBACK_S = 900.0
"""Older metrics minutes are not read; a gap of this length restarts the idle time."""
MAX_STEPS = 500
"""Steps per pass at most; the next pass continues."""

GpusByAttempt = dict[int, list[tuple[int, str]]]
"""By primary key of the attempt: (node primary key, GPU UUID) of each GPU it holds."""


@dataclass(frozen=True)
class IdleCandidate:
    activity: AttemptActivity
    observed: IdleState
    settings: dict[str, SettingValue]


def run_idle_pass() -> None:
    held = _read_held_gpus()
    if not held:
        return
    now_s = read_now_s()
    found = _read_candidates(held, now_s)
    done = 0
    for candidate in found:
        if done >= MAX_STEPS:
            return
        done += _take_step(candidate, now_s)


def _take_step(candidate: IdleCandidate, now_s: float) -> bool:
    """Apply the next step of a job; return True when there was one."""
    rule = _rule(candidate.activity.attempt, candidate.settings)
    match next_step(candidate.observed, rule, now_s):
        case IdleStep.START_COUNTDOWN:
            since_s = inactive_since_s(candidate.observed, now_s)
            grace_s = float(candidate.settings["idle_grace_s"]) if rule.action == "suspend" else None
            return since_s is not None and idle.start_countdown(
                candidate.activity, _to_datetime(since_s), grace_s
            )
        case IdleStep.CANCEL_COUNTDOWN:
            return idle.end_countdown(candidate.activity, _end_reason(candidate, rule, now_s))
        case IdleStep.SUSPEND if candidate.activity.attempt.job.kind == JobKind.SERVICE.value:
            return scale_idle_to_zero(candidate.activity)
        case IdleStep.SUSPEND:
            return idle.suspend_idle(candidate.activity)
    return False


def _end_reason(candidate: IdleCandidate, rule: IdlePolicy, now_s: float) -> str:
    """Return the message why a countdown ends."""
    if rule.action == "off":
        return stored_text("The policy no longer acts on idle jobs of this kind.")
    if candidate.observed.exempt_until_s is not None and candidate.observed.exempt_until_s > now_s:
        return stored_text("It is kept.")
    used_at, reported = candidate.activity.last_active_at, candidate.activity.inactive_since
    if used_at is not None and reported is not None and used_at > reported:
        return stored_text("It is in use again.")
    if inactive_since_s(candidate.observed, now_s) is not None:
        return stored_text("It has not been inactive for long enough.")
    return stored_text("Its activity is unknown at the moment, so it does not count as idle.")


def _rule(attempt: Attempt, settings: Mapping[str, SettingValue]) -> IdlePolicy:
    action, after_s = IDLE_SETTINGS[attempt.job.kind]
    return IdlePolicy(str(settings[action]), float(settings[after_s]))


# -- reads -----------------------------------------------------------------------------------------


def _read_held_gpus() -> GpusByAttempt:
    """Return the GPUs of running training jobs, and of ready workspaces and services."""
    held: GpusByAttempt = defaultdict(list)
    serves = Q(task__attempt__job__kind=JobKind.WORKSPACE.value) | Q(
        task__attempt__job__replica__isnull=False
    )
    trains = Q(task__attempt__job__kind=JobKind.TRAINING.value, task__attempt__running_at__isnull=False)
    for attempt, node, uuid in Allocation.objects.filter(
        trains | serves & Q(task__attempt__ready_at__isnull=False),
        ended_at__isnull=True,
        task__attempt__state=AttemptState.RUNNING.value,
        task__attempt__stop_requested_at__isnull=True,
    ).values_list("task__attempt_id", "task__node_id", "gpu__uuid"):
        held[attempt].append((node, uuid))
    return held


def _read_candidates(gpus_by_attempt: GpusByAttempt, now_s: float) -> list[IdleCandidate]:
    """Return all candidates and save activity that new minutes changed, in a fixed number of queries."""
    attempts = Attempt.objects.filter(pk__in=gpus_by_attempt).select_related(
        "pool", "job__replica__version__service", "activity"
    )
    found_attempts = list(attempts.order_by("pk"))
    rules = effective_rules((each.pool, each.job.project_id) for each in found_attempts)
    watched = {
        each.pk: each
        for each in found_attempts
        if each.job.kind == JobKind.WORKSPACE.value
        or hasattr(each, "activity")
        or _rule(each, rules[each.pool_id, each.job.project_id].values).action != "off"
    }
    AttemptActivity.objects.bulk_create(
        [AttemptActivity(attempt_id=pk) for pk, each in watched.items() if not hasattr(each, "activity")],
        ignore_conflicts=True,
    )
    rows = list(AttemptActivity.objects.filter(pk__in=watched).order_by("pk"))
    for row in rows:
        row.attempt = watched[row.pk]
    minutes = _minutes({node for pk in watched for node, _ in gpus_by_attempt[pk]}, now_s)
    kept = dict(
        IdleExemption.objects.filter(
            job__in=[row.attempt.job_id for row in rows],
            revoked_at__isnull=True,
            expires_at__gt=_to_datetime(now_s),
        ).values_list("job_id", "expires_at")
    )
    moved, found = [], []
    for row in rows:
        settings = rules[row.attempt.pool_id, row.attempt.job.project_id].values
        gpu = _gpu_use(row).extended_by(
            _gpu_minutes(gpus_by_attempt[row.pk], minutes), float(settings["idle_gpu_percent"])
        )
        if gpu != _gpu_use(row):
            row.gpu_inactive_since = _to_datetime(gpu.inactive.since_s) if gpu.inactive else None
            row.gpu_inactive_until = _to_datetime(gpu.inactive.until_s) if gpu.inactive else None
            row.gpu_active_at = _to_datetime(gpu.last_active_s) if gpu.last_active_s is not None else None
            moved.append(row)
        found.append(IdleCandidate(row, _observe(row, gpu, kept.get(row.attempt.job_id), now_s), settings))
    AttemptActivity.objects.bulk_update(moved, ["gpu_inactive_since", "gpu_inactive_until", "gpu_active_at"])
    return found


def _minutes(nodes: Iterable[int], now_s: float) -> dict[int, list[NodeMetricsMinute]]:
    """Return the metrics minutes of the last ``LOOKBACK_S`` by node, ascending."""
    found: dict[int, list[NodeMetricsMinute]] = defaultdict(list)
    rows = NodeMetricsMinute.objects.filter(
        node__in=list(nodes), minute__gte=_to_datetime(now_s - LOOKBACK_S)
    )
    for row in rows.only("node_id", "minute", "samples", "gpu_uuids", "utilisation_percent").order_by(
        "minute"
    ):
        found[row.node_id].append(row)
    return found


def _gpu_minutes(
    gpus: Sequence[tuple[int, str]], minutes: dict[int, list[NodeMetricsMinute]]
) -> list[GpuUsageMinute]:
    """Return the minutes of a job's GPUs; a minute that one of its nodes lacks is not measured, and left out."""
    by_node: dict[int, list[str]] = defaultdict(list)
    for node, uuid in gpus:
        by_node[node].append(uuid)
    rows: dict[dt.datetime, list[NodeMetricsMinute]] = defaultdict(list)
    for node in by_node:
        for row in minutes[node]:
            rows[row.minute].append(row)
    found = []
    for minute, parts in sorted(rows.items()):
        if len(parts) < len(by_node):
            continue
        reported: list[float | None] = []
        for row in parts:
            use = dict(zip(row.gpu_uuids, row.utilisation_percent, strict=False))
            reported += [use.get(uuid) for uuid in by_node[row.node_id]]
        known = [each for each in reported if each is not None]
        busiest = max(known) if len(known) == len(reported) else None
        found.append(GpuUsageMinute(minute.timestamp(), min(row.samples for row in parts), busiest))
    return found


def _gpu_use(row: AttemptActivity) -> GpuActivity:
    since, until = row.gpu_inactive_since, row.gpu_inactive_until
    quiet = InactivePeriod(since.timestamp(), until.timestamp()) if since and until else None
    return GpuActivity(quiet, row.gpu_active_at.timestamp() if row.gpu_active_at else None)


def _observe(
    row: AttemptActivity, gpu: GpuActivity, exempt_until: dt.datetime | None, now_s: float
) -> IdleState:
    attempt, kind = row.attempt, row.attempt.job.kind
    ready_at = attempt.running_at if kind == JobKind.TRAINING.value else attempt.ready_at
    if ready_at is None:
        raise ValueError(f"attempt {attempt.pk} has not started, or its server has not answered")
    tool = None
    if kind == JobKind.SERVICE.value:
        requested_s = attempt.job.replica.version.service.active_at.timestamp()
        tool = ToolActivity(ready_at.timestamp(), now_s, requested_s)
    elif row.tool_polled_since is not None and row.tool_polled_at is not None:
        used_s = row.tool_active_at.timestamp() if row.tool_active_at else None
        tool = ToolActivity(row.tool_polled_since.timestamp(), row.tool_polled_at.timestamp(), used_s)
    kept = max(filter(None, (row.snoozed_until, exempt_until)), default=None)
    return IdleState(
        ready_s=ready_at.timestamp(),
        gpu=gpu,
        tool=tool,
        exempt_until_s=kept.timestamp() if kept else None,
        countdown_started=row.idle_notified_at is not None,
        suspend_at_s=row.suspend_at.timestamp() if row.suspend_at else None,
        has_tool=kind != JobKind.TRAINING.value,
    )


def _to_datetime(at_s: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(at_s, dt.UTC)
