"""Which GPUs programs work on that are no job's, from the samples of a node; told once it is settled."""

from __future__ import annotations

from agents.samples import GpuSample, GpuUser, NodeSample

LEAST_MIB = 256
"""Who holds less of a GPU's memory only watches it (monitors, a display that shows nothing)."""
SEEN_S = 10.0
"""So long is a program seen before it counts: one of a task that just began may look foreign for a moment."""
GONE_S = 30.0
"""So long is nobody seen before a GPU is free again: some programs come back every few seconds."""


class ForeignWatch:
    """Takes the samples of one node in order; ``at_s`` is the portal's time of each."""

    def __init__(self) -> None:
        self._told: dict[str, str | None] = {}  # None: nothing was told yet
        self._since: dict[str, tuple[bool, float]] = {}  # by GPU whether one is seen, and since when

    def add(self, at_s: float, sample: NodeSample) -> dict[str, str]:
        """By UUID who works now on GPUs for which that was not told before; blank for nobody."""
        news: dict[str, str] = {}
        for gpu in sample.gpus:
            who = foreign_user(gpu)
            seen, since_s = self._since.get(gpu.uuid, (bool(who), at_s))
            if seen != bool(who):
                seen, since_s = bool(who), at_s
            self._since[gpu.uuid] = seen, since_s
            told = self._told.get(gpu.uuid)
            if told is not None and bool(told) == seen:
                continue
            if at_s - since_s >= (SEEN_S if seen else GONE_S):
                news[gpu.uuid] = self._told[gpu.uuid] = who
        return news


def foreign_user(gpu: GpuSample) -> str:
    """The program that is no job's and holds most of the GPU's memory, for people; blank when none counts.

    One whose memory the driver does not tell counts.
    """
    there = [each for each in gpu.processes if each.foreign]
    counted = [each for each in there if each.memory_mib is None or each.memory_mib >= LEAST_MIB]
    if not counted:
        return ""
    return _words(max(counted, key=lambda each: (each.memory_mib or 0, -each.pid)))


def _words(user: GpuUser) -> str:
    name = f"{user.command} (process {user.pid})" if user.command else f"process {user.pid}"
    return f"{name} of {user.account}" if user.account else name
