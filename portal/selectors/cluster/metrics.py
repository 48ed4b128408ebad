"""Reads the metrics for Prometheus: scheduler counters, queue, GPUs, alert, forecast accuracy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Count, Max, Q, QuerySet

from portal.domain.jobs.reasons import VerdictCode
from portal.domain.nodes.node_breaker import MAX_CLOCK_SKEW_S, BreakerState, IncidentKind
from portal.domain.states import (
    LIVE_ATTEMPT_STATES,
    DesiredState,
    GpuHealth,
    GpuState,
    JobState,
    NodeState,
)
from portal.models import Attempt, Cycle, Gpu, Job, Node, NodePool, SchedulerCounters
from portal.selectors.nodes.gpu_states import count_gpus_by
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
    queue: Counter[tuple[str, str]] = field(default_factory=Counter)
    running: Counter[str] = field(default_factory=Counter)
    gpus: Counter[tuple[str, str]] = field(default_factory=Counter)
    unhealthy_gpus: Counter[tuple[str, str]] = field(default_factory=Counter)
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
    pools = set(NodePool.objects.order_by("name").values_list("name", flat=True)[:MAX_POOLS])
    _read_queue(found, pools)
    running = Attempt.objects.filter(state__in=LIVE_ATTEMPT_STATES)
    for pool, number in _count_by_pool(pools, running, "pool__name"):
        found.running[pool] += number
    _read_gpus(found, pools)
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


def _count_by_pool(
    pools: Collection[str], rows: QuerySet[Any], pool: str, *keys: str, **counts: Any
) -> Iterator[tuple[Any, ...]]:
    """Yield the label of each pool, the values of ``keys`` and the counts of a group of rows."""
    grouped = rows.order_by().values_list(pool, *keys).annotate(**(counts or {"number": Count("pk")}))
    for name, *values in grouped:
        yield ANY_POOL if name is None else name if name in pools else OTHER_POOLS, *values


def _read_queue(found: ClusterMetrics, pools: Collection[str]) -> None:
    codes = {code.value for code in VerdictCode}
    pending = Job.objects.filter(state=JobState.PENDING.value, desired_state=DesiredState.RUN.value)
    for pool, code, number in _count_by_pool(pools, pending, "pool__name", "verdict__code"):
        found.queue[pool, code if code in codes else NO_VERDICT] += number


def _read_gpus(found: ClusterMetrics, pools: Collection[str]) -> None:
    gpus = Gpu.objects.exclude(node__state=NodeState.RETIRED.value)
    for (name,), counts in count_gpus_by(gpus, "node__pool__name").items():
        pool = name if name in pools else OTHER_POOLS
        found.gpus.update({(pool, state.value): getattr(counts, state.value) for state in GpuState})
    # those that accept no work because of their health or a foreign process
    unhealthy = gpus.filter(~Q(health=GpuHealth.OK.value) | Q(present=True) & ~Q(foreign_process_owner=""))
    for pool, health, number in _count_by_pool(pools, unhealthy, "node__pool__name", "health"):
        found.unhealthy_gpus[pool, FOREIGN_PROCESS if health == GpuHealth.OK.value else health] += number


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
