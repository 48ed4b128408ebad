"""Real GPUs through NVML; the only user of ``pynvml``."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, TypeVar

from agents.node.gpus import (
    LOST,
    NVSWITCH,
    OK,
    PCIE_LEVELS,
    GpuFault,
    GpuInfo,
    GpuLink,
    GpuProcess,
    GpuProvider,
    GpuSample,
    NoGpus,
    nvlink_islands,
    nvlinks_between,
)
from agents.node.gpus.faults import FaultLog, watch_faults
from agents.node.gpus.health import MEMORY_FAULT, HealthReadings, evaluate_health, is_throttled
from agents.node.host.procfs import read_text

_Answer = TypeVar("_Answer")
_MIB = 1024 * 1024
_LIBRARY = "libnvidia-ml.so.1"
_RETRY_INTERVAL_S = 10.0
_PCI_DEVICES = "/sys/bus/pci/devices"


def open_nvml() -> GpuProvider:
    """Return the GPUs of this machine, or none without NVML."""
    try:
        ctypes.CDLL(_LIBRARY)  # the module is large and is needed only with a driver
        import pynvml
    except (OSError, ImportError):
        return NoGpus()
    return _open(pynvml)


def _open(nvml: Any) -> GpuProvider:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_DRIVER_NOT_LOADED, nvml.NVML_ERROR_LIBRARY_NOT_FOUND):
            return NoGpus()
        return UnresponsiveGpus(nvml, str(error).rstrip("."))
    return NvmlGpus(nvml)


class UnresponsiveGpus(GpuProvider):
    """A driver that is installed but does not respond, for example after an upgrade while it was in use.

    Its GPUs are unknown, not lost. Opening is retried before each answer, at most once per interval.
    """

    def __init__(self, nvml: Any, why: str) -> None:
        self._nvml = nvml
        self._reason = why
        self._provider: GpuProvider = NoGpus()
        self._tried_s = time.monotonic()
        self._watching_faults = False

    def _retry(self) -> GpuProvider:
        if self.driver_error() is not None and time.monotonic() - self._tried_s >= _RETRY_INTERVAL_S:
            self._tried_s = time.monotonic()
            found = _open(self._nvml)
            if isinstance(found, NvmlGpus):
                self._provider = found
                if self._watching_faults:
                    found.watch_faults()
        return self._provider

    def driver_error(self) -> Optional[str]:
        return (
            None
            if isinstance(self._provider, NvmlGpus)
            else f"The NVIDIA driver does not respond: {self._reason}."
        )

    def driver_version(self) -> Optional[str]:
        return self._retry().driver_version()

    def max_cuda_version(self) -> Optional[str]:
        return self._retry().max_cuda_version()

    def gpus(self) -> List[GpuInfo]:
        return self._retry().gpus()

    def links(self) -> List[GpuLink]:
        return self._retry().links()

    def sample(self, busy_milli: Dict[str, int]) -> List[GpuSample]:
        return self._retry().sample(busy_milli)

    def watch_faults(self) -> None:
        self._watching_faults = True

    def take_faults(self) -> List[GpuFault]:
        return self._provider.take_faults()


class _Memory(NamedTuple):
    total_mib: Optional[int] = None
    used_mib: Optional[int] = None
    reserved_mib: Optional[int] = None


class _StaticInfo(NamedTuple):
    """Properties that are constant while a GPU is present."""

    gpu: GpuInfo
    instance: Optional[int]  # instance number of a MIG slice
    physical_uuid: str  # UUID of the whole GPU, also for slices


class NvmlGpus(GpuProvider):
    """GPUs as NVML lists them, MIG slices instead of their parent; one that fell off the bus is lost."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._known: Dict[str, GpuInfo] = {}
        self._static_info: Dict[str, _StaticInfo] = {}
        self._links_cache: Tuple[Tuple[str, ...], List[GpuLink]] = (
            (),
            [],
        )  # valid for this set of GPUs
        self._lock = threading.Lock()
        self._faults = FaultLog()
        self._ecc: Dict[str, int] = {}  # uncorrected errors at the last reading, by whole GPU
        self._throttled_since_s: Dict[str, float] = {}

    def driver_version(self) -> Optional[str]:
        return _text(self._query(self._nvml.nvmlSystemGetDriverVersion))

    def max_cuda_version(self) -> Optional[str]:
        number = self._query(self._nvml.nvmlSystemGetCudaDriverVersion_v2)
        return None if number is None else f"{number // 1000}.{number % 1000 // 10}"

    def gpus(self) -> List[GpuInfo]:
        with self._lock:
            present = {}
            whole: Dict[str, Any] = {}
            index = 0
            for parent_uuid, parent in self._physical_gpus().items():
                condition = self._health_readings(parent_uuid, parent)
                for handle in self._mig_devices(parent) or [parent]:
                    uuid = _text(self._query(self._nvml.nvmlDeviceGetUUID, handle))
                    if uuid is not None:
                        present[uuid] = self._gpu_info(index, uuid, handle, parent, parent_uuid, condition)
                    if handle is parent:
                        whole[parent_uuid] = parent
                    index += 1
            self._static_info = {uuid: self._static_info[uuid] for uuid in present}
            for uuid, nvlink_island in nvlink_islands(tuple(whole), self._find_links(whole)).items():
                present[uuid] = present[uuid]._replace(nvlink_island=nvlink_island)
            for uuid, facts in self._known.items():
                if uuid not in present:
                    present[uuid] = facts._replace(
                        health=LOST, health_message="The GPU fell off the bus.", fatal=True
                    )
            self._known = present
            return sorted(present.values(), key=lambda facts: facts.index)

    def links(self) -> List[GpuLink]:
        self.gpus()
        return self._links_cache[1]

    def sample(self, busy_milli: Dict[str, int]) -> List[GpuSample]:
        readings = []
        for facts in self.gpus():
            handle = self._query(self._nvml.nvmlDeviceGetHandleByUUID, facts.uuid)
            if handle is None or facts.health == LOST:
                readings.append(GpuSample(facts.uuid, None, None, None, None, LOST, []))
                continue
            rates = self._query(self._nvml.nvmlDeviceGetUtilizationRates, handle)
            memory = self._memory(handle)
            milliwatts = self._query(self._nvml.nvmlDeviceGetPowerUsage, handle)
            millijoules = self._query(self._nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
            readings.append(
                GpuSample(
                    uuid=facts.uuid,
                    utilisation_percent=None if rates is None else float(rates.gpu),
                    memory_used_mib=memory.used_mib,
                    power_watts=None if milliwatts is None else round(milliwatts / 1000.0, 1),
                    temperature_c=self._query(
                        self._nvml.nvmlDeviceGetTemperature, handle, self._nvml.NVML_TEMPERATURE_GPU
                    ),
                    health=facts.health,
                    processes=self._processes(handle),
                    energy_joules=None if millijoules is None else millijoules / 1000.0,
                )
            )
        return readings

    def watch_faults(self) -> None:
        watch_faults(self._nvml, self._physical_gpus(), self._faults)

    def take_faults(self) -> List[GpuFault]:
        """Return the faults: those of a whole GPU for each slice, those of a missing GPU by its own UUID."""
        traits = self._static_info
        return [
            GpuFault(uuid, xid, times)
            for (whole, xid, instance), times in self._faults.take_new().items()
            for uuid in (
                [
                    each
                    for each, of in traits.items()
                    if of.physical_uuid == whole
                    and (None in (instance, of.instance) or instance == of.instance)
                ]
                or [whole]
            )
        ]

    def _gpu_info(
        self, index: int, uuid: str, handle: Any, parent: Any, parent_uuid: str, condition: HealthReadings
    ) -> GpuInfo:
        if uuid not in self._static_info:
            self._static_info[uuid] = self._read_static_info(uuid, handle, parent, parent_uuid)
        traits, memory = self._static_info[uuid], self._memory(handle)
        xids = self._faults.recent(parent_uuid, traits.instance)
        health = evaluate_health(condition._replace(responds=memory.total_mib is not None, xids=xids))
        return traits.gpu._replace(
            index=index,
            memory_mib=memory.total_mib,
            driver_reserved_mib=memory.reserved_mib,
            health=health.health,
            health_message=health.message,
            fatal=health.fatal,
            ecc_uncorrected=condition.ecc_uncorrected,
        )

    def _read_static_info(self, uuid: str, handle: Any, parent: Any, whole: str) -> _StaticInfo:
        name = _text(self._query(self._nvml.nvmlDeviceGetName, handle)) or "NVIDIA GPU"
        model, mig, profile = name.partition(" MIG ")  # NVIDIA A100-SXM4-40GB MIG 1g.5gb
        capability = self._query(self._nvml.nvmlDeviceGetCudaComputeCapability, parent)
        bus_id = self._bus_id(parent)
        gpu = GpuInfo(
            uuid,
            index=0,
            model=model,
            memory_mib=None,
            simulated=False,
            health=OK,
            compute_capability=None if capability is None else float("{}.{}".format(*capability)),
            mig_profile=profile if mig else None,
            bus_id=bus_id,
            numa_node=None if bus_id is None else _numa_node(bus_id),
        )
        instance = self._query(self._nvml.nvmlDeviceGetGpuInstanceId, handle) if mig else None
        return _StaticInfo(gpu, instance, whole)

    def _health_readings(self, uuid: str, handle: Any) -> HealthReadings:
        """Return the readings of a whole GPU; its slices share them."""
        now_s = time.monotonic()
        ecc, before = self._uncorrected_errors(handle), self._ecc.get(uuid)
        if ecc is not None:
            if before is not None and ecc > before:
                self._faults.record(uuid, MEMORY_FAULT)
            self._ecc[uuid] = ecc
        rows = self._query(self._nvml.nvmlDeviceGetRemappedRows, handle)
        pages = self._query(self._nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        throttle = self._query(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if throttle is None:  # drivers before 535 have the older name
            throttle = self._query(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        if is_throttled(throttle):
            self._throttled_since_s.setdefault(uuid, now_s)
        else:
            self._throttled_since_s.pop(uuid, None)
        return HealthReadings(
            ecc_uncorrected=ecc,
            rows_pending=None if rows is None else bool(rows[2]),
            rows_failed=None if rows is None else bool(rows[3]),
            pages_pending=None if pages is None else bool(pages),
            throttle=throttle,
            throttled_s=now_s - self._throttled_since_s.get(uuid, now_s),
        )

    def _uncorrected_errors(self, handle: Any) -> Optional[int]:
        """Return uncorrected errors of all memory since the driver was loaded."""
        kind, since = self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._nvml.NVML_VOLATILE_ECC
        return self._query(self._nvml.nvmlDeviceGetTotalEccErrors, handle, kind, since)

    def _memory(self, handle: Any) -> _Memory:
        """Return the memory of a GPU; older drivers count reserved memory as used."""
        found = self._query(self._nvml.nvmlDeviceGetMemoryInfo, handle, self._nvml.nvmlMemory_v2)
        if found is not None:
            return _Memory(found.total // _MIB, found.used // _MIB, found.reserved // _MIB)
        found = self._query(self._nvml.nvmlDeviceGetMemoryInfo, handle)
        return _Memory() if found is None else _Memory(found.total // _MIB, found.used // _MIB)

    def _find_links(self, whole: Dict[str, Any]) -> List[GpuLink]:
        """Return the links, cached until the set of GPUs changes: reading takes some hundred calls."""
        key = tuple(whole)
        if self._links_cache[0] != key:
            ends = {uuid: self._count_nvlinks(handle) for uuid, handle in whole.items()}
            at = {uuid: self._static_info[uuid].gpu.bus_id for uuid in whole}
            found = []
            for a, b in itertools.combinations(whole, 2):
                nvlinks: Optional[int] = nvlinks_between(ends[a], at[a], ends[b], at[b])
                reached = self._has_nvlink_p2p(whole[a], whole[b])
                if reached is not None:
                    nvlinks = (nvlinks or None) if reached else 0
                level = self._query(self._nvml.nvmlDeviceGetTopologyCommonAncestor, whole[a], whole[b])
                found.append(GpuLink(a, b, nvlinks, PCIE_LEVELS.get(-1 if level is None else level)))
            self._links_cache = key, found
        return self._links_cache[1]

    def _count_nvlinks(self, handle: Any) -> Dict[str, int]:
        """Return the number of active NVLinks by remote end."""
        found: Dict[str, int] = {}
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            if not self._query(self._nvml.nvmlDeviceGetNvLinkState, handle, link):
                continue
            kind = self._query(self._nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
            if kind == self._nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                end: Optional[str] = NVSWITCH
            else:
                pci = self._query(self._nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
                end = None if pci is None else str(_text(pci.busId)).upper()
            if end is not None:
                found[end] = found.get(end, 0) + 1
        return found

    def _has_nvlink_p2p(self, one: Any, other: Any) -> Optional[bool]:
        """Return True when peer access over NVLink works, which links alone do not imply."""
        status = self._query(
            self._nvml.nvmlDeviceGetP2PStatus, one, other, self._nvml.NVML_P2P_CAPS_INDEX_NVLINK
        )
        return None if status is None else status == self._nvml.NVML_P2P_STATUS_OK

    def _bus_id(self, handle: Any) -> Optional[str]:
        pci = self._query(self._nvml.nvmlDeviceGetPciInfo, handle)
        return None if pci is None else str(_text(pci.busId)).upper()

    def _physical_gpus(self) -> Dict[str, Any]:
        """Return the handles of all responding whole GPUs in machine order."""
        found: Dict[str, Any] = {}
        for index in range(self._query(self._nvml.nvmlDeviceGetCount) or 0):
            handle = self._query(self._nvml.nvmlDeviceGetHandleByIndex, index)
            uuid = None if handle is None else _text(self._query(self._nvml.nvmlDeviceGetUUID, handle))
            if uuid is not None:
                found[uuid] = handle
        return found

    def _mig_devices(self, handle: Any) -> List[Any]:
        mode = self._query(self._nvml.nvmlDeviceGetMigMode, handle)
        if not mode or mode[0] != self._nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        count = self._query(self._nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
        found = (
            self._query(self._nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, each) for each in range(count)
        )
        return [each for each in found if each is not None]

    def _processes(self, handle: Any) -> List[GpuProcess]:
        found: Dict[int, Optional[int]] = {}
        for question in (
            self._nvml.nvmlDeviceGetComputeRunningProcesses,
            self._nvml.nvmlDeviceGetGraphicsRunningProcesses,
            self._nvml.nvmlDeviceGetMPSComputeRunningProcesses,
        ):
            for each in self._query(question, handle) or ():
                found[each.pid] = None if each.usedGpuMemory is None else each.usedGpuMemory // _MIB
        return [GpuProcess(pid, memory) for pid, memory in sorted(found.items())]

    def _query(self, question: Callable[..., _Answer], *arguments: Any) -> Optional[_Answer]:
        """Call NVML; return None when this GPU or driver does not support the query."""
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None


def _numa_node(bus_id: str) -> Optional[int]:
    """Return the NUMA node of a PCIe address; None on a machine with a single one."""
    domain, _, place = bus_id.lower().partition(":")
    text = read_text(os.path.join(_PCI_DEVICES, f"{domain[-4:]}:{place}", "numa_node"))
    node = int(text) if text and text.strip().lstrip("-").isdigit() else -1
    return node if node >= 0 else None


def _text(value: Any) -> Optional[str]:
    return value.decode() if isinstance(value, bytes) else value
