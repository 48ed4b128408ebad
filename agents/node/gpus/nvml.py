"""Real GPUs through NVML, the one place that knows the module ``pynvml``."""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, Optional, TypeVar

from agents.node.gpus import LOST, OK, GpuFacts, GpuProcess, GpuProvider, GpuReading, NoGpus

_Answer = TypeVar("_Answer")
_MIB = 1024 * 1024


def open_nvml() -> GpuProvider:
    """GPUs of this machine, or none where there is no NVML to ask."""
    try:
        import pynvml
    except ImportError:
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
        self._lock = threading.Lock()

    def driver(self) -> Optional[str]:
        return _text(self._ask(self._nvml.nvmlSystemGetDriverVersion))

    def gpus(self) -> List[GpuFacts]:
        with self._lock:
            present = {}
            for index, handle in enumerate(self._handles()):
                uuid = _text(self._ask(self._nvml.nvmlDeviceGetUUID, handle))
                if uuid is None:
                    continue
                memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
                present[uuid] = GpuFacts(
                    uuid=uuid,
                    index=index,
                    model=_text(self._ask(self._nvml.nvmlDeviceGetName, handle)) or "NVIDIA GPU",
                    memory_mib=None if memory is None else memory.total // _MIB,
                    simulated=False,
                    health=OK if memory is not None else LOST,
                    health_sentence=None
                    if memory is not None
                    else "The driver no longer answers for this GPU.",
                )
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

    def _handles(self) -> List[Any]:
        handles: List[Any] = []
        for index in range(self._ask(self._nvml.nvmlDeviceGetCount) or 0):
            handle = self._ask(self._nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:
                handles.extend(self._slices(handle) or [handle])
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


def _text(value: Any) -> Optional[str]:
    return value.decode() if isinstance(value, bytes) else value
