"""Reads what one user could get now by GPU model, and each GPU as a square."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from portal.access import Requester, require_user, visible_nodes
from portal.domain.jobs.feasibility import accepts_gpu_model
from portal.domain.states import AttemptState, GpuHealth, GpuState, NodeState
from portal.models import Allocation, Gpu, Node
from portal.selectors.nodes.gpu_states import COUNTED_GPU, gpu_state_label, with_state
from portal.selectors.nodes.node_groups import NodeGroup, node_groups
from portal.selectors.projects.quota_usage import QuotaUsage, user_quota_usage
from portal.selectors.scheduling.reservations import nodes_reserved_for_others

MAX_DRAWN_GPUS = 256
"""With more GPUs the summary shows numbers without squares; the cluster page draws all."""


_HEALTHY = GpuHealth.OK.value  # read for each GPU; ``value`` is slow


@dataclass(frozen=True, slots=True)
class GpuDisplayRow:
    """The columns needed to draw a GPU: thousands are read at once, without model instances."""

    pk: int
    node_id: int
    uuid: str
    index: int
    model: str
    memory_mib: int
    mig_profile: str
    health: str
    used_milli: int
    simulated: bool
    health_reason: str
    foreign_process_owner: str
    state: str
    """``GpuState``."""


def gpu_display_rows(gpus: QuerySet[Gpu]) -> Iterator[GpuDisplayRow]:
    """Yield the rows of a query, in one query."""
    return starmap(GpuDisplayRow, with_state(gpus).values_list(*GpuDisplayRow.__slots__))


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
    state: str = GpuState.HELD.value


@dataclass
class NodeSummary:
    name: str
    public_id: str
    squares: list[GpuSquare] = field(default_factory=list)
    free: int = 0
    """GPUs that the reader could get, apart from quotas."""
    reserved_for_user: int = 0

    @property
    def accessible_label(self) -> str:
        """Text for screen readers, such as h200-3: 6 held, 2 free."""
        count = Counter(gpu_state_label(square.state) for square in self.squares)
        return f"{self.name}: " + ", ".join(f"{n} {state}" for state, n in count.items())


FreeGpuRow = tuple[int, int, int]
"""A number of free GPUs, the nodes that have so many, and these in percent of all."""


def free_gpu_rows(nodes_by_free: Mapping[int, int]) -> list[FreeGpuRow]:
    """Return a row for each number of free GPUs, most first."""
    counted = sum(nodes_by_free.values())
    return [
        (free, nodes, round(100 * nodes / counted))
        for free, nodes in sorted(nodes_by_free.items(), reverse=True)
    ]


@dataclass
class GpuModelSummary:
    """A GPU model, or its slices of one MIG profile: how many there are, and how many one user could get now.

    ``free`` counts the GPUs that the user could get now: those in the state free and those reserved for the user
    (``reserved_for_user``), within the user's quotas; ``beyond_quota`` those that only a quota keeps from the user.
    ``largest_free`` is the most on one node. ``nodes_by_free`` counts nodes by the number of these GPUs, without
    regard to quotas.
    """

    model: str
    memory_mib: int
    mig_profile: str = ""
    total: int = 0
    free: int = 0
    largest_free: int = 0
    nodes: list[NodeSummary] = field(default_factory=list)
    pools: set[int] = field(default_factory=set)
    largest_node: int = 0
    beyond_quota: int = 0
    reserved_for_user: int = 0
    nodes_by_free: Counter[int] = field(default_factory=Counter)
    free_by_pool: Counter[int] = field(default_factory=Counter)
    """Free GPUs by pool (id), without regard to quotas."""

    def add_nodes(
        self, nodes: int, pool: int, total: int, free: int, allowed: int | None, reserved_for_user: int = 0
    ) -> None:
        """Count the GPUs of equal nodes; ``free`` includes those reserved for the user.

        ``allowed`` is what the quotas of their pool leave, None without limit.
        """
        self.pools.add(pool)
        self.reserved_for_user += nodes * reserved_for_user
        self.total += nodes * total
        self.largest_node = max(self.largest_node, total)
        self.nodes_by_free[free] += nodes
        before = self.free_by_pool[pool]
        within = nodes * free if allowed is None else max(0, min(nodes * free, allowed - before))
        self.free_by_pool[pool] += nodes * free
        self.free += within
        self.beyond_quota += nodes * free - within
        self.largest_free = max(self.largest_free, free if allowed is None else min(free, allowed))

    @property
    def histogram(self) -> list[FreeGpuRow]:
        return free_gpu_rows(self.nodes_by_free)

    @property
    def message(self) -> str:
        """What could start now."""
        if self.free == 0:
            message = _("None is free for you now; new jobs wait in the queue.")
        elif self.mig_profile:
            message = _("Up to {count} slices on one node.").format(count=self.largest_free)
        elif self.largest_free == 1:
            message = _("Any job with 1 GPU per node starts now.")
        else:
            message = _("Up to {count} on one node. Any job of up to {count} GPUs fits now.").format(
                count=self.largest_free
            )
        if self.beyond_quota:
            beyond = _("{count} more are free, but beyond your quota.").format(count=self.beyond_quota)
            return f"{message} {beyond}"
        return message


def matching_summaries(
    summaries: Sequence[GpuModelSummary], gpu_model: str, mig_profile: str
) -> list[GpuModelSummary]:
    """Return the GPUs that a request accepts: of this model (blank: any) and MIG profile (blank: whole GPUs)."""
    return [
        each
        for each in summaries
        if each.mig_profile == mig_profile and accepts_gpu_model(gpu_model, each.model)
    ]


def free_capacity(requester: Requester, shares: Sequence[QuotaUsage] | None = None) -> list[GpuModelSummary]:
    """Return the GPU models of the cluster, largest first, with what the user could get now.

    At most five queries besides those of ``shares``, which are the quotas of the projects in question, by default
    of all projects of the user.
    """
    user = require_user(requester)
    if shares is None:
        shares = user_quota_usage(user)
    reserved = nodes_reserved_for_others(user, {share.project.pk for share in shares})
    allowed = _allowed_gpus(shares)
    groups = node_groups(requester, reserved)
    if sum(each.nodes * each.gpus for each in groups) > MAX_DRAWN_GPUS:
        return _summarize(groups, allowed)
    visible = visible_nodes(requester)
    gpus = Gpu.objects.filter(COUNTED_GPU, node__in=visible)
    nodes = {node.pk: node for node in visible}
    starting = set(
        Allocation.objects.filter(
            ended_at__isnull=True, task__attempt__state=AttemptState.CONFIGURING.value
        ).values_list("gpu_id", flat=True)
    )
    strips: dict[tuple[str, str, int], GpuModelSummary] = {}
    rows: dict[tuple[tuple[str, str, int], int], NodeSummary] = {}
    places: Counter[int] = Counter()
    for gpu in sorted(gpu_display_rows(gpus), key=lambda gpu: (nodes[gpu.node_id].name, gpu.index)):
        node = nodes[gpu.node_id]
        kind = (gpu.model, gpu.mig_profile, gpu.memory_mib)
        strip = strips.setdefault(kind, GpuModelSummary(gpu.model, gpu.memory_mib, gpu.mig_profile))
        key = (kind, node.pk)
        if key not in rows:
            rows[key] = NodeSummary(node.name, node.public_id)
            strip.nodes.append(rows[key])
        square = build_square(
            gpu,
            node,
            starting=gpu.pk in starting,
            grid_index=places[node.pk],
            reserved_for_others=node.pk in reserved,
        )
        places[node.pk] += 1
        rows[key].squares.append(square)
        if gpu.state == GpuState.FREE or (gpu.state == GpuState.RESERVED and node.pk not in reserved):
            rows[key].free += 1
            rows[key].reserved_for_user += gpu.state == GpuState.RESERVED
    for (kind, node_id), row in rows.items():
        pool = nodes[node_id].pool_id
        strips[kind].add_nodes(1, pool, len(row.squares), row.free, allowed.get(pool), row.reserved_for_user)
    return _largest_first(strips.values())


def _largest_first(strips: Iterable[GpuModelSummary]) -> list[GpuModelSummary]:
    return sorted(strips, key=lambda strip: (-strip.total, strip.model, strip.mig_profile))


def _allowed_gpus(shares: Sequence[QuotaUsage]) -> dict[int, int]:
    """Return how many whole GPUs the quotas leave in each pool (id) to the least limited of the projects."""
    found: dict[int, int | None] = {}
    for share in shares:
        left = None if share.startable_milli is None else share.startable_milli // 1000
        known = found.get(share.pool.pk, 0)
        found[share.pool.pk] = None if left is None or known is None else max(known, left)
    return {pool: left for pool, left in found.items() if left is not None}


def build_square(
    gpu: Gpu | GpuDisplayRow,
    node: Node,
    *,
    state: str | None = None,
    starting: bool = False,
    grid_index: int | None = None,
    reserved_for_others: bool | None = None,
) -> GpuSquare:
    """Return the drawing of one GPU, whose state is ``state`` if it is not a column of ``gpu``.

    A held GPU is busy with unknown utilisation until a live sample arrives.

    ``reserved_for_others`` applies to a reserved GPU; None does not say for whom. With ``grid_index`` live samples
    address it by that, otherwise by its uuid.
    """
    state = state or str(getattr(gpu, "state"))  # noqa: B009 - an annotation
    if gpu.health != _HEALTHY:
        look, word = "failed", _(gpu.health)
    elif starting:
        look, word = "starting", _("starting")
    elif state == GpuState.HELD:
        look, word = "busy", _("{used_milli:g} % allocated").format(used_milli=gpu.used_milli / 10)
    elif state == GpuState.UNREACHABLE:
        look, word = "free", ""
    elif state == GpuState.UNHEALTHY:
        look, word = (
            "drained",
            _("used by a process of {foreign_process_owner}").format(
                foreign_process_owner=gpu.foreign_process_owner
            ),
        )
    elif state == GpuState.DRAINED:
        node_state = _("quarantined") if node.state == NodeState.READY.value else _(node.state)
        look, word = "drained", _("node {state}").format(state=node_state)
    elif state == GpuState.RESERVED:
        if reserved_for_others is None:
            look, word = "drained", _("reserved")
        elif reserved_for_others:
            look, word = "drained", _("reserved for others")
        else:
            look, word = "free", _("reserved for your projects")
    else:
        look, word = "free", _("free")
    overlay = "" if node.reachable else "away"
    if not overlay and gpu.simulated and look != "failed":  # keep the failed shape visible
        overlay = "sim"
    notes = [word, "" if node.reachable else _("node unreachable"), _("simulated") if gpu.simulated else ""]
    title = f"{node.name} GPU {gpu.index}: {', '.join(filter(None, notes))}"
    level = 3 if look == "busy" else None
    return GpuSquare(gpu.uuid if grid_index is None else "", look, level, overlay, title, grid_index, state)


def _summarize(groups: Sequence[NodeGroup], allowed: Mapping[int, int]) -> list[GpuModelSummary]:
    strips: dict[tuple[str, str], GpuModelSummary] = {}
    for group in groups:
        strip = strips.setdefault(
            (group.model, group.mig_profile),
            GpuModelSummary(group.model, group.gpu_memory_mib, group.mig_profile),
        )
        strip.add_nodes(
            group.nodes,
            group.pool,
            group.gpus,
            group.free + group.reserved,
            allowed.get(group.pool),
            group.reserved,
        )
    return _largest_first(strips.values())
