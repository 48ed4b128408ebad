"""Reads the nodes in groups that are alike in their GPUs: a thousand nodes are a few rows."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from django.db import connection
from django.db.models import Count, Max, Q

from portal.access import Requester, visible_nodes
from portal.domain.node_breaker import BreakerState
from portal.domain.states import GpuHealth, NodeState
from portal.models import Gpu
from portal.request_cache import cached


class NodeGroup(NamedTuple):
    """Nodes of one pool in the same state with equal numbers of present GPUs of one model.

    ``free`` GPUs of a node accept work and are not allocated. CPU and memory are the least that a node has for each
    of its GPUs, also those of other models.
    """

    model: str
    pool: int
    pool_public_id: str
    state: str
    gpus: int
    free: int
    nodes: int
    gpu_memory_mib: int
    cpu_milli_per_gpu: int
    memory_mib_per_gpu: int


def accepts_work(gpu: str, node: str) -> Q:
    """Select GPUs that accept work if they are not allocated; the arguments are prefixes of the columns."""
    states = {
        f"{gpu}health": GpuHealth.OK.value,
        f"{gpu}foreign_process_owner": "",
        f"{node}state": NodeState.READY.value,
        f"{node}reachable": True,
    }
    probation = {
        f"{node}breaker_state": BreakerState.PROBATION.value,
        f"{node}probation_attempt__isnull": True,
    }
    return Q(Q(**{f"{node}breaker_state": BreakerState.HEALTHY.value}) | Q(**probation), **states)


ACCEPTS_WORK = accepts_work(gpu="", node="node__")


def node_groups(requester: Requester, reserved: Collection[int] = ()) -> list[NodeGroup]:
    """Return the groups of all visible nodes, in one query; the GPUs of ``reserved`` nodes (ids) are not free."""
    nodes = frozenset(reserved)
    return cached(("node groups", nodes), lambda: _read_groups(requester, nodes))


def _read_groups(requester: Requester, reserved: frozenset[int]) -> list[NodeGroup]:
    usable = ACCEPTS_WORK & Q(used_milli=0)
    if reserved:
        usable &= ~Q(node__in=reserved)
    of_nodes = (
        Gpu.objects.filter(node__in=visible_nodes(requester), present=True)
        .order_by()
        .values("model", "node_id")
        .annotate(total=Count("pk"), free=Count("pk", filter=usable), memory=Max("memory_mib"))
    )
    query, values = of_nodes.query.sql_with_params()
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            SELECT model, pool.id, pool.public_id, state, total, free, count(*)::int, max(memory),
                   min(node.cpu_milli / on_node), min(node.memory_mib / on_node)
            FROM (SELECT *, (sum(total) OVER (PARTITION BY node_id))::bigint AS on_node FROM ({query}) model) kind
            JOIN portal_node node ON node.id = node_id JOIN portal_nodepool pool ON pool.id = node.pool_id
            GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 4, 5, 6
            """,  # noqa: S608 - only a query of Django is interpolated
            values,
        )
        return list(map(NodeGroup._make, cursor.fetchall()))
