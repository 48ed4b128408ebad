"""The ledger of one pool: quotas of the project tree, what each project holds, and what still may start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.core.cluster import ProjectId, QuotaRow


@dataclass(frozen=True, slots=True)
class Bound:
    """The project on a job's path whose number stops it, and the numbers."""

    project: ProjectId
    held_milli: int
    allowed_milli: int


class PoolLedger:
    """What every project holds in one pool; each change counts in the project and all its ancestors."""

    def __init__(
        self, quotas: Mapping[ProjectId, QuotaRow], paths: Mapping[ProjectId, tuple[ProjectId, ...]]
    ) -> None:
        self.quotas = quotas
        self.paths = paths
        self.held_milli: dict[ProjectId, int] = dict.fromkeys(quotas, 0)
        self.held_firm_milli: dict[ProjectId, int] = dict.fromkeys(quotas, 0)  # by non-preemptible work

    def add(self, project: ProjectId, milli: int, preemptible: bool) -> None:
        """Count work in; a negative amount takes it out again."""
        for node in self.paths[project]:
            self.held_milli[node] += milli
            if not preemptible:
                self.held_firm_milli[node] += milli

    def limit_in_the_way(self, project: ProjectId, milli: int, *, empty: bool = False) -> Bound | None:
        """The nearest project on the path whose limit ``milli`` more would pass; ``empty``: even if idle."""
        if milli == 0:
            return None
        for node in self.paths[project]:
            limit = self.quotas[node].limit_milli
            held = 0 if empty else self.held_milli[node]
            if limit is not None and held + milli > limit:
                return Bound(node, held, limit)
        return None

    def guarantee_in_the_way(self, project: ProjectId, milli: int, *, empty: bool = False) -> Bound | None:
        """The nearest project whose guarantee cannot hold ``milli`` more of non-preemptible work."""
        if milli == 0:
            return None
        for node in self.paths[project]:
            guaranteed = self.quotas[node].guaranteed_milli
            held = 0 if empty else self.held_firm_milli[node]
            if held + milli > guaranteed:
                return Bound(node, held, guaranteed)
        return None
