"""Reads free capacity by GPU model, and each GPU as a square."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import starmap

from django.db.models import Count, Max, Q, QuerySet

from portal.access import Requester, visible_nodes
from portal.domain.node_breaker import BreakerState
from portal.domain.states import AttemptState, GpuHealth, NodeState
from portal.models import Allocation, Gpu, Node

ACCEPTS_WORK = Q(
    Q(node__breaker_state=BreakerState.HEALTHY.value)
    | Q(node__breaker_state=BreakerState.PROBATION.value, node__probation_attempt__isnull=True),
    health=GpuHealth.OK.value,
    foreign_process_owner="",
    node__state=NodeState.READY.value,
    node__reachable=True,
)
"""Selects GPUs that accept work if they are not allocated."""

MAX_DRAWN_GPUS = 256
"""With more GPUs the summary shows numbers without squares; the cluster page draws all."""


@dataclass(frozen=True, slots=True)
class GpuDisplayRow:
    """The columns needed to draw a GPU: thousands are read at once, without model instances."""

    pk: int
    node_id: int
    uuid: str
    index: int
    model: str
    memory_mib: int
    health: str
    used_milli: int
    simulated: bool
    health_reason: str
    foreign_process_owner: str


def gpu_display_rows(gpus: QuerySet[Gpu]) -> Iterator[GpuDisplayRow]:
    """Yield the rows of a query, in one query."""
    return starmap(GpuDisplayRow, gpus.values_list(*GpuDisplayRow.__slots__))


@dataclass(frozen=True)
class GpuSquare:
    """A GPU as pages draw it. ``utilisation_level`` is 0 to 4; without it ``shape`` is drawn."""

    uuid: str  # empty if live samples address it by ``grid_index``
    shape: str  # free, busy, starting, failed, drained
    utilisation_level: int | None = None
    overlay: str = ""  # sim, away, warn
    title: str = ""
    grid_index: int | None = None
    """Its position among the node's GPUs by index, as live frames number them."""


@dataclass
class NodeSummary:
    name: str
    public_id: str
    squares: list[GpuSquare] = field(default_factory=list)
    free: int = 0

    @property
    def accessible_label(self) -> str:
        """Text for screen readers, such as h200-3: 5 busy, 1 starting, 2 free."""
        count = Counter(
            "unreachable" if square.overlay == "away" else square.shape for square in self.squares
        )
        return f"{self.name}: " + ", ".join(f"{n} {look}" for look, n in count.items())


@dataclass
class GpuModelSummary:
    """A GPU model with total and free GPUs, and the largest number free on one node."""

    model: str
    memory_mib: int
    total: int = 0
    free: int = 0
    largest_free: int = 0
    nodes: list[NodeSummary] = field(default_factory=list)
    pools: set[int] = field(default_factory=set)
    largest_node: int = 0

    @property
    def message(self) -> str:
        """What could start now."""
        if self.free == 0:
            return "None is free now; new jobs wait in the queue."
        if self.largest_free == 1:
            return "Any job with 1 GPU per node starts now, within quotas."
        return f"Up to {self.largest_free} on one node. Any job of up to {self.largest_free} GPUs fits now."


def free_capacity(requester: Requester) -> list[GpuModelSummary]:
    """Return the GPU models of the cluster, largest first, in at most three queries."""
    nodes = {node.pk: node for node in visible_nodes(requester).exclude(state=NodeState.ENROLLING.value)}
    gpus = Gpu.objects.filter(node_id__in=nodes, present=True)
    if gpus.count() > MAX_DRAWN_GPUS:
        return _summarize(gpus)
    starting = set(
        Allocation.objects.filter(
            ended_at__isnull=True, task__attempt__state=AttemptState.CONFIGURING.value
        ).values_list("gpu_id", flat=True)
    )
    strips: dict[tuple[str, int], GpuModelSummary] = {}
    rows: dict[tuple[str, int, int], NodeSummary] = {}
    places: Counter[int] = Counter()
    for gpu in sorted(gpu_display_rows(gpus), key=lambda gpu: (nodes[gpu.node_id].name, gpu.index)):
        node = nodes[gpu.node_id]
        strip = strips.setdefault((gpu.model, gpu.memory_mib), GpuModelSummary(gpu.model, gpu.memory_mib))
        key = (gpu.model, gpu.memory_mib, node.pk)
        if key not in rows:
            rows[key] = NodeSummary(node.name, node.public_id)
            strip.nodes.append(rows[key])
        square = build_square(gpu, node, starting=gpu.pk in starting, grid_index=places[node.pk])
        places[node.pk] += 1
        strip.pools.add(node.pool_id)
        rows[key].squares.append(square)
        strip.total += 1
        if square.shape == "free" and square.overlay != "away":
            strip.free += 1
            rows[key].free += 1
    for strip in strips.values():
        strip.largest_free = max(row.free for row in strip.nodes)
        strip.largest_node = max(len(row.squares) for row in strip.nodes)
    return sorted(strips.values(), key=lambda strip: (-strip.total, strip.model))


def build_square(
    gpu: Gpu | GpuDisplayRow,
    node: Node,
    *,
    starting: bool = False,
    grid_index: int | None = None,
) -> GpuSquare:
    """Return the drawing of one GPU.

    An allocated GPU is busy with unknown utilisation until a live sample arrives.

    With ``grid_index`` live samples address it by that, otherwise by its uuid.
    """
    if gpu.health != GpuHealth.OK.value:
        look, word = "failed", gpu.health
    elif starting:
        look, word = "starting", "starting"
    elif gpu.used_milli:
        look, word = "busy", f"{gpu.used_milli / 10:g} % allocated"
    elif gpu.foreign_process_owner:
        look, word = "drained", f"used by a process of {gpu.foreign_process_owner}"
    elif not node.accepts_work:
        look, word = "drained", f"node {'quarantined' if node.state == NodeState.READY.value else node.state}"
    else:
        look, word = "free", "free"
    overlay = "" if node.reachable else "away"
    if not overlay and gpu.simulated and look != "failed":  # keep the failed shape visible
        overlay = "sim"
    notes = [word, "" if node.reachable else "node unreachable", "simulated" if gpu.simulated else ""]
    title = f"{node.name} GPU {gpu.index}: {', '.join(filter(None, notes))}"
    level = 3 if look == "busy" else None
    return GpuSquare(gpu.uuid if grid_index is None else "", look, level, overlay, title, grid_index)


def _summarize(gpus: QuerySet[Gpu]) -> list[GpuModelSummary]:
    rows = (
        gpus.order_by()
        .values("model", "node_id", "node__pool_id")
        .annotate(
            all=Count("pk"), free=Count("pk", filter=ACCEPTS_WORK & Q(used_milli=0)), memory=Max("memory_mib")
        )
    )
    strips: dict[str, GpuModelSummary] = {}
    for row in rows:
        strip = strips.setdefault(row["model"], GpuModelSummary(row["model"], row["memory"]))
        strip.total += row["all"]
        strip.free += row["free"]
        strip.pools.add(row["node__pool_id"])
        strip.largest_free = max(strip.largest_free, row["free"])
        strip.largest_node = max(strip.largest_node, row["all"])
    return sorted(strips.values(), key=lambda strip: (-strip.total, strip.model))
