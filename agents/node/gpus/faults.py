"""Recent GPU faults: a thread that waits for NVML events, and a log of them."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Any, Dict, Optional, Tuple

from agents.node.gpus.health import MEMORY_FAULT

FAULT_RETENTION_S = 60.0
"""How long a fault affects the health: longer than the polling interval, and short enough that a GPU accepts
work again soon after an administrator returns it to service. The database keeps the quarantine until then.
"""

_WAIT_MS = 1000
_RETRY_DELAY_S = 5.0
_NO_INSTANCE = 0xFFFFFFFF
_Kind = Tuple[int, Optional[int]]  # an XID, and the instance number if it concerns a single MIG slice


class FaultLog:
    """Faults by UUID of the whole GPU.

    A driver may report thousands per second, so each XID is stored once with its last time and a count.
    """

    def __init__(self) -> None:
        self._last_s: Dict[str, Dict[_Kind, float]] = {}
        self._new: Dict[Tuple[str, int, Optional[int]], int] = {}
        self._lock = threading.Lock()

    def record(self, uuid: str, xid: int, instance: Optional[int] = None) -> None:
        """Record an XID of a GPU, or of the MIG slice with this ``instance`` number."""
        with self._lock:
            last_s = self._last_s.setdefault(uuid, {})
            last_s.pop((xid, instance), None)  # so that the newest is last
            last_s[xid, instance] = time.monotonic()
            self._new[uuid, xid, instance] = self._new.get((uuid, xid, instance), 0) + 1

    def recent(self, uuid: str, instance: Optional[int]) -> Tuple[int, ...]:
        """Return recent XIDs of a GPU, or of the slice with this instance number, oldest first."""
        since_s = time.monotonic() - FAULT_RETENTION_S
        with self._lock:
            kept = {kind: at_s for kind, at_s in self._last_s.get(uuid, {}).items() if at_s >= since_s}
            self._last_s[uuid] = kept
        return tuple(xid for xid, of in kept if None in (of, instance) or of == instance)

    def take_new(self) -> Dict[Tuple[str, int, Optional[int]], int]:
        """Return the counts by (UUID of the whole GPU, XID, instance number) since the last call."""
        with self._lock:
            new, self._new = self._new, {}
        return new


def watch_faults(nvml: Any, whole: Dict[str, Any], faults: FaultLog) -> None:
    """Record the driver's fault events of these GPUs (handles by UUID) in a daemon thread."""
    threading.Thread(target=_watch_faults, args=(nvml, whole, faults), name="gpu-faults", daemon=True).start()


def _watch_faults(nvml: Any, whole: Dict[str, Any], faults: FaultLog) -> None:
    names = {_address(handle): uuid for uuid, handle in whole.items()}
    while True:
        try:
            events = nvml.nvmlEventSetCreate()
            try:
                if not _register_events(nvml, whole, events):
                    return
                while True:
                    _wait_for_event(nvml, events, names, faults)
            finally:
                nvml.nvmlEventSetFree(events)
        except nvml.NVMLError as error:  # a lost GPU must not hide faults of the others
            sys.stderr.write(f"NVML's events: {error}\n")
            time.sleep(_RETRY_DELAY_S)


def _register_events(nvml: Any, whole: Dict[str, Any], events: Any) -> bool:
    """Register for events; return True when at least one GPU supports them."""
    registered = False
    for handle in whole.values():
        try:
            wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
            reported = nvml.nvmlDeviceGetSupportedEventTypes(handle) & wanted
            if reported:
                nvml.nvmlDeviceRegisterEvents(handle, reported, events)
                registered = True
        except nvml.NVMLError:
            continue  # a consumer GPU, or a lost one
    return registered


def _wait_for_event(nvml: Any, events: Any, names: Dict[int, str], faults: FaultLog) -> None:
    try:
        event = nvml.nvmlEventSetWait(events, _WAIT_MS)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_TIMEOUT:
            return
        raise
    uuid = names.get(_address(event.device))
    if uuid is not None:
        xid = int(event.eventData) if event.eventType == nvml.nvmlEventTypeXidCriticalError else MEMORY_FAULT
        faults.record(uuid, xid, None if event.gpuInstanceId == _NO_INSTANCE else int(event.gpuInstanceId))


def _address(handle: Any) -> int:
    return ctypes.addressof(handle.contents)
