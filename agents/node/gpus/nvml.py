"""Real GPUs through NVML, the one place that knows the module ``pynvml``."""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

from agents.node.gpus import LOST, OK, GpuFacts, GpuProcess, GpuProvider, GpuReading, NoGpus

_Answer = TypeVar("_Answer")
_MIB = 1024 * 1024
_LIBRARY = "libnvidia-ml.so.1"


def open_nvml() -> GpuProvider:
    """GPUs of this machine, or none where there is no NVML to ask."""
    try:
        ctypes.CDLL(_LIBRARY)  # the module is large, and only machines with a driver need it
        import pynvml
    except (OSError, ImportError):
        return NoGpus()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return NoGpus()
    return NvmlGpus(pynvml)


class NvmlGpus(GpuProvider):
    """GPUs as NVML lists them now, MIG slices in place of their parent; one that fell off the bus is lost."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._known: Dict[str, GpuFacts] = {}
        self._islands: Dict[Tuple[str, ...], Dict[str, int]] = {}  # of the GPUs that were there together
        self._lock = threading.Lock()

    def driver(self) -> Optional[str]:
        return _text(self._ask(self._nvml.nvmlSystemGetDriverVersion))

    def gpus(self) -> List[GpuFacts]:
        with self._lock:
            present = {}
            whole: Dict[str, Any] = {}
            for index, (handle, parent) in enumerate(self._handles()):
                uuid = _text(self._ask(self._nvml.nvmlDeviceGetUUID, handle))
                if uuid is None:
                    continue
                if handle is parent:
                    whole[uuid] = handle
                model, profile = _parted(
                    _text(self._ask(self._nvml.nvmlDeviceGetName, handle)) or "NVIDIA GPU"
                )
                memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
                present[uuid] = GpuFacts(
                    uuid=uuid,
                    index=index,
                    model=model,
                    memory_mib=None if memory is None else memory.total // _MIB,
                    simulated=False,
                    health=OK if memory is not None else LOST,
                    health_sentence=None
                    if memory is not None
                    else "The driver no longer answers for this GPU.",
                    compute_capability=self._capability(parent),
                    mig_profile=profile,
                )
            for uuid, island in self._islands_of(whole).items():
                present[uuid] = present[uuid]._replace(island=island)
            for uuid, facts in self._known.items():
                if uuid not in present:
                    present[uuid] = facts._replace(health=LOST, health_sentence="The GPU left the bus.")
            self._known = present
            return sorted(present.values(), key=lambda facts: facts.index)

    def readings(self, busy_milli: Dict[str, int]) -> List[GpuReading]:
        readings = []
        for facts in self.gpus():
            handle = self._ask(self._nvml.nvmlDeviceGetHandleByUUID, facts.uuid)
            if handle is None or facts.health == LOST:
                readings.append(GpuReading(facts.uuid, None, None, None, None, LOST, []))
                continue
            rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
            memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
            milliwatts = self._ask(self._nvml.nvmlDeviceGetPowerUsage, handle)
            readings.append(
                GpuReading(
                    uuid=facts.uuid,
                    utilisation_percent=None if rates is None else float(rates.gpu),
                    memory_used_mib=None if memory is None else memory.used // _MIB,
                    power_watts=None if milliwatts is None else round(milliwatts / 1000.0, 1),
                    temperature_c=self._ask(
                        self._nvml.nvmlDeviceGetTemperature, handle, self._nvml.NVML_TEMPERATURE_GPU
                    ),
                    health=facts.health,
                    processes=self._processes(handle),
                )
            )
        return readings

    def device_flags(self, uuids: List[str]) -> List[str]:
        return [flag for uuid in uuids for flag in ("--device", f"nvidia.com/gpu={uuid}")]

    def _capability(self, handle: Any) -> Optional[float]:
        found = self._ask(self._nvml.nvmlDeviceGetCudaComputeCapability, handle)
        return None if found is None else float("{}.{}".format(*found))

    def _islands_of(self, handles: Dict[str, Any]) -> Dict[str, int]:
        """Islands by UUID, numbered in the order of the machine; none where no two GPUs are joined."""
        key = tuple(handles)
        if key not in self._islands:
            island = {uuid: number for number, uuid in enumerate(handles)}
            for one, other in itertools.combinations(handles, 2):
                if island[one] != island[other] and self._joined(handles[one], handles[other]):
                    low, high = sorted((island[one], island[other]))
                    island = {uuid: low if at == high else at for uuid, at in island.items()}
            numbers = sorted(set(island.values()))
            joined = len(numbers) < len(island)
            self._islands = {key: {u: numbers.index(at) for u, at in island.items()} if joined else {}}
        return self._islands[key]

    def _joined(self, one: Any, other: Any) -> bool:
        """True when the two reach each other's memory over NVLink, directly or through a switch."""
        status = self._ask(
            self._nvml.nvmlDeviceGetP2PStatus, one, other, self._nvml.NVML_P2P_CAPS_INDEX_NVLINK
        )
        return status is not None and status == self._nvml.NVML_P2P_STATUS_OK

    def _handles(self) -> List[Tuple[Any, Any]]:
        """Each GPU or slice, with the GPU that it is (of)."""
        handles: List[Tuple[Any, Any]] = []
        for index in range(self._ask(self._nvml.nvmlDeviceGetCount) or 0):
            handle = self._ask(self._nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:
                handles.extend((each, handle) for each in self._slices(handle) or [handle])
        return handles

    def _slices(self, handle: Any) -> List[Any]:
        mode = self._ask(self._nvml.nvmlDeviceGetMigMode, handle)
        if not mode or mode[0] != self._nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        count = self._ask(self._nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
        found = (
            self._ask(self._nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, each) for each in range(count)
        )
        return [each for each in found if each is not None]

    def _processes(self, handle: Any) -> List[GpuProcess]:
        found: Dict[int, Optional[int]] = {}
        for question in (
            self._nvml.nvmlDeviceGetComputeRunningProcesses,
            self._nvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            for each in self._ask(question, handle) or ():
                found[each.pid] = None if each.usedGpuMemory is None else each.usedGpuMemory // _MIB
        return [GpuProcess(pid, memory) for pid, memory in sorted(found.items())]

    def _ask(self, question: Callable[..., _Answer], *arguments: Any) -> Optional[_Answer]:
        """An answer of NVML, None for what this GPU or driver does not tell."""
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None


def _parted(name: str) -> Tuple[str, Optional[str]]:
    """NVML's name as the model and, of a slice, its profile: ``NVIDIA A100-SXM4-40GB MIG 1g.5gb``."""
    model, mig, profile = name.partition(" MIG ")
    return model, profile if mig else None


def _text(value: Any) -> Optional[str]:
    return value.decode() if isinstance(value, bytes) else value
