"""Reads the links between the GPUs of a node as a matrix."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from portal.models import GpuLink, Node

LINK_LEVEL_LABELS = {
    "internal": "same board",
    "single": "one switch",
    "multiple": "several switches",
    "hostbridge": "one host bridge",
    "node": "one NUMA node",
    "system": "across NUMA nodes",
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
        word = f"{lines or ''} NVLink".strip() if kind == "nvlink" else LINK_LEVEL_LABELS.get(level, level)
        words[one, other].append(word)
        words[other, one].append(word)
    columns = sorted({index for pair in words for index in pair})
    return [
        GpuLinkRow(one, tuple(", ".join(words.get((one, other), [])) for other in columns)) for one in columns
    ]
