"""The GPUs of this machine, from NVML or from a file of pretend ones, behind one small interface."""

from __future__ import annotations

from typing import List, NamedTuple, Optional

from agents.node.gpus.links import GpuLink

OK, LOST, QUARANTINED = "ok", "lost", "quarantined"


class GpuInfo(NamedTuple):
    """What a GPU is. Memory in MiB; health is ok, lost or quarantined.

    With a ``health_message`` ok is a warning. ``fatal``: what runs on it cannot be trusted any more.
    ``ecc_uncorrected`` counts memory errors since the driver was loaded.

    GPUs of a machine with equal ``nvlink_island`` are joined by NVLink; None is not known, or there is no NVLink.
    ``compute_capability`` is such as 9.0; ``mig_profile`` such as 1g.10gb is that of a slice, None of a whole GPU.
    ``driver_reserved_mib`` of the memory is kept by the driver for itself; ``bus_id`` is the PCIe address (00000000:1A:00.0)
    and ``numa_node`` the NUMA node it hangs on.
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
    """So many times the driver told this XID for a GPU; 0 among XIDs is an uncorrected memory error."""

    uuid: str
    xid: int
    occurrences: int


class GpuProcess(NamedTuple):
    """A process that holds GPU memory."""

    pid: int
    memory_mib: Optional[int]


class GpuSample(NamedTuple):
    """What a GPU does at one moment. Unknown is None.

    ``energy_joules`` is the GPU's own counter, since its driver was loaded.
    """

    uuid: str
    utilisation_percent: Optional[float]
    memory_used_mib: Optional[int]
    power_watts: Optional[float]
    temperature_c: Optional[float]
    health: str
    processes: List[GpuProcess]
    energy_joules: Optional[float] = None


class GpuProvider:
    """Where GPUs come from. A GPU that vanished is simply no longer listed, or listed as lost."""

    def driver_version(self) -> Optional[str]:
        """The version of the driver."""
        raise NotImplementedError

    def max_cuda_version(self) -> Optional[str]:
        """The newest CUDA that the driver knows, such as 12.4; None where nobody can say."""
        return None

    def gpus(self) -> List[GpuInfo]:
        """Every GPU now, in the order of the machine."""
        raise NotImplementedError

    def driver_error(self) -> Optional[str]:
        """Why nobody can say which GPUs are there, as a message; None where :meth:`gpus` is all of them."""
        return None

    def links(self) -> List[GpuLink]:
        """How the whole GPUs among them are joined, a row for each pair of which something is known."""
        return []

    def sample(self, busy_milli: "dict[str, int]") -> List[GpuSample]:
        """One reading per GPU; ``busy_milli`` says how much of each is given away (pretend GPUs show it)."""
        raise NotImplementedError

    def watch_faults(self) -> None:
        """From now on hears at once what befalls GPUs, where the driver tells it; their health shows it."""

    def take_faults(self) -> List[GpuFault]:
        """What befell GPUs since this was last asked, a row for each GPU and XID."""
        return []


class NoGpus(GpuProvider):
    """A machine without GPUs."""

    def driver_version(self) -> Optional[str]:
        return None

    def gpus(self) -> List[GpuInfo]:
        return []

    def sample(self, busy_milli: "dict[str, int]") -> List[GpuSample]:
        return []


def open_gpus(setting: str) -> GpuProvider:
    """The provider that a setting names: ``nvml``, ``none`` or ``file:PATH``."""
    if setting.startswith("file:"):
        from agents.node.gpus.simulated import SimulatedGpus

        return SimulatedGpus(setting[len("file:") :])
    if setting == "none":
        return NoGpus()
    from agents.node.gpus.nvml import open_nvml

    return open_nvml()
