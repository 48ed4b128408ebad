"""The jobs that a replay submits, and the size of its cluster."""

from __future__ import annotations

from typing import NamedTuple


class TraceJob(NamedTuple):
    """One job; times in whole seconds since the epoch (timestamps of the trace read as UTC)."""

    number: int  # index in the trace, by submit time
    project: str
    submitted_s: int
    duration_s: int
    gpus: int


class ClusterSize(NamedTuple):
    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def split_gpus(self, gpus: int) -> list[int]:
        """Return the GPUs per node of a job: one node, or whole nodes and the rest on another."""
        if gpus <= self.gpus_per_node:
            return [gpus]
        whole, rest = divmod(gpus, self.gpus_per_node)
        return [self.gpus_per_node] * whole + ([rest] if rest else [])
