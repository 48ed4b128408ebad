"""Which attempts use more memory of a GPU than their share of it, from the samples of a node; told once it lasts.

Sharing is cooperative: what one takes beyond its share, its neighbours on the GPU cannot have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agents.wire.messages import GpuSample, NodeSample
from portal.live.collector.sample_filter import Holder

WHOLE_GPU_MILLI = 1000
REPORT_AFTER_S = 10.0
"""So long is a share exceeded before its attempt ends: programs may need more for a moment while they begin."""
TOLERANCE_MIB = 256
"""So much beyond a share is nobody's trouble: what a driver keeps for each program is in the figure, too."""


class GpuMemoryOveruse(NamedTuple):
    """An attempt of a job (public id, number) that used so much of a GPU, where its share is so much."""

    job: str
    attempt: int
    uuid: str
    used_mib: int
    share_mib: int


class OveruseTracker:
    """Takes the samples of one node in order; ``at_s`` is the portal's time of each."""

    def __init__(self) -> None:
        self._exceeded_since_s: dict[tuple[str, str, int], float] = {}

    def add(
        self,
        at_s: float,
        sample: NodeSample,
        holders: Mapping[str, Sequence[Holder]],
        shareable_mib: Mapping[str, int],
    ) -> list[GpuMemoryOveruse]:
        """Who has been over for long enough. ``room_mib`` is what of each GPU's memory can be shared."""
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
    """Those over their shares of one GPU at this moment; processes whose memory is not told count nothing."""
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
