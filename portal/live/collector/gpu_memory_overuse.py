"""Detects attempts that use more GPU memory than their share for some time, from the samples of a node.

Sharing is cooperative: memory beyond one share is missing in the others on the GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agents.wire.messages import GpuSample, NodeSample
from portal.live.collector.sample_filter import Holder

WHOLE_GPU_MILLI = 1000
REPORT_AFTER_S = 10.0
"""An attempt ends after exceeding its share this long: programs may need more for a moment at start."""
TOLERANCE_MIB = 256
"""Excess that is ignored: the measurement includes the driver's memory for each process."""


class GpuMemoryOveruse(NamedTuple):
    """Memory use of an attempt (public id of the job, number) on a GPU above its share."""

    job: str
    attempt: int
    uuid: str
    used_mib: int
    share_mib: int


class OveruseTracker:
    """Process the samples of one node in order; ``at_s`` is the portal's time of each."""

    def __init__(self) -> None:
        self._exceeded_since_s: dict[tuple[str, str, int], float] = {}

    def add(
        self,
        at_s: float,
        sample: NodeSample,
        holders: Mapping[str, Sequence[Holder]],
        shareable_mib: Mapping[str, int],
    ) -> list[GpuMemoryOveruse]:
        """Return attempts over their share for long enough. ``shareable_mib``: memory to share by GPU."""
        over = [
            each
            for gpu in sample.gpus
            if gpu.uuid in shareable_mib
            for each in find_overuse(gpu, holders.get(gpu.uuid, ()), shareable_mib[gpu.uuid])
        ]
        before, self._exceeded_since_s = self._exceeded_since_s, {}
        for each in over:
            key = each.uuid, each.job, each.attempt
            self._exceeded_since_s[key] = before.get(key, at_s)
        return [
            each
            for each in over
            if at_s - self._exceeded_since_s[each.uuid, each.job, each.attempt] >= REPORT_AFTER_S
        ]


def find_overuse(gpu: GpuSample, holders: Sequence[Holder], shareable_mib: int) -> list[GpuMemoryOveruse]:
    """Return attempts over their share of one GPU now; processes without reported memory do not count."""
    shares: Counter[tuple[str, int]] = Counter()
    for job, attempt, milli in holders:
        shares[job, attempt] += milli
    used: Counter[tuple[str, int]] = Counter()
    for process in gpu.processes:
        if process.job is not None and process.attempt is not None:
            used[process.job, process.attempt] += process.memory_mib or 0
    found = []
    for (job, attempt), mib in used.items():
        milli = shares[job, attempt]
        share_mib = shareable_mib * milli // WHOLE_GPU_MILLI
        if 0 < milli < WHOLE_GPU_MILLI and mib > share_mib + TOLERANCE_MIB:
            found.append(GpuMemoryOveruse(job, attempt, gpu.uuid, mib, share_mib))
    return found
