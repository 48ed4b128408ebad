"""Reads a page of the cluster map: GPU squares, holders and problems of its nodes, and the totals of all nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from django.db.models import Case, Count, IntegerField, Q, QuerySet, Sum, Value, When, Window
from django.db.models.functions import Coalesce, RowNumber
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from portal.access import Requester, visible_nodes
from portal.domain.formatting import short_gpu_model
from portal.domain.nodes.node_breaker import MAX_CLOCK_SKEW_S, BreakerState
from portal.domain.states import AttemptState, GpuHealth, NodeState
from portal.hidden_fields import HIDDEN_PROJECT_NAME, visibility_of
from portal.models import Allocation, Gpu, Node, Task
from portal.selectors.cluster.cluster_overview import GpuDisplayRow, GpuSquare, build_square, gpu_display_rows
from portal.selectors.nodes.agent_version import bundled_agent_digest, has_newer_agent_for
from portal.selectors.nodes.gpu_states import GpuCounts, count_gpus


@dataclass(frozen=True)
class HolderSpan:
    """Adjacent GPUs with the same holder; ``name`` is empty if they are free.

    ``job`` is empty if the user may not see it.
    """

    name: str
    job: str
    count: int


class GpuHolder(NamedTuple):
    """What holds a GPU; ``job`` is its public id, empty if the user may not see it."""

    name: str = ""
    job: str = ""
    is_starting: bool = False


_NO_HOLDER = GpuHolder()
_HEALTHY, _BREAKER_HEALTHY = GpuHealth.OK.value, BreakerState.HEALTHY.value  # read often; ``value`` is slow


@dataclass
class NodeBox:
    """A node of the map."""

    node: Node
    holders: Mapping[int, GpuHolder]
    """By GPU id, of all nodes that are read."""
    gpus: list[GpuDisplayRow] = field(default_factory=list)
    unhealthy: list[GpuDisplayRow] = field(default_factory=list)
    """GPUs that are lost, quarantined, have a warning or run a foreign process."""

    @cached_property
    def counts(self) -> GpuCounts:
        return GpuCounts(**Counter(gpu.state for gpu in self.gpus))

    @cached_property
    def squares(self) -> list[GpuSquare]:
        return [
            build_square(gpu, self.node, starting=self._holder(gpu).is_starting, grid_index=at)
            for at, gpu in enumerate(self.gpus)
        ]

    @cached_property
    def holder_spans(self) -> list[HolderSpan]:
        runs = groupby(self._holder(gpu)[:2] for gpu in self.gpus)
        return [HolderSpan(name, job, len(list(run))) for (name, job), run in runs]

    @cached_property
    def models(self) -> str:
        return ", ".join(sorted({short_gpu_model(gpu.model) for gpu in self.gpus}))

    @property
    def jobs(self) -> int:
        return len({self._holder(gpu).job for gpu in self.gpus} - {""})

    def _holder(self, gpu: GpuDisplayRow) -> GpuHolder:
        return self.holders.get(gpu.pk, _NO_HOLDER)

    @property
    def version_warnings(self) -> int:
        return len(self.node.agent_info.get("version_warnings", ()))

    @property
    def has_newer_agent(self) -> bool:
        return has_newer_agent_for(self.node)

    @property
    def state_icon(self) -> str:
        return self._state[0]

    @property
    def state_label(self) -> str:
        return self._state[1]

    @cached_property
    def _state(self) -> tuple[str, str]:
        """Icon and label."""
        node, health = self.node, Counter(gpu.health for gpu in self.gpus)
        if not node.reachable:
            enrolling = node.state == NodeState.ENROLLING.value
            return "unreachable", _("Not connected yet") if enrolling else _("Unreachable")
        if lost := health[GpuHealth.LOST.value]:
            return "failed", ngettext("{count} GPU lost", "{count} GPUs lost", lost).format(count=lost)
        if quarantined := health[GpuHealth.QUARANTINED.value]:
            text = ngettext("{count} GPU quarantined", "{count} GPUs quarantined", quarantined)
            return "failed", text.format(count=quarantined)
        if node.state == NodeState.DRAINED.value and self.jobs:
            return "stopped", _("Draining")
        if node.state != NodeState.READY.value:
            return "stopped", _(node.state.capitalize())
        if node.breaker_state != _BREAKER_HEALTHY:
            in_quarantine = node.breaker_state == BreakerState.QUARANTINED.value
            return "warning", _("Quarantined") if in_quarantine else _("On probation")
        return ("simulated", _("Simulated")) if node.simulated else ("done", _("Healthy"))

    @property
    def problem(self) -> str:
        """Known problems, as sentences; blank if none."""
        messages = (self.node.status_message, self.node.breaker_message, clock_skew_message(self.node))
        return " ".join(filter(None, messages))

    @property
    def accessible_label(self) -> str:
        """Text of the squares for screen readers."""
        held = ", ".join(
            _("{count} by {name}").format(count=hold.count, name=hold.name)
            for hold in self.holder_spans
            if hold.name
        )
        text = (
            _("{node}: {gpus} GPUs, {free} free, held {held}")
            if held
            else _("{node}: {gpus} GPUs, {free} free")
        )
        return text.format(node=self.node.name, gpus=len(self.gpus), free=self.counts.free, held=held)


@dataclass(frozen=True)
class ClusterTotals:
    """Counts of the nodes that match, and of their GPUs. ``outdated`` nodes answer and run an older agent."""

    nodes: int
    outdated: int
    gpus: GpuCounts


def matching_nodes(requester: Requester, search: str) -> QuerySet[Node]:
    """Return the visible nodes; with a search those with it in their name, pool, GPU model or a job that is named."""
    nodes = visible_nodes(requester)
    if not search:
        return nodes
    models = Gpu.objects.filter(present=True, model__icontains=search)
    held = Allocation.objects.filter(ended_at__isnull=True, gpu__present=True)
    named, projects = Q(task__attempt__job__name__icontains=search), visibility_of(requester).projects
    if projects is not None:
        named &= Q(task__attempt__job__project__in=projects)
        if search in HIDDEN_PROJECT_NAME:
            named |= ~Q(task__attempt__job__project__in=projects)
    return nodes.filter(
        Q(name__contains=search)
        | Q(pool__name__contains=search)
        | Q(pk__in=models.values("node_id"))
        | Q(pk__in=held.filter(named).values("gpu__node_id"))
    )


def cluster_totals(nodes: QuerySet[Node]) -> ClusterTotals:
    """Return the totals of these nodes, in two queries."""
    old_agent = Case(
        When(Q(reachable=False) | Q(agent_info={}), then=0),
        When(agent_info__agent_digest=bundled_agent_digest(), then=0),
        default=1,
        output_field=IntegerField(),
    )
    outdated = old_agent if bundled_agent_digest() else Value(0)
    sums = nodes.order_by().aggregate(nodes=Count("pk"), outdated=Coalesce(Sum(outdated), 0))
    return ClusterTotals(**sums, gpus=count_gpus(Gpu.objects.filter(node__in=nodes.order_by())))


def map_boxes(
    requester: Requester, nodes: QuerySet[Node], first: int, last: int
) -> tuple[list[NodeBox], list[NodeBox]]:
    """Return the nodes from number ``first`` to ``last`` by pool and name, and all nodes that need attention."""
    gpus = Gpu.objects.filter(present=True)
    unhealthy = gpus.exclude(health=_HEALTHY, foreign_process_owner="", health_reason="")
    attention = (
        Q(reachable=False)
        | ~Q(status_message="")
        | ~Q(breaker_message="")
        | Q(clock_skew_s__gt=MAX_CLOCK_SKEW_S)
        | Q(clock_skew_s__lt=-MAX_CLOCK_SKEW_S)
        | Q(pk__in=unhealthy.values("node_id"))
    )
    order = ("pool__name", "name")
    rows = list(
        nodes.select_related("pool")
        .annotate(
            number=Window(RowNumber(), order_by=order),
            needs_attention=Case(When(attention, then=True), default=False),
        )
        .filter(Q(number__range=(first, last)) | Q(needs_attention=True))
        .order_by(*order)
    )
    boxes = node_boxes(requester, rows)
    page = [box for row, box in zip(rows, boxes, strict=True) if first <= row.number <= last]
    return page, [box for row, box in zip(rows, boxes, strict=True) if row.needs_attention]


def node_boxes(requester: Requester, nodes: Sequence[Node]) -> list[NodeBox]:
    """Return these nodes, whose pools are joined, in two queries plus permissions."""
    holders = _gpu_holders(requester, nodes)
    boxes = {node.pk: NodeBox(node, holders) for node in nodes}
    here = Gpu.objects.filter(node__in=boxes, present=True)
    for gpu in gpu_display_rows(here.order_by("node_id", "index")):
        box = boxes[gpu.node_id]
        box.gpus.append(gpu)
        if gpu.health != _HEALTHY or gpu.foreign_process_owner or gpu.health_reason:
            box.unhealthy.append(gpu)
    return list(boxes.values())


def clock_skew_message(node: Node) -> str:
    """Return a message if the node's clock differs too much from the portal's, else blank."""
    skew_s = node.clock_skew_s
    if skew_s is None or abs(skew_s) <= MAX_CLOCK_SKEW_S:
        return ""
    text = (
        _("Its clock is {skew} s ahead of the portal's.")
        if skew_s > 0
        else _("Its clock is {skew} s behind the portal's.")
    )
    return text.format(skew=f"{abs(skew_s):.1f}")


def _gpu_holders(requester: Requester, nodes: Sequence[Node]) -> dict[int, GpuHolder]:
    """Return what holds each GPU of these nodes, by its id."""
    visibility = visibility_of(requester)
    rows = Allocation.objects.filter(ended_at__isnull=True, gpu__node__in=nodes).values_list(
        "gpu_id",
        "task__attempt__job__name",
        "task__attempt__job__public_id",
        "task__attempt__job__project_id",
        "task__attempt__state",
    )
    configuring = AttemptState.CONFIGURING.value
    return {
        gpu: GpuHolder(name, public_id, state == configuring)
        if visibility.can_name_project(project)
        else GpuHolder(HIDDEN_PROJECT_NAME, "", state == configuring)
        for gpu, name, public_id, project, state in rows
    }


def node_tasks(requester: Requester, node: Node) -> list[Task]:
    """Return the tasks that hold resources of a node, each with ``seen`` (whether its job may be named)."""
    visibility = visibility_of(requester)
    rows = list(
        Task.objects.filter(node=node, container_removed=False)
        .select_related("attempt__job__project", "attempt__job__owner")
        .prefetch_related("allocations__gpu")
        .order_by("attempt_id", "rank")
    )
    for row in rows:
        row.seen = visibility.can_name_job(row.attempt.job)  # type: ignore[attr-defined]
        row.project_name = visibility.project_name(row.attempt.job.project)  # type: ignore[attr-defined]
        row.gpu_names = ", ".join(str(a.gpu.index) for a in row.allocations.all() if a.ended_at is None)  # type: ignore[attr-defined]
    return rows
