"""Stores measured bandwidths of the network between nodes, and marks nodes whose network is slow."""

from __future__ import annotations

import datetime as dt

from django.db import transaction
from django.utils import timezone

from portal.domain.nodes.node_links import LinkBandwidth, slow_nodes
from portal.live_events import publish_on_commit
from portal.models import Node, NodeLink
from portal.outbox import trigger_cycle
from portal.selectors.nodes.network_links import measured_links

SLOW_FOR = dt.timedelta(hours=24)
"""Age up to which a measurement marks a node as slow, so that an avoided node is tried and measured again."""


def record_link(node: Node, peer: Node, *, mib_per_s: float, connect_ms: float | None) -> None:
    """Store the newest measurement of two nodes of one pool."""
    node_a, node_b = sorted((node.pk, peer.pk))
    with transaction.atomic():
        NodeLink.objects.update_or_create(
            node_a_id=node_a,
            node_b_id=node_b,
            defaults={"mib_per_s": mib_per_s, "connect_ms": connect_ms, "measured_at": timezone.now()},
        )
        update_slow_nodes(node.pool_id)


def update_slow_nodes(pool_id: int | None = None) -> None:
    """Mark the nodes of a pool, or of all pools, whose network is slow by the measurements of the last day."""
    recent = measured_links(since=timezone.now() - SLOW_FOR)
    with transaction.atomic():
        nodes = Node.objects.all() if pool_id is None else Node.objects.filter(pool=pool_id)
        pool_of = dict(nodes.values_list("pk", "pool_id"))
        by_pool: dict[int, list[LinkBandwidth]] = {}
        for link in recent:
            pool = pool_of.get(link.node_a)
            if pool is not None and pool == pool_of.get(link.node_b):
                by_pool.setdefault(pool, []).append(link)
        slow = {node for links in by_pool.values() for node in slow_nodes(links)}
        changed = nodes.filter(pk__in=slow, slow_network=False).update(slow_network=True)
        changed += nodes.filter(slow_network=True).exclude(pk__in=slow).update(slow_network=False)
        if changed:
            publish_on_commit("cluster", {"kind": "network"})
            trigger_cycle("nodes")
