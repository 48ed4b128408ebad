"""Reads the next hours: what runs on each node until when, and when waiting jobs are expected to follow."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field

from django.db.models import Prefetch, Q
from django.utils import timezone

from portal.models import Allocation, Job, Node, ReservedNode, Task
from portal.visibility import Visibility
from portal.words.reasons import VerdictCode
from portal.words.states import ATTEMPT_LIVE, Desired, JobState

NEXT_SHOWN = 10
"""So many waiting jobs of a pool are drawn; the table below has them all."""
ANY_POOL = "any pool"


@dataclass(frozen=True)
class Bar:
    """A job on a node or in the lane of those that come next. ``job`` None: its name is not for the reader.

    ``until`` None: nobody knows its end. ``low`` and ``high`` bound the start of one that waits.
    """

    kind: str  # "running" | "leaving" | "reserved" | "predicted"
    job: Job | None
    mine: bool
    milli: int
    since: dt.datetime
    until: dt.datetime | None
    at: int
    width: int
    low: dt.datetime | None = None
    high: dt.datetime | None = None


@dataclass(frozen=True)
class Band:
    """A time in which a node is reserved."""

    name: str
    since: dt.datetime
    until: dt.datetime


@dataclass
class Lane:
    """A row of the plot: a node (its lines are GPUs), or a pool's next jobs (its lines are jobs)."""

    name: str
    gpus: int | None
    """How many the node has; None: it is no node, but a pool's next jobs."""
    model: str
    lines: int
    away: bool = False
    free: int = 0
    """GPUs of a node that nobody holds; lines below the last held one are not drawn."""
    bars: list[Bar] = field(default_factory=list)
    bands: list[Band] = field(default_factory=list)


def node_lanes(visibility: Visibility, nodes: list[Node]) -> list[Lane]:
    """What runs on these nodes (GPUs prefetched), and what is reserved: four queries, whatever their number."""
    lanes = {}
    for node in nodes:
        gpus = list(node.gpus.all())
        models = sorted({gpu.model for gpu in gpus})
        lane = Lane(node.name, len(gpus), models[0] if len(models) == 1 else "", 1)
        lane.free = sum(not gpu.used_milli for gpu in gpus)
        lane.away = not node.reachable
        lanes[node.pk] = lane
    places = {gpu.pk: at for node in nodes for at, gpu in enumerate(node.gpus.all())}
    held = Allocation.objects.filter(ended_at__isnull=True).select_related("gpu")
    tasks = (
        Task.objects.filter(node__in=lanes, gone=False, attempt__state__in=ATTEMPT_LIVE)
        .select_related("attempt__job__project", "attempt__job__owner")
        .prefetch_related(Prefetch("allocations", queryset=held))
        .order_by("node_id", "rank")
    )
    for task in tasks:
        attempt, job = task.attempt, task.attempt.job
        lines = sorted(places[one.gpu_id] for one in task.allocations.all() if one.gpu_id in places)
        limit = dt.timedelta(seconds=job.time_limit_s) if job.time_limit_s else None
        lane = lanes[task.node_id]
        lane.lines = max(lane.lines, lines[-1] + 1 if lines else 1)
        lane.bars.append(
            Bar(
                "leaving" if attempt.stop_wanted_at else "running",
                job if visibility.sees(job) else None,
                job.owner_id == visibility.user.pk,
                sum(one.milli for one in task.allocations.all()),
                attempt.created_at,
                (attempt.running_at or attempt.created_at) + limit if limit else None,
                lines[0] if lines else 0,
                lines[-1] - lines[0] + 1 if lines else 1,
            )
        )
    reserved = ReservedNode.objects.filter(node__in=lanes, live=True, during__endswith__gt=timezone.now())
    for one in reserved.select_related("reservation").order_by("during"):
        lanes[one.node_id].bands.append(Band(one.reservation.name, one.during.lower, one.during.upper))
    return list(lanes.values())


def next_lanes(visibility: Visibility, pool: str) -> list[Lane]:
    """The waiting jobs that have a start interval, by pool, soonest first: one query."""
    rows = Job.objects.filter(
        state=JobState.PENDING.value, desired=Desired.RUN.value, held=False, standing__p50_at__isnull=False
    )
    if pool:
        rows = rows.filter(Q(pool__name=pool) | Q(pool__isnull=True))
    lanes: dict[str, Lane] = {}
    reserved = {VerdictCode.RELEASING.value, VerdictCode.HELD_FOR_RESERVATION.value}
    for job in rows.select_related("project", "owner", "pool", "standing").order_by("standing__p50_at")[:200]:
        name = job.pool.name if job.pool else ANY_POOL
        lane = lanes.setdefault(name, Lane(name, None, "", 0))
        if lane.lines == NEXT_SHOWN:
            continue
        standing = job.standing
        start = standing.p50_at
        if start is None:
            continue
        limit = dt.timedelta(seconds=job.time_limit_s) if job.time_limit_s else None
        lane.bars.append(
            Bar(
                "reserved" if standing.code in reserved else "predicted",
                job if visibility.sees(job) else None,
                job.owner_id == visibility.user.pk,
                job.total_milli,
                start,
                start + limit if limit else None,
                lane.lines,
                1,
                standing.p10_at,
                standing.p90_at,
            )
        )
        lane.lines += 1
    return [lanes[name] for name in sorted(lanes)]
