"""Reads the metrics for Prometheus: scheduler counters, queue, GPUs, alert, forecast accuracy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django.db import connection
from django.db.models import Count, Max, Q

from portal.domain.node_breaker import MAX_CLOCK_SKEW_S, BreakerState, IncidentKind
from portal.domain.reasons import VerdictCode
from portal.domain.states import LIVE_ATTEMPT_STATES, DesiredState, GpuHealth, JobState, NodeState
from portal.models import Attempt, Cycle, Gpu, Job, Node, SchedulerCounters
from portal.selectors.nodes.cluster_overview import ACCEPTS_WORK
from portal.selectors.scheduling.cycles import scheduler_alert
from portal.selectors.scheduling.forecasts import ForecastAccuracy, forecast_accuracy
from portal.valkey.sample_cache import CLUSTER_KEY, latest_frames

MAX_POOLS = 100
MAX_NODES = 500
OTHER_POOLS = "(other)"
ANY_POOL = "(any)"
FOREIGN_PROCESS = "foreign"
"""A healthy GPU with a process on it that belongs to no job."""
NO_VERDICT = "undecided"
"""The verdict label of a job that no cycle has examined yet."""


@dataclass(frozen=True)
class NodeMetrics:
    """The last values of a node: means and sums over its GPUs; None if not reported."""

    name: str
    reachable: bool
    lag_s: float | None = None
    gpu_utilisation: float | None = None
    gpu_memory_mib: float | None = None
    power_watts: float | None = None


@dataclass
class ClusterMetrics:
    """All metrics, by label.

    The number of pool labels and nodes is bounded; further pools share one label.
    """

    counts: dict[str, Any]
    queue: dict[tuple[str, str], int] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    gpus: dict[tuple[str, str], float] = field(default_factory=dict)
    unhealthy_gpus: dict[tuple[str, str], int] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    node_metrics: list[NodeMetrics] = field(default_factory=list)
    quarantined_nodes: dict[str, int] = field(default_factory=dict)
    """Nodes not in state healthy, by cause."""
    clock_skewed_nodes: int = 0
    has_scheduler_alert: bool = False
    last_cycle_s: float | None = None
    forecasts: ForecastAccuracy | None = None


def collect_metrics() -> ClusterMetrics:
    """Read all metrics in ten queries, whatever the size of the cluster."""
    totals = SchedulerCounters.objects.filter(id=1).first()
    found = ClusterMetrics(totals.counts if totals else {})
    names = _PoolLabels()
    _read_queue(found, names)
    _read_running(found, names)
    _read_gpus(found, names)
    _read_unhealthy(found, names)
    found.node_metrics = _read_nodes()
    nodes = Node.objects.exclude(state=NodeState.RETIRED.value).aggregate(
        answering=Count("pk", filter=Q(reachable=True)),
        every=Count("pk"),
        clock_skewed=Count(
            "pk", filter=Q(clock_skew_s__gt=MAX_CLOCK_SKEW_S) | Q(clock_skew_s__lt=-MAX_CLOCK_SKEW_S)
        ),
        **{
            cause.value: Count(
                "pk", filter=Q(breaker_cause=cause.value) & ~Q(breaker_state=BreakerState.HEALTHY.value)
            )
            for cause in IncidentKind
        },
    )
    found.nodes = {"reachable": nodes["answering"], "unreachable": nodes["every"] - nodes["answering"]}
    found.quarantined_nodes = {cause.value: nodes[cause.value] for cause in IncidentKind}
    found.clock_skewed_nodes = nodes["clock_skewed"]
    found.has_scheduler_alert = bool(scheduler_alert().scheduler_alert)
    last = Cycle.objects.aggregate(at=Max("started_at"))["at"]
    found.last_cycle_s = last.timestamp() if last else None
    found.forecasts = forecast_accuracy()
    return found


class _PoolLabels:
    """Pool names as labels, bounded in number."""

    def __init__(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT name FROM portal_nodepool ORDER BY name LIMIT %s", [MAX_POOLS])
            self.known = {name for (name,) in cursor.fetchall()}

    def label(self, name: str | None) -> str:
        """Return the pool's name, or the shared label beyond the bound."""
        if name is None:
            return ANY_POOL
        return name if name in self.known else OTHER_POOLS


def _read_queue(found: ClusterMetrics, names: _PoolLabels) -> None:
    codes = {code.value for code in VerdictCode}
    rows = (
        Job.objects.filter(state=JobState.PENDING.value, desired_state=DesiredState.RUN.value)
        .order_by()
        .values_list("pool__name", "verdict__code")
        .annotate(number=Count("pk"))
    )
    for pool, code, number in rows:
        key = (names.label(pool), code if code in codes else NO_VERDICT)
        found.queue[key] = found.queue.get(key, 0) + number


def _read_running(found: ClusterMetrics, names: _PoolLabels) -> None:
    rows = (
        Attempt.objects.filter(state__in=LIVE_ATTEMPT_STATES)
        .order_by()
        .values_list("pool__name")
        .annotate(number=Count("pk"))
    )
    for pool, number in rows:
        found.running[names.label(pool)] = found.running.get(names.label(pool), 0) + number


def _read_gpus(found: ClusterMetrics, names: _PoolLabels) -> None:
    rows = (
        Gpu.objects.filter(present=True)
        .exclude(node__state=NodeState.RETIRED.value)
        .order_by()
        .values_list("node__pool__name")
        .annotate(
            held=Count("pk", filter=Q(used_milli__gt=0)),
            free=Count("pk", filter=ACCEPTS_WORK & Q(used_milli=0)),
            every=Count("pk"),
        )
    )
    for pool, held, free, every in rows:
        for word, number in (("held", held), ("free", free), ("closed", every - held - free)):
            key = (names.label(pool), word)
            found.gpus[key] = found.gpus.get(key, 0) + number


def _read_unhealthy(found: ClusterMetrics, names: _PoolLabels) -> None:
    """Count the GPUs that accept no work because of their health or a foreign process."""
    rows = (
        Gpu.objects.exclude(node__state=NodeState.RETIRED.value)
        .filter(~Q(health=GpuHealth.OK.value) | Q(present=True) & ~Q(foreign_process_owner=""))
        .order_by()
        .values_list("node__pool__name", "health")
        .annotate(number=Count("pk"))
    )
    for pool, health, number in rows:
        key = (names.label(pool), FOREIGN_PROCESS if health == GpuHealth.OK.value else health)
        found.unhealthy_gpus[key] = found.unhealthy_gpus.get(key, 0) + number


def _read_nodes() -> list[NodeMetrics]:
    """Return the first nodes by name, with the values of the last cluster frame."""
    rows = Node.objects.exclude(state=NodeState.RETIRED.value).order_by("name")
    reported = latest_frames([CLUSTER_KEY]).get(CLUSTER_KEY, {}).get("nodes", {})
    return [
        _node_metrics(name, reachable, reported.get(public_id))
        for public_id, name, reachable in rows.values_list("public_id", "name", "reachable")[:MAX_NODES]
    ]


def _node_metrics(name: str, reachable: bool, frame: dict[str, Any] | None) -> NodeMetrics:
    if frame is None:
        return NodeMetrics(name, reachable)
    use, memory, power = ([each for each in frame[key] if each is not None] for key in ("u", "m", "w"))
    return NodeMetrics(
        name,
        reachable,
        lag_s=frame["lag_s"],
        gpu_utilisation=sum(use) / len(use) / 100 if use else None,
        gpu_memory_mib=sum(memory) if memory else None,
        power_watts=sum(power) if power else None,
    )
