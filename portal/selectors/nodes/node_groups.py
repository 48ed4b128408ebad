"""Reads the nodes in groups that are alike in their GPUs: a thousand nodes are a few rows."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from django.db import connection
from django.db.models import Count, Max, Q

from portal.access import Requester, visible_nodes
from portal.domain.states import GpuState
from portal.models import Gpu
from portal.request_cache import cached
from portal.selectors.nodes.gpu_states import COUNTED_GPU, gpu_state


class NodeGroup(NamedTuple):
    """Nodes of one pool in the same state with equal numbers of present GPUs, or of MIG slices, of one model.

    ``free`` and ``reserved`` are the GPUs of a node in that state, ``reserved`` without those that are reserved for
    others than the reader. CPU and memory are the least that a node has for each of its GPUs, also those of other
    models.
    """

    model: str
    pool: int
    pool_public_id: str
    state: str
    gpus: int
    free: int
    reserved: int
    nodes: int
    gpu_memory_mib: int
    cpu_milli_per_gpu: int
    memory_mib_per_gpu: int
    mig_profile: str
    """Blank for whole GPUs."""


def node_groups(requester: Requester, reserved: Collection[int] = ()) -> list[NodeGroup]:
    """Return the groups of all visible nodes, in one query; ``reserved`` are the nodes (ids) reserved for others."""
    nodes = frozenset(reserved)
    return cached(("node groups", nodes), lambda: _read_groups(requester, nodes))


def _read_groups(requester: Requester, reserved: frozenset[int]) -> list[NodeGroup]:
    open_to_reader = Q(state=GpuState.RESERVED.value)
    if reserved:
        open_to_reader &= ~Q(node__in=reserved)
    of_nodes = (
        Gpu.objects.filter(COUNTED_GPU, node__in=visible_nodes(requester))
        .annotate(state=gpu_state())
        .order_by()
        .values("model", "mig_profile", "node_id")
        .annotate(
            total=Count("pk"),
            free=Count("pk", filter=Q(state=GpuState.FREE.value)),
            reserved=Count("pk", filter=open_to_reader),
            memory=Max("memory_mib"),
        )
    )
    query, values = of_nodes.query.sql_with_params()
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            SELECT model, pool.id, pool.public_id, node.state, total, free, reserved, count(*)::int, max(memory),
                   min(node.cpu_milli / on_node), min(node.memory_mib / on_node), mig_profile
            FROM (SELECT *, (sum(total) OVER (PARTITION BY node_id))::bigint AS on_node FROM ({query}) model) kind
            JOIN portal_node node ON node.id = node_id JOIN portal_nodepool pool ON pool.id = node.pool_id
            GROUP BY 1, 2, 3, 4, 5, 6, 7, 12 ORDER BY 1, 12, 2, 4, 5, 6, 7
            """,  # noqa: S608 - only a query of Django is interpolated
            values,
        )
        return list(map(NodeGroup._make, cursor.fetchall()))
