"""Reads how many GPUs are free on each node, for plans over several nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from portal.access import Requester, visible_nodes
from portal.domain.scheduling.throughput import joined_models
from portal.domain.states import GpuState
from portal.models import Gpu, GpuLink, Node, NodePool, PipelinePlan, Topology
from portal.selectors.nodes.gpu_states import COUNTED_GPU, with_state


@dataclass(frozen=True)
class FreeNode:
    """A node with free whole GPUs; ``has_nvlink`` if any two of its GPUs are connected by NVLink.

    ``path`` are its domains in the first topology by name, outermost first.
    """

    name: str
    pool: str
    pool_id: int
    gpu_model: str
    memory_mib: int
    free: int
    has_nvlink: bool
    path: tuple[str, ...] = ()
    slow_network: bool = False


def free_nodes(requester: Requester) -> list[FreeNode]:
    """Return the nodes with free whole GPUs, the most first. Four queries."""
    gpus = Gpu.objects.filter(COUNTED_GPU, node__in=visible_nodes(requester), mig_profile="")
    rows = with_state(gpus).filter(state=GpuState.FREE.value).values_list("node_id", "model", "memory_mib")
    nvlink = set(GpuLink.objects.filter(kind="nvlink").values_list("gpu_a__node_id", flat=True).distinct())
    topology = Topology.objects.order_by("name").first()
    levels = topology.levels if topology else []
    by_node: dict[int, list[tuple[str, int]]] = {}
    for node_id, model, memory_mib in rows:
        by_node.setdefault(node_id, []).append((model, memory_mib))
    nodes = Node.objects.filter(pk__in=by_node).values_list(
        "pk", "name", "pool__name", "pool_id", "labels", "slow_network"
    )
    found = []
    for pk, name, pool, pool_id, labels, slow_network in nodes:
        on_node = by_node[pk]
        path = tuple(takewhile(bool, (labels.get(level, "") for level in levels)))
        found.append(
            FreeNode(
                name, pool, pool_id, joined_models(model for model, _ in on_node),
                min(memory for _, memory in on_node), len(on_node), pk in nvlink, path, slow_network,
            )
        )  # fmt: skip
    return sorted(found, key=lambda one: (-one.free, one.name))


def fitting_nodes(nodes: Iterable[FreeNode], pool_id: int | None, gpus_per_node: int) -> list[FreeNode]:
    """Return the nodes of the pool (None: any) with enough free GPUs."""
    return [one for one in nodes if one.free >= gpus_per_node and pool_id in (None, one.pool_id)]


def plan_nodes(requester: Requester, plan: PipelinePlan) -> list[FreeNode]:
    """Return nodes with enough free GPUs for a plan, in its order; fewer if there are not enough. Four queries.

    They are in the smallest domain of a pool's topology that has enough, without nodes of a slow network if
    there are others. Neighbours in the domain are neighbours in the plan.
    """
    fitting, count = fitting_nodes(free_nodes(requester), plan.pool_id, plan.gpus_per_node), plan.nodes
    for rows in ([one for one in fitting if not one.slow_network], fitting):
        domains: dict[tuple[int, tuple[str, ...]], list[FreeNode]] = {}
        for one in rows:
            for depth in range(len(one.path) + 1):
                domains.setdefault((one.pool_id, one.path[:depth]), []).append(one)
        enough = [key for key, members in domains.items() if len(members) >= count]
        if enough:
            nearest = min(enough, key=lambda key: (-len(key[1]), len(domains[key]), key))
            return sorted(domains[nearest], key=lambda one: (one.path, one.name))[:count]
    return fitting if plan.pool_id is not None else []


def pool_gpu_memory_mib(pool: NodePool) -> int | None:
    """Return the memory of the pool's smallest whole GPU; None if it has none."""
    gpus = Gpu.objects.filter(COUNTED_GPU, node__pool=pool, mig_profile="").order_by("memory_mib")
    return gpus.values_list("memory_mib", flat=True).first()
