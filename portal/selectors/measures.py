"""Reads what Prometheus is told: the scheduler's totals, the queue, the GPUs, the alarm, how forecasts held."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django.db import connection
from django.db.models import Count, Max, Q

from portal.last_samples import ALL, last_frames
from portal.models import Attempt, Cycle, Gpu, Job, Node, Totals
from portal.selectors.cluster import TAKES_WORK
from portal.selectors.forecasts import Measured, measured
from portal.selectors.scheduler import alarm
from portal.words.reasons import VerdictCode
from portal.words.states import ATTEMPT_LIVE, Desired, GpuHealth, JobState, NodeState
from portal.words.trust import CLOCK_OFF_S, Phase, Trouble

MOST_POOLS = 100
MOST_NODES = 500
OTHER_POOLS = "(other)"
ANY_POOL = "(any)"
FOREIGN = "foreign"
"""A GPU that is well, with a program on it that is no job's."""
UNDECIDED = "undecided"
"""The verdict of a job that no cycle has looked at yet."""


@dataclass(frozen=True)
class NodeNow:
    """What a node did last: means and sums over its GPUs; None where nothing was told."""

    name: str
    reachable: bool
    lag_s: float | None = None
    gpu_use: float | None = None
    gpu_memory_mib: float | None = None
    power_watts: float | None = None


@dataclass
class Measures:
    """Everything, by label. Pools beyond the first hundred by name are one; so many nodes are told and no more."""

    counts: dict[str, Any]
    queue: dict[tuple[str, str], int] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    gpus: dict[tuple[str, str], float] = field(default_factory=dict)
    unwell: dict[tuple[str, str], int] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    each_node: list[NodeNow] = field(default_factory=list)
    aside: dict[str, int] = field(default_factory=dict)
    """Nodes that are not trusted, by cause."""
    clocks_off: int = 0
    alarm: bool = False
    last_cycle_s: float | None = None
    forecasts: Measured | None = None


def measures() -> Measures:
    """Ten queries, whatever the size of the cluster."""
    totals = Totals.objects.filter(id=1).first()
    found = Measures(totals.counts if totals else {})
    names = _Pools()
    _queue(found, names)
    _running(found, names)
    _gpus(found, names)
    _unwell(found, names)
    found.each_node = _each_node()
    nodes = Node.objects.exclude(state=NodeState.RETIRED.value).aggregate(
        answering=Count("pk", filter=Q(reachable=True)),
        every=Count("pk"),
        clocks_off=Count("pk", filter=Q(clock_skew_s__gt=CLOCK_OFF_S) | Q(clock_skew_s__lt=-CLOCK_OFF_S)),
        **{
            cause.value: Count("pk", filter=Q(trust_cause=cause.value) & ~Q(trust=Phase.TRUSTED.value))
            for cause in Trouble
        },
    )
    found.nodes = {"reachable": nodes["answering"], "unreachable": nodes["every"] - nodes["answering"]}
    found.aside = {cause.value: nodes[cause.value] for cause in Trouble}
    found.clocks_off = nodes["clocks_off"]
    found.alarm = bool(alarm().alarm)
    last = Cycle.objects.aggregate(at=Max("started_at"))["at"]
    found.last_cycle_s = last.timestamp() if last else None
    found.forecasts = measured()
    return found


class _Pools:
    """Names of pools as labels: so many and no more."""

    def __init__(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT name FROM portal_nodepool ORDER BY name LIMIT %s", [MOST_POOLS])
            self.known = {name for (name,) in cursor.fetchall()}

    def label(self, name: str | None) -> str:
        """The pool's own name, or the one word for those beyond the bound."""
        if name is None:
            return ANY_POOL
        return name if name in self.known else OTHER_POOLS


def _queue(found: Measures, names: _Pools) -> None:
    codes = {code.value for code in VerdictCode}
    rows = (
        Job.objects.filter(state=JobState.PENDING.value, desired=Desired.RUN.value)
        .order_by()
        .values_list("pool__name", "standing__code")
        .annotate(number=Count("pk"))
    )
    for pool, code, number in rows:
        key = (names.label(pool), code if code in codes else UNDECIDED)
        found.queue[key] = found.queue.get(key, 0) + number


def _running(found: Measures, names: _Pools) -> None:
    rows = (
        Attempt.objects.filter(state__in=ATTEMPT_LIVE)
        .order_by()
        .values_list("pool__name")
        .annotate(number=Count("pk"))
    )
    for pool, number in rows:
        found.running[names.label(pool)] = found.running.get(names.label(pool), 0) + number


def _gpus(found: Measures, names: _Pools) -> None:
    rows = (
        Gpu.objects.filter(present=True)
        .exclude(node__state=NodeState.RETIRED.value)
        .order_by()
        .values_list("node__pool__name")
        .annotate(
            held=Count("pk", filter=Q(used_milli__gt=0)),
            free=Count("pk", filter=TAKES_WORK & Q(used_milli=0)),
            every=Count("pk"),
        )
    )
    for pool, held, free, every in rows:
        for word, number in (("held", held), ("free", free), ("closed", every - held - free)):
            key = (names.label(pool), word)
            found.gpus[key] = found.gpus.get(key, 0) + number


def _unwell(found: Measures, names: _Pools) -> None:
    """GPUs that take no work for what is wrong with them, or for whose program is on them."""
    rows = (
        Gpu.objects.exclude(node__state=NodeState.RETIRED.value)
        .filter(~Q(health=GpuHealth.OK.value) | Q(present=True) & ~Q(foreign_user=""))
        .order_by()
        .values_list("node__pool__name", "health")
        .annotate(number=Count("pk"))
    )
    for pool, health, number in rows:
        key = (names.label(pool), FOREIGN if health == GpuHealth.OK.value else health)
        found.unwell[key] = found.unwell.get(key, 0) + number


def _each_node() -> list[NodeNow]:
    """The first nodes by name, with what the last frame of the cluster tells of them."""
    rows = Node.objects.exclude(state=NodeState.RETIRED.value).order_by("name")
    told = last_frames([ALL]).get(ALL, {}).get("nodes", {})
    return [
        _now(name, reachable, told.get(public_id))
        for public_id, name, reachable in rows.values_list("public_id", "name", "reachable")[:MOST_NODES]
    ]


def _now(name: str, reachable: bool, told: dict[str, Any] | None) -> NodeNow:
    if told is None:
        return NodeNow(name, reachable)
    use, memory, power = ([each for each in told[key] if each is not None] for key in ("u", "m", "w"))
    return NodeNow(
        name,
        reachable,
        lag_s=told["lag_s"],
        gpu_use=sum(use) / len(use) / 100 if use else None,
        gpu_memory_mib=sum(memory) if memory else None,
        power_watts=sum(power) if power else None,
    )
