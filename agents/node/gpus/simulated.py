"""Simulated GPUs from a JSON file; health and load follow changes of the file."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from typing import Any, Dict, List, Optional, Tuple

from agents.node.gpus import LOST, OK, QUARANTINED, GpuFault, GpuInfo, GpuProcess, GpuProvider, GpuSample
from agents.node.gpus.health import HealthReadings, evaluate_health


class SimulatedGpus(GpuProvider):
    """GPUs as ``{"gpus": [{"uuid", "model", "memory_mib", "health", "load": {...}}]}``.

    ``nvlink_island``, ``compute_capability``, ``mig_profile``, ``fatal`` and ``ecc_uncorrected`` are
    optional; without ``nvlink_island`` all are joined. ``xids`` appended while the agent runs are reported
    once each; without ``health`` they determine the health as for real GPUs. ``load`` is optional: the
    default is 60 to 95 percent when allocated, otherwise idle. It may contain ``processes`` (pid, memory_mib)
    of this machine. An invalid or missing file keeps the last valid state.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file_version: Optional[Tuple[int, int, int]] = None
        self._rows: List[Dict[str, Any]] = []
        self._gpus: List[GpuInfo] = []
        self._reported_xids: Optional[Dict[str, int]] = (
            None  # XIDs per GPU already reported, or present at the start
        )

    def driver_version(self) -> Optional[str]:
        return "simulated"

    def gpus(self) -> List[GpuInfo]:
        self._reload()
        return self._gpus

    def sample(self, busy_milli: Dict[str, int]) -> List[GpuSample]:
        self._reload()
        return [
            _gpu_sample(row, facts, busy_milli.get(facts.uuid, 0))
            for row, facts in zip(self._rows, self._gpus)
        ]

    def take_faults(self) -> List[GpuFault]:
        self._reload()
        rows = {str(row["uuid"]): [int(xid) for xid in row.get("xids", ())] for row in self._rows}
        reported, self._reported_xids = self._reported_xids, {uuid: len(xids) for uuid, xids in rows.items()}
        if reported is None:
            return []
        new = [(uuid, xids[reported.get(uuid, 0) :]) for uuid, xids in rows.items()]
        return [GpuFault(uuid, xid, xids.count(xid)) for uuid, xids in new for xid in dict.fromkeys(xids)]

    def _reload(self) -> None:
        try:
            facts = os.stat(self._path)
            seen = (facts.st_ino, facts.st_mtime_ns, facts.st_size)
            if seen == self._file_version:
                return
            with open(self._path, encoding="utf-8") as stream:
                rows = json.load(stream)["gpus"]
            gpus = [_gpu_info(index, row) for index, row in enumerate(rows)]
        except (OSError, ValueError, KeyError, TypeError):
            return
        self._file_version, self._rows, self._gpus = seen, rows, gpus


def _gpu_info(index: int, row: Dict[str, Any]) -> GpuInfo:
    judged = evaluate_health(HealthReadings(xids=tuple(int(xid) for xid in row.get("xids", ()))))
    health, capability = row.get("health", judged.health), row.get("compute_capability")
    return GpuInfo(
        uuid=str(row["uuid"]),
        index=int(row.get("index", index)),
        model=str(row.get("model", "Pretend GPU")),
        memory_mib=int(row.get("memory_mib", 16_384)),
        simulated=True,
        health=health if health in (OK, LOST, QUARANTINED) else QUARANTINED,
        health_message=row.get("health_message", judged.message),
        nvlink_island=None if row.get("mig_profile") else int(row.get("nvlink_island", 0)),
        compute_capability=None if capability is None else float(capability),
        mig_profile=row.get("mig_profile"),
        fatal=bool(row.get("fatal", judged.fatal)),
        ecc_uncorrected=row.get("ecc_uncorrected"),
    )


def _gpu_sample(row: Dict[str, Any], facts: GpuInfo, busy_milli: int) -> GpuSample:
    load = row.get("load") or {}
    if facts.health == LOST:
        return GpuSample(facts.uuid, None, None, None, None, facts.health, [])
    phase = zlib.crc32(facts.uuid.encode()) % 628 / 100.0
    wave = 0.5 + 0.5 * math.sin(time.time() / 9.0 + phase)
    share = min(1.0, busy_milli / 1000.0)
    utilisation = load.get("utilisation_percent", round(share * (60.0 + 35.0 * wave), 1))
    memory = facts.memory_mib or 0
    return GpuSample(
        uuid=facts.uuid,
        utilisation_percent=utilisation,
        memory_used_mib=load.get("memory_used_mib", int(share * memory * (0.55 + 0.2 * wave))),
        power_watts=load.get("power_watts", round(45.0 + 2.4 * float(utilisation or 0.0), 1)),
        temperature_c=load.get("temperature_c", round(31.0 + 0.4 * float(utilisation or 0.0), 1)),
        health=facts.health,
        processes=[
            GpuProcess(int(each["pid"]), each.get("memory_mib")) for each in load.get("processes", ())
        ],
    )
