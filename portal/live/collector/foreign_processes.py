"""Which GPUs programs work on that are no job's, from the samples of a node; told once it is settled."""

from __future__ import annotations

from agents.wire.messages import GpuProcess, GpuSample, NodeSample

MIN_MEMORY_MIB = 256
"""Who holds less of a GPU's memory only watches it (monitors, a display that shows nothing)."""
REPORT_AFTER_S = 10.0
"""So long is a program seen before it counts: one of a task that just began may look foreign for a moment."""
FORGET_AFTER_S = 30.0
"""So long is nobody seen before a GPU is free again: some programs come back every few seconds."""


class ForeignProcessTracker:
    """Takes the samples of one node in order; ``at_s`` is the portal's time of each."""

    def __init__(self) -> None:
        self._reported: dict[str, str | None] = {}  # None: nothing was told yet
        self._seen_since_s: dict[str, tuple[bool, float]] = {}  # by GPU whether one is seen, and since when

    def add(self, at_s: float, sample: NodeSample) -> dict[str, str]:
        """By UUID who works now on GPUs for which that was not told before; blank for nobody."""
        news: dict[str, str] = {}
        for gpu in sample.gpus:
            who = largest_foreign_process(gpu)
            seen, since_s = self._seen_since_s.get(gpu.uuid, (bool(who), at_s))
            if seen != bool(who):
                seen, since_s = bool(who), at_s
            self._seen_since_s[gpu.uuid] = seen, since_s
            told = self._reported.get(gpu.uuid)
            if told is not None and bool(told) == seen:
                continue
            if at_s - since_s >= (REPORT_AFTER_S if seen else FORGET_AFTER_S):
                news[gpu.uuid] = self._reported[gpu.uuid] = who
        return news


def largest_foreign_process(gpu: GpuSample) -> str:
    """The program that is no job's and holds most of the GPU's memory, for people; blank when none counts.

    One whose memory the driver does not tell counts.
    """
    there = [each for each in gpu.processes if each.foreign]
    counted = [each for each in there if each.memory_mib is None or each.memory_mib >= MIN_MEMORY_MIB]
    if not counted:
        return ""
    return _describe(max(counted, key=lambda each: (each.memory_mib or 0, -each.pid)))


def _describe(user: GpuProcess) -> str:
    name = f"{user.command} (process {user.pid})" if user.command else f"process {user.pid}"
    return f"{name} of {user.account}" if user.account else name
