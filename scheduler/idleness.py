"""The pass over running workspaces that hold GPUs: what their minutes say, and what follows of it.

It writes down what it found, and does a step only where the record still says what it was decided on. It may be
repeated, or doubled, at any time.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from portal.models import Activity, Allocation, Excuse, UsageMinute
from portal.selectors.project_policy import rules_for
from portal.services import idle
from portal.words.knobs import KnobValue
from portal.words.states import AttemptState, JobKind
from scheduler.core.idle import GpuUse, Minute, Quiet, Rule, Step, ToolUse, Watched, quiet_since_s, step
from scheduler.read_cluster import read_now_s

LOOK_BACK_S = 900.0
"""Minutes older than this are not read any more: with a gap as long the count has begun anew."""
STEPS_AT_ONCE = 500
"""At most so many countdowns begin, end or run out in one pass; the next goes on."""

Held = dict[int, list[tuple[int, str]]]
"""By attempt: the node (row number) and UUID of each GPU that it holds."""


@dataclass(frozen=True)
class Found:
    """One workspace as the pass found it."""

    row: Activity
    watched: Watched
    knobs: dict[str, KnobValue]


def look_for_idle() -> None:
    """One pass."""
    held = _held()
    if not held:
        return
    now_s = read_now_s()
    found = _found(held, now_s)
    done = 0
    for one in found:
        if done >= STEPS_AT_ONCE:
            return
        done += _do(one, now_s)


def _do(one: Found, now_s: float) -> bool:
    """Takes the step that follows for a workspace; True when there was one."""
    rule = Rule(str(one.knobs["idle_action"]), float(one.knobs["idle_after_s"]))
    match step(one.watched, rule, now_s):
        case Step.BEGIN:
            since_s = quiet_since_s(one.watched, now_s)
            grace_s = float(one.knobs["idle_grace_s"]) if rule.action == "suspend" else None
            return since_s is not None and idle.begin_countdown(one.row, _moment(since_s), grace_s)
        case Step.END:
            return idle.end_countdown(one.row, _why(one, rule, now_s))
        case Step.SUSPEND:
            return idle.suspend_idle(one.row)
    return False


def _why(one: Found, rule: Rule, now_s: float) -> str:
    """Why a countdown ends."""
    if rule.action == "off":
        return "The policy lets idle workspaces be."
    if one.watched.kept_until_s is not None and one.watched.kept_until_s > now_s:
        return "It is kept."
    used_at, told = one.row.used_at, one.row.quiet_since
    if used_at is not None and told is not None and used_at > told:
        return "It is used again."
    if quiet_since_s(one.watched, now_s) is not None:
        return "It has not been quiet for long enough."
    return "Whether it is used is not known at the moment, so it is not taken for idle."


# -- what is known ---------------------------------------------------------------------------------


def _held() -> Held:
    """The running workspaces that hold GPUs and whose server answers."""
    held: Held = defaultdict(list)
    for attempt, node, uuid in Allocation.objects.filter(
        ended_at__isnull=True,
        task__attempt__state=AttemptState.RUNNING.value,
        task__attempt__stop_wanted_at__isnull=True,
        task__attempt__ready_at__isnull=False,
        task__attempt__job__kind=JobKind.WORKSPACE.value,
    ).values_list("task__attempt_id", "task__node_id", "gpu__uuid"):
        held[attempt].append((node, uuid))
    return held


def _found(held: Held, now_s: float) -> list[Found]:
    """What is known of each, written down where minutes were added: a fixed number of queries."""
    Activity.objects.bulk_create([Activity(attempt_id=attempt) for attempt in held], ignore_conflicts=True)
    rows = list(
        Activity.objects.filter(pk__in=held).select_related("attempt__pool", "attempt__job").order_by("pk")
    )
    rules = rules_for((row.attempt.pool, row.attempt.job.project_id) for row in rows)
    minutes = _minutes({node for gpus in held.values() for node, _ in gpus}, now_s)
    kept = dict(
        Excuse.objects.filter(
            job__in=[row.attempt.job_id for row in rows], cut_at__isnull=True, until__gt=_moment(now_s)
        ).values_list("job_id", "until")
    )
    moved, found = [], []
    for row in rows:
        mine = rules[row.attempt.pool_id, row.attempt.job.project_id].knobs
        gpu = _gpu_use(row).after(_of(held[row.pk], minutes), float(mine["idle_gpu_percent"]))
        if gpu != _gpu_use(row):
            row.gpu_quiet_since = _moment(gpu.quiet.since_s) if gpu.quiet else None
            row.gpu_quiet_until = _moment(gpu.quiet.until_s) if gpu.quiet else None
            row.gpu_used_at = _moment(gpu.used_s) if gpu.used_s is not None else None
            moved.append(row)
        found.append(Found(row, _watched(row, gpu, kept.get(row.attempt.job_id)), mine))
    Activity.objects.bulk_update(moved, ["gpu_quiet_since", "gpu_quiet_until", "gpu_used_at"])
    return found


def _minutes(nodes: Iterable[int], now_s: float) -> dict[int, list[UsageMinute]]:
    """The newest minutes of nodes, ascending."""
    found: dict[int, list[UsageMinute]] = defaultdict(list)
    rows = UsageMinute.objects.filter(node__in=list(nodes), minute__gte=_moment(now_s - LOOK_BACK_S))
    for row in rows.only("node_id", "minute", "samples", "gpu_uuids", "utilisation_percent").order_by(
        "minute"
    ):
        found[row.node_id].append(row)
    return found


def _of(gpus: Sequence[tuple[int, str]], minutes: dict[int, list[UsageMinute]]) -> list[Minute]:
    """The minutes of a workspace's GPUs: it is one task, so they are on one node."""
    node = gpus[0][0]
    found = []
    for row in minutes[node]:
        use = dict(zip(row.gpu_uuids, row.utilisation_percent, strict=False))
        told = [use.get(uuid) for _, uuid in gpus]
        known = [each for each in told if each is not None]
        busiest = max(known) if len(known) == len(told) else None
        found.append(Minute(row.minute.timestamp(), row.samples, busiest))
    return found


def _gpu_use(row: Activity) -> GpuUse:
    since, until = row.gpu_quiet_since, row.gpu_quiet_until
    quiet = Quiet(since.timestamp(), until.timestamp()) if since and until else None
    return GpuUse(quiet, row.gpu_used_at.timestamp() if row.gpu_used_at else None)


def _watched(row: Activity, gpu: GpuUse, excused_until: dt.datetime | None) -> Watched:
    attempt = row.attempt
    if attempt.ready_at is None:
        raise ValueError(f"the server of attempt {attempt.pk} has not answered")
    tool = None
    if row.tool_since is not None and row.tool_seen_at is not None:
        used_s = row.tool_used_at.timestamp() if row.tool_used_at else None
        tool = ToolUse(row.tool_since.timestamp(), row.tool_seen_at.timestamp(), used_s)
    kept = max(filter(None, (row.snoozed_until, excused_until)), default=None)
    return Watched(
        ready_s=attempt.ready_at.timestamp(),
        gpu=gpu,
        tool=tool,
        kept_until_s=kept.timestamp() if kept else None,
        counts_down=row.countdown_at is not None,
        stops_s=row.stops_at.timestamp() if row.stops_at else None,
    )


def _moment(at_s: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(at_s, dt.UTC)
