"""Detects GPUs with processes that belong to no job, from the samples of a node; reported once stable."""

from __future__ import annotations

from agents.wire.messages import GpuProcess, GpuSample, NodeSample

MIN_MEMORY_MIB = 256
"""Processes with less GPU memory are ignored: monitors, idle displays."""
REPORT_AFTER_S = 10.0
"""A process counts after this time: a task that just started may look foreign for a moment."""
FORGET_AFTER_S = 30.0
"""A GPU is free again after this time without one: some programs return every few seconds."""


class ForeignProcessTracker:
    """Process the samples of one node in order; ``at_s`` is the portal's time of each."""

    def __init__(self) -> None:
        self._reported: dict[str, str | None] = {}  # None: nothing reported yet
        # by GPU: whether one is present, and since when
        self._seen_since_s: dict[str, tuple[bool, float]] = {}

    def add(self, at_s: float, sample: NodeSample) -> dict[str, str]:
        """Return GPUs by UUID whose foreign process changed since the last report; blank for none."""
        news: dict[str, str] = {}
        for gpu in sample.gpus:
            who = largest_foreign_process(gpu)
            seen, since_s = self._seen_since_s.get(gpu.uuid, (bool(who), at_s))
            if seen != bool(who):
                seen, since_s = bool(who), at_s
            self._seen_since_s[gpu.uuid] = seen, since_s
            reported = self._reported.get(gpu.uuid)
            if reported is not None and bool(reported) == seen:
                continue
            if at_s - since_s >= (REPORT_AFTER_S if seen else FORGET_AFTER_S):
                news[gpu.uuid] = self._reported[gpu.uuid] = who
        return news


def largest_foreign_process(gpu: GpuSample) -> str:
    """Describe the foreign process with the most memory of the GPU; blank when none counts.

    A process whose memory the driver does not report counts.
    """
    there = [each for each in gpu.processes if each.foreign]
    counted = [each for each in there if each.memory_mib is None or each.memory_mib >= MIN_MEMORY_MIB]
    if not counted:
        return ""
    return _describe(max(counted, key=lambda each: (each.memory_mib or 0, -each.pid)))


def _describe(user: GpuProcess) -> str:
    name = f"{user.command} (process {user.pid})" if user.command else f"process {user.pid}"
    return f"{name} of {user.account}" if user.account else name
