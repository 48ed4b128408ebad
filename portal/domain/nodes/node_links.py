"""Which network links between nodes, and which nodes, are slow compared with the others of their pool."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

SLOW_RATIO = 0.5
"""A link is slow below this fraction of the median of its pool."""
MIN_LINKS = 2
"""Links of a pool that must be measured before one of them counts as slow."""


@dataclass(frozen=True, slots=True)
class LinkBandwidth:
    """The measured bandwidth of one TCP stream between two nodes, given by primary key."""

    node_a: int
    node_b: int
    mib_per_s: float


def slow_below_mib_per_s(links: Iterable[LinkBandwidth]) -> float:
    """Return the bandwidth below which a link of these is slow; 0 with fewer than ``MIN_LINKS``."""
    measured = [link.mib_per_s for link in links]
    return SLOW_RATIO * statistics.median(measured) if len(measured) >= MIN_LINKS else 0.0


def slow_nodes(links: Iterable[LinkBandwidth]) -> frozenset[int]:
    """Return the nodes of a pool all of whose links are slow, while the other end has a link that is not."""
    links = list(links)
    below = slow_below_mib_per_s(links)
    peers: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    for link in links:
        is_slow = link.mib_per_s < below
        peers[link.node_a].append((link.node_b, is_slow))
        peers[link.node_b].append((link.node_a, is_slow))
    all_slow = {node for node, ends in peers.items() if all(is_slow for _, is_slow in ends)}
    return frozenset(node for node in all_slow if any(other not in all_slow for other, _ in peers[node]))
