"""Interface to the GPUs of this machine, read from NVML or simulated from a file."""

from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence

OK, LOST, QUARANTINED = "ok", "lost", "quarantined"


class GpuInfo(NamedTuple):
    """A GPU. Memory in MiB; ``health`` is ok, lost or quarantined; ok with a ``health_message`` is a warning.

    ``fatal``: tasks on it can no longer be trusted. ``ecc_uncorrected``: memory errors since the driver was
    loaded. ``nvlink_island``: equal for GPUs joined by NVLink; None when unknown or without NVLink.
    ``compute_capability``: such as 9.0. ``mig_profile``: such as 1g.10gb for a slice, None for a whole GPU.
    ``driver_reserved_mib``: memory reserved by the driver. ``bus_id``: PCIe address (00000000:1A:00.0).
    ``numa_node``: its NUMA node.
    """

    uuid: str
    index: int  # type: ignore[assignment]  # the tuple's own method of that name is not missed
    model: str
    memory_mib: Optional[int]
    simulated: bool
    health: str
    health_message: Optional[str] = None
    nvlink_island: Optional[int] = None
    compute_capability: Optional[float] = None
    mig_profile: Optional[str] = None
    driver_reserved_mib: Optional[int] = None
    bus_id: Optional[str] = None
    numa_node: Optional[int] = None
    fatal: bool = False
    ecc_uncorrected: Optional[int] = None


class GpuFault(NamedTuple):
    """An XID that the driver reported for a GPU, with a count; XID 0 is an uncorrected memory error."""

    uuid: str
    xid: int
    occurrences: int


class GpuProcess(NamedTuple):
    pid: int
    memory_mib: Optional[int]


class GpuSample(NamedTuple):
    """One sample of a GPU. Unknown values are None.

    ``energy_joules``: the GPU's energy counter since its driver was loaded.
    """

    uuid: str
    utilisation_percent: Optional[float]
    memory_used_mib: Optional[int]
    power_watts: Optional[float]
    temperature_c: Optional[float]
    health: str
    processes: List[GpuProcess]
    energy_joules: Optional[float] = None


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


class GpuProvider:
    """Source of GPUs; this one has none. A GPU that disappeared is no longer listed, or listed as lost."""

    def driver_version(self) -> Optional[str]:
        return None

    def max_cuda_version(self) -> Optional[str]:
        """Return the highest CUDA version of the driver, such as 12.4; None when unknown."""
        return None

    def gpus(self) -> List[GpuInfo]:
        """Return all current GPUs in machine order."""
        return []

    def driver_error(self) -> Optional[str]:
        """Return why GPUs could not be listed; None when :meth:`gpus` is complete."""
        return None

    def links(self) -> List[GpuLink]:
        """Return the links between whole GPUs, one for each pair with known links."""
        return []

    def sample(self, busy_milli: "dict[str, int]") -> List[GpuSample]:
        """Return one sample per GPU; simulated GPUs show ``busy_milli``, the allocated part, as load."""
        return []

    def watch_faults(self) -> None:
        """Subscribe to the driver's fault events, where supported; they affect the reported health."""

    def take_faults(self) -> List[GpuFault]:
        """Return the faults since the last call, one row per GPU and XID."""
        return []


class NoGpus(GpuProvider):
    """A machine without GPUs."""


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


def open_gpus(setting: str) -> GpuProvider:
    """Return the provider of a setting: ``nvml``, ``none`` or ``file:PATH``."""
    if setting.startswith("file:"):
        from agents.node.gpus.simulated import SimulatedGpus

        return SimulatedGpus(setting[len("file:") :])
    if setting == "none":
        return NoGpus()
    from agents.node.gpus.nvml import open_nvml

    return open_nvml()
