"""Reads the timeline: what runs on each node until when, and expected starts of pending jobs."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.domain.jobs.reasons import VerdictCode
from portal.domain.states import LIVE_ATTEMPT_STATES, DesiredState, JobState
from portal.hidden_fields import NameVisibility
from portal.models import Allocation, Gpu, Job, Node, ReservationNode, Task
from portal.models.jobs.jobs import total_milli
from portal.selectors.nodes.gpu_states import COUNTED_GPU, GpuCounts, with_state

MAX_NEXT_JOBS = 10
"""Maximum number of pending jobs drawn per pool; the table below lists all."""
BAR_COLUMNS = (
    "pk",
    "node_id",
    "attempt__stop_requested_at",
    "attempt__created_at",
    "attempt__running_at",
    "attempt__job__public_id",
    "attempt__job__name",
    "attempt__job__project__name",
    "attempt__job__project_id",
    "attempt__job__owner_id",
    "attempt__job__time_limit_s",
)
"""Of a task, what its bar shows."""
NEXT_BAR_COLUMNS = (
    *("pool__name", "verdict__code", "verdict__p10_at", "verdict__p50_at", "verdict__p90_at"),
    *("public_id", "name", "project__name", "project_id", "owner_id", "time_limit_s"),
)
"""Of a pending job, what its bar shows beside its GPUs."""
MAX_FORECASTS = 200
"""Of all pools: the earliest of them are distributed to the lanes."""
ANY_POOL = gettext_noop("any pool")


class BarJob(NamedTuple):
    """The job of a bar: its public id, its name and the name of its project."""

    public_id: str
    name: str
    project: str


@dataclass(frozen=True)
class TimelineBar:
    """A job on a node, or in the lane of next jobs. ``job`` is None if the reader may not see it.

    ``until`` is None if its end is unknown. ``low`` and ``high`` bound the start of a pending job.
    """

    kind: str  # "running" | "leaving" | "reserved" | "predicted"
    job: BarJob | None
    is_own: bool
    milli: int
    since: dt.datetime
    until: dt.datetime | None
    line_index: int
    line_count: int
    low: dt.datetime | None = None
    high: dt.datetime | None = None


@dataclass(frozen=True)
class ReservationBand:
    name: str
    since: dt.datetime
    until: dt.datetime


@dataclass
class TimelineLane:
    """A row of the plot: a node (with a line for each GPU of a job), or a pool's next jobs (with a line each)."""

    name: str
    gpus: int | None
    """Number of GPUs of the node; None for a lane of next jobs."""
    model: str
    lines: int
    is_unreachable: bool = False
    counts: GpuCounts = field(default_factory=GpuCounts)
    """The GPUs of a node by state; only held ones have lines."""
    bars: list[TimelineBar] = field(default_factory=list)
    bands: list[ReservationBand] = field(default_factory=list)


def node_lanes(visibility: NameVisibility, nodes: list[Node]) -> list[TimelineLane]:
    """Return jobs and reservations on these nodes, in four queries."""
    lanes, places = {}, {}
    gpus: dict[int, list[tuple[str, str]]] = {node.pk: [] for node in nodes}
    present = with_state(Gpu.objects.filter(COUNTED_GPU, node__in=gpus)).order_by("index")
    for pk, on_node, model, state in present.values_list("pk", "node_id", "model", "state"):
        places[pk] = len(gpus[on_node])
        gpus[on_node].append((model, state))
    for node in nodes:
        models = sorted({model for model, _state in gpus[node.pk]})
        lane = TimelineLane(node.name, len(gpus[node.pk]), models[0] if len(models) == 1 else "", 0)
        lane.counts = GpuCounts(**Counter(state for _model, state in gpus[node.pk]))
        lane.is_unreachable = not node.reachable
        lanes[node.pk] = lane

    tasks = list(
        Task.objects.filter(node__in=lanes, container_removed=False, attempt__state__in=LIVE_ATTEMPT_STATES)
        .order_by("rank")
        .values_list(*BAR_COLUMNS)
    )
    held: dict[int, list[tuple[int, int]]] = {task[0]: [] for task in tasks}
    allocations = Allocation.objects.filter(ended_at__isnull=True, task__in=held)
    for holder, gpu, milli in allocations.values_list("task_id", "gpu_id", "milli"):
        held[holder].append((places.get(gpu, -1), milli))
    task_places = {
        task: sorted(place for place, _milli in found if place >= 0) for task, found in held.items()
    }
    for task in sorted(tasks, key=lambda task: (task[1], task_places[task[0]])):
        (
            pk,
            node_id,
            stopped_at,
            created_at,
            running_at,
            public_id,
            name,
            project,
            project_id,
            owner,
            limit_s,
        ) = task
        limit = dt.timedelta(seconds=limit_s) if limit_s else None
        lane = lanes[node_id]
        # A job's GPUs need not be neighbours: bars follow each other instead of covering each other.
        first_line, line_count = lane.lines, max(1, len(task_places[pk]))
        lane.lines += line_count
        lane.bars.append(
            TimelineBar(
                "leaving" if stopped_at else "running",
                BarJob(public_id, name, project) if visibility.can_name_project(project_id) else None,
                owner == visibility.user.pk,
                sum(milli for _place, milli in held[pk]),
                created_at,
                (running_at or created_at) + limit if limit else None,
                first_line,
                line_count,
            )
        )
    reserved = ReservationNode.objects.filter(node__in=lanes, live=True, period__endswith__gt=timezone.now())
    for one in reserved.select_related("reservation").order_by("period"):
        lanes[one.node_id].bands.append(
            ReservationBand(one.reservation.name, one.period.lower, one.period.upper)
        )
    for lane in lanes.values():
        lane.lines = max(1, lane.lines)
    return list(lanes.values())


def next_lanes(visibility: NameVisibility, pool: str) -> list[TimelineLane]:
    """Return the pending jobs with a start forecast by pool, earliest first, in one query."""
    rows = Job.objects.filter(
        state=JobState.PENDING.value,
        desired_state=DesiredState.RUN.value,
        held=False,
        verdict__p50_at__isnull=False,
    )
    if pool:
        rows = rows.filter(Q(pool__name=pool) | Q(pool__isnull=True))
    earliest = rows.order_by("verdict__p50_at").values("pk")[:MAX_FORECASTS]
    bars = Job.objects.filter(pk__in=earliest).order_by("verdict__p50_at").annotate(milli=total_milli())
    lanes: dict[str, TimelineLane] = {}
    reserved = {VerdictCode.WAITING_FOR_EVICTION.value, VerdictCode.RESERVED_FOR_OTHER_JOB.value}
    now = timezone.now()
    for row in bars.values_list(*NEXT_BAR_COLUMNS, "milli"):
        pool_name, code, low, median, high, public_id, name, project, project_id, owner, limit_s, milli = row
        lane_name = pool_name or _(ANY_POOL)
        lane = lanes.setdefault(lane_name, TimelineLane(lane_name, None, "", 0))
        if lane.lines == MAX_NEXT_JOBS or median is None:
            continue
        start = max(median, now)  # a median that has passed: it is due, and the next forecast follows
        limit = dt.timedelta(seconds=limit_s) if limit_s else None
        lane.bars.append(
            TimelineBar(
                "reserved" if code in reserved else "predicted",
                BarJob(public_id, name, project) if visibility.can_name_project(project_id) else None,
                owner == visibility.user.pk,
                milli,
                start,
                start + limit if limit else None,
                lane.lines,
                1,
                max(low, now) if low else None,
                high,
            )
        )
        lane.lines += 1
    return [lanes[name] for name in sorted(lanes)]
