"""Reads topologies and how the labels of nodes fill them, and the links between the GPUs of a node."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from django.db.models import QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.access import Requester, visible_nodes
from portal.models import GpuLink, Node, Topology
from portal.selectors.lookup import get_by_key


@dataclass(frozen=True)
class TopologyLevel:
    key: str
    domains: int
    nodes: int


def list_topologies(requester: Requester) -> QuerySet[Topology]:
    """Return all topologies by name; users who may see nodes may see topologies."""
    visible_nodes(requester)
    return Topology.objects.order_by("name", "id")


def get_topology(requester: Requester, key: str) -> Topology:
    return get_by_key(list_topologies(requester), key, _("There is no such topology."))


def labelled_node_counter(requester: Requester) -> Callable[[Topology], int]:
    """Return a function that counts the nodes within a topology; one query for all topologies."""
    levels = topology_level_reader(requester)
    return lambda row: levels(row)[0].nodes


def topology_level_reader(requester: Requester) -> Callable[[Topology], list[TopologyLevel]]:
    """Return a function that counts domains and nodes of each level; one query for all topologies."""
    labels = list(visible_nodes(requester).values_list("labels", flat=True))

    def levels(row: Topology) -> list[TopologyLevel]:
        paths: list[tuple[str, ...] | None] = [() for _ in labels]
        found = []
        for key in row.levels:
            paths = [
                (*path, each[key]) if path is not None and key in each else None
                for path, each in zip(paths, labels, strict=True)
            ]
            counted = Counter(path for path in paths if path is not None)
            found.append(TopologyLevel(key, len(counted), counted.total()))
        return found

    return levels


# -- links between GPUs ----------------------------------------------------------------------------

LINK_LEVEL_LABELS = {
    "internal": gettext_noop("same board"),
    "single": gettext_noop("one switch"),
    "multiple": gettext_noop("several switches"),
    "hostbridge": gettext_noop("one host bridge"),
    "node": gettext_noop("one NUMA node"),
    "system": gettext_noop("across NUMA nodes"),
}
"""Labels of PCIe levels at which two GPUs connect, nearest first."""


@dataclass(frozen=True)
class GpuLinkRow:
    """A GPU and its link to each GPU in column order; blank for itself."""

    index: int
    cells: tuple[str, ...]


def gpu_link_matrix(node: Node) -> list[GpuLinkRow]:
    """Return a row and a column for each GPU with a known link; empty if there are none. One query."""
    known = GpuLink.objects.filter(gpu_a__node=node, gpu_b__present=True, gpu_a__present=True)
    words: dict[tuple[int, int], list[str]] = defaultdict(list)
    for kind, one, other, lines, level in known.order_by("kind").values_list(
        "kind", "gpu_a__index", "gpu_b__index", "nvlink_count", "level"
    ):
        word = f"{lines or ''} NVLink".strip() if kind == "nvlink" else _(LINK_LEVEL_LABELS.get(level, level))
        words[one, other].append(word)
        words[other, one].append(word)
    columns = sorted({index for pair in words for index in pair})
    return [
        GpuLinkRow(one, tuple(", ".join(words.get((one, other), [])) for other in columns)) for one in columns
    ]
