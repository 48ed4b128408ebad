"""Links of the GPUs of one machine: NVLinks and PCIe level of pairs, and NVLink islands. Pure."""

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
"""NVML's common ancestors of two GPUs, nearest first, by their number in NVML."""

NVSWITCH = ""
"""Key of an NVSwitch among NVLink remote ends; GPUs are keyed by PCIe address."""


class GpuLink(NamedTuple):
    """Link of two whole GPUs (UUIDs).

    ``nvlinks``: number of NVLinks between them, direct or through a switch; None when their number is
    unknown. ``level``: one of :data:`PCIE_LEVELS`, None when unknown.
    """

    a: str
    b: str
    nvlinks: Optional[int]
    level: Optional[str]


def nvlinks_between(
    one: Mapping[str, int], one_at: Optional[str], other: Mapping[str, int], other_at: Optional[str]
) -> int:
    """Return the number of NVLinks between two GPUs, given the active links of each by remote end, and PCIe
    addresses.

    Through a switch it is the smaller of both counts, as in nvidia-smi.
    """
    direct = max(one.get(other_at or "-", 0), other.get(one_at or "-", 0))
    return direct or min(one.get(NVSWITCH, 0), other.get(NVSWITCH, 0))


def nvlink_islands(uuids: Sequence[str], links: Iterable[GpuLink]) -> Dict[str, int]:
    """Return the NVLink island of each GPU, numbered in machine order; empty when no two are joined."""
    nvlink_island = {uuid: number for number, uuid in enumerate(uuids)}
    for link in links:
        if link.nvlinks != 0 and nvlink_island[link.a] != nvlink_island[link.b]:
            low, high = sorted((nvlink_island[link.a], nvlink_island[link.b]))
            nvlink_island = {uuid: low if at == high else at for uuid, at in nvlink_island.items()}
    numbers = sorted(set(nvlink_island.values()))
    if len(numbers) == len(nvlink_island):
        return {}
    return {uuid: numbers.index(at) for uuid, at in nvlink_island.items()}
