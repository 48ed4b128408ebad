"""Measured bandwidths of the network between nodes, as a matrix for each pool."""

from __future__ import annotations

import datetime as dt
import statistics
from dataclasses import dataclass

from django.db.models import QuerySet

from portal.access import visible_nodes
from portal.domain.nodes.node_links import LinkBandwidth, slow_below_mib_per_s
from portal.models import Node, NodeLink, NodePool, User

MAX_MATRIX_NODES = 64
"""Nodes shown in one matrix: those measured last."""


def measured_links(*, since: dt.datetime) -> list[LinkBandwidth]:
    rows = NodeLink.objects.filter(measured_at__gt=since)
    return [LinkBandwidth(*row) for row in rows.values_list("node_a_id", "node_b_id", "mib_per_s")]


def visible_links(user: User) -> QuerySet[NodeLink]:
    """Return the links between nodes that a user may see, newest first."""
    nodes = visible_nodes(user).values("pk")
    rows = NodeLink.objects.filter(node_a__in=nodes, node_b__in=nodes)
    return rows.select_related("node_a__pool", "node_b").order_by("-measured_at", "pk")


def slowest_link_bandwidth(pool: NodePool) -> float | None:
    """Return the lowest measured bandwidth between two nodes of a pool, bytes per second; None if unmeasured."""
    links = NodeLink.objects.filter(node_a__pool=pool, node_b__pool=pool).order_by("mib_per_s")
    mib_per_s = links.values_list("mib_per_s", flat=True).first()
    return mib_per_s * 1024 * 1024 if mib_per_s else None


@dataclass(frozen=True)
class LinkCell:
    """A pair of nodes: its link, None if not measured, and how it compares with the pool."""

    link: NodeLink | None
    is_slow: bool = False
    is_fast: bool = False


@dataclass(frozen=True)
class LinkMatrix:
    """The measured nodes of a pool by name; ``rows[i][j]`` is the cell of nodes i and j, None for i = j."""

    pool: str
    nodes: list[Node]
    rows: list[tuple[Node, list[LinkCell | None]]]
    median_mib_per_s: float
    slow_below_mib_per_s: float


def link_matrices(user: User) -> list[LinkMatrix]:
    """Return a matrix for each pool with measured links, by name; two queries."""
    by_pool: dict[str, list[NodeLink]] = {}
    for link in visible_links(user):
        if link.node_a.pool_id == link.node_b.pool_id:
            by_pool.setdefault(link.node_a.pool.name, []).append(link)
    return [_matrix(pool, links) for pool, links in sorted(by_pool.items())]


def _matrix(pool: str, links: list[NodeLink]) -> LinkMatrix:
    measured = {node.pk: node for link in links for node in (link.node_a, link.node_b)}
    nodes = sorted(list(measured.values())[:MAX_MATRIX_NODES], key=lambda node: node.name)
    by_pair = {frozenset((link.node_a_id, link.node_b_id)): link for link in links}
    below = slow_below_mib_per_s(
        LinkBandwidth(link.node_a_id, link.node_b_id, link.mib_per_s) for link in links
    )
    median = statistics.median(link.mib_per_s for link in links)

    def cell(one: Node, other: Node) -> LinkCell | None:
        if one == other:
            return None
        link = by_pair.get(frozenset((one.pk, other.pk)))
        if link is None:
            return LinkCell(None)
        return LinkCell(link, link.mib_per_s < below, link.mib_per_s >= median)

    rows = [(one, [cell(one, other) for other in nodes]) for one in nodes]
    return LinkMatrix(pool, nodes, rows, median, below)
