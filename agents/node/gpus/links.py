"""How the GPUs of one machine are joined: pairs with their NVLinks and PCIe level, and islands from them. Pure."""

from __future__ import annotations

from typing import Dict, Iterable, Mapping, NamedTuple, Optional, Sequence

PCIE_LEVELS = {
    0: "internal",
    10: "single",
    20: "multiple",
    30: "hostbridge",
    40: "node",
    50: "system",
}
"""NVML's common ancestors of two GPUs, nearest first: one board, one switch, several switches, one host bridge,
one NUMA node, and beyond it."""

NVSWITCH = ""
"""Stands for an NVSwitch among the far ends of NVLinks; GPUs go by their PCIe address."""


class GpuLink(NamedTuple):
    """Two whole GPUs, by UUID, and the way between them.

    ``nvlinks`` is how many join them, directly or through a switch: 0 where none does, None where some do and
    nobody tells how many. ``level`` is a word of :data:`LEVELS`, None where it is not told.
    """

    a: str
    b: str
    nvlinks: Optional[int]
    level: Optional[str]


def nvlinks_between(
    one: Mapping[str, int], one_at: Optional[str], other: Mapping[str, int], other_at: Optional[str]
) -> int:
    """How many NVLinks join two GPUs, each with its active links by far end and its own PCIe address.

    Through a switch it is as many as the one with fewer has, as nvidia-smi counts them too.
    """
    direct = max(one.get(other_at or "-", 0), other.get(one_at or "-", 0))
    return direct or min(one.get(NVSWITCH, 0), other.get(NVSWITCH, 0))


def nvlink_islands(uuids: Sequence[str], links: Iterable[GpuLink]) -> Dict[str, int]:
    """Islands of GPUs that NVLink joins, numbered in the order of the machine; none where no two are joined."""
    nvlink_island = {uuid: number for number, uuid in enumerate(uuids)}
    for link in links:
        if link.nvlinks != 0 and nvlink_island[link.a] != nvlink_island[link.b]:
            low, high = sorted((nvlink_island[link.a], nvlink_island[link.b]))
            nvlink_island = {uuid: low if at == high else at for uuid, at in nvlink_island.items()}
    numbers = sorted(set(nvlink_island.values()))
    if len(numbers) == len(nvlink_island):
        return {}
    return {uuid: numbers.index(at) for uuid, at in nvlink_island.items()}
