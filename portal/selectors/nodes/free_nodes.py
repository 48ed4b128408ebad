"""Reads how many GPUs are free on each node, for plans over several nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from portal.access import Requester, visible_nodes
from portal.domain.throughput import joined_models
from portal.models import Gpu, GpuLink, NodePool
from portal.selectors.nodes.cluster_overview import ACCEPTS_WORK


@dataclass(frozen=True)
class FreeNode:
    """A node with free whole GPUs; ``has_nvlink`` if any two of its GPUs are connected by NVLink."""

    name: str
    pool: str
    pool_id: int
    gpu_model: str
    memory_mib: int
    free: int
    has_nvlink: bool


def free_nodes(requester: Requester) -> list[FreeNode]:
    """Return the nodes with free whole GPUs, the most first. Two queries."""
    rows = Gpu.objects.filter(
        ACCEPTS_WORK, node__in=visible_nodes(requester), present=True, used_milli=0, mig_profile=""
    ).values_list("node_id", "node__name", "node__pool__name", "node__pool_id", "model", "memory_mib")
    nvlink = set(GpuLink.objects.filter(kind="nvlink").values_list("gpu_a__node_id", flat=True).distinct())
    by_node: dict[int, list[tuple[str, str, int, str, int]]] = {}
    for node, name, pool, pool_id, model, memory_mib in rows:
        by_node.setdefault(node, []).append((name, pool, pool_id, model, memory_mib))
    found = []
    for node, gpus in by_node.items():
        name, pool, pool_id, *_ = gpus[0]
        models = joined_models(model for *_, model, _ in gpus)
        memory_mib = min(gpu[-1] for gpu in gpus)
        found.append(FreeNode(name, pool, pool_id, models, memory_mib, len(gpus), node in nvlink))
    return sorted(found, key=lambda one: (-one.free, one.name))


def fitting_nodes(nodes: Iterable[FreeNode], pool_id: int | None, gpus_per_node: int) -> list[FreeNode]:
    """Return the nodes of the pool (None: any) with enough free GPUs."""
    return [one for one in nodes if one.free >= gpus_per_node and pool_id in (None, one.pool_id)]


def pool_gpu_memory_mib(pool: NodePool) -> int | None:
    """Return the memory of the pool's smallest whole GPU; None if it has none."""
    gpus = Gpu.objects.filter(node__pool=pool, present=True, mig_profile="").order_by("memory_mib")
    return gpus.values_list("memory_mib", flat=True).first()
