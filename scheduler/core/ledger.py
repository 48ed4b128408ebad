"""The ledger of one pool: quotas of the project tree, what each project holds, and what still may start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from scheduler.core.cluster import ProjectId, QuotaRow


@dataclass(frozen=True, slots=True)
class Bound:
    """The project on a job's path whose number stops it, and the numbers."""

    project: ProjectId
    held_milli: int
    allowed_milli: int


class Gone(Enum):
    """Who counts as gone already, of those that are leaving."""

    NOBODY = "nobody"
    ASKED = "asked"
    """Those who make room for somebody; whoever leaves of their own accord is still there."""
    EVERYBODY = "everybody"


class PoolLedger:
    """What every project holds in one pool; each change counts in the project and all its ancestors."""

    def __init__(
        self, quotas: Mapping[ProjectId, QuotaRow], paths: Mapping[ProjectId, tuple[ProjectId, ...]]
    ) -> None:
        self.quotas = quotas
        self.paths = paths
        self.held_milli: dict[ProjectId, int] = dict.fromkeys(quotas, 0)
        self.held_firm_milli: dict[ProjectId, int] = dict.fromkeys(quotas, 0)  # by non-preemptible work
        self.leaving_milli: dict[ProjectId, int] = dict.fromkeys(quotas, 0)  # not gone yet
        self.leaving_firm_milli: dict[ProjectId, int] = dict.fromkeys(quotas, 0)
        self._unasked_milli: dict[ProjectId, int] = dict.fromkeys(quotas, 0)  # of these, of their own accord
        self._unasked_firm_milli: dict[ProjectId, int] = dict.fromkeys(quotas, 0)
        # of what is leaving, what still counts
        self._there = {Gone.NOBODY: self.leaving_milli, Gone.ASKED: self._unasked_milli, Gone.EVERYBODY: {}}
        self._there_firm = {
            Gone.NOBODY: self.leaving_firm_milli,
            Gone.ASKED: self._unasked_firm_milli,
            Gone.EVERYBODY: {},
        }

    def add(self, project: ProjectId, milli: int, preemptible: bool) -> None:
        """Count work in; a negative amount takes it out again."""
        for node in self.paths[project]:
            self.held_milli[node] += milli
            if not preemptible:
                self.held_firm_milli[node] += milli

    def leave(self, project: ProjectId, milli: int, preemptible: bool, *, asked: bool = True) -> None:
        """Move work from held to leaving; a negative amount moves it back. ``asked``: it makes room for somebody."""
        self.add(project, -milli, preemptible)
        for node in self.paths[project]:
            self.leaving_milli[node] += milli
            self._unasked_milli[node] += 0 if asked else milli
            if not preemptible:
                self.leaving_firm_milli[node] += milli
                self._unasked_firm_milli[node] += 0 if asked else milli

    def over_limit(self, project: ProjectId) -> bool:
        """True when ``project`` would hold more than its limit even once everybody leaving has left."""
        limit = self.quotas[project].limit_milli
        return limit is not None and self.held_milli[project] > limit

    def limit_in_the_way(
        self, project: ProjectId, milli: int, *, empty: bool = False, gone: Gone = Gone.NOBODY
    ) -> Bound | None:
        """The nearest project on the path whose limit ``milli`` more would pass; ``empty``: with nothing held."""
        if milli == 0:
            return None
        for node in self.paths[project]:
            limit = self.quotas[node].limit_milli
            held = 0 if empty else self.held_milli[node] + self._there[gone].get(node, 0)
            if limit is not None and held + milli > limit:
                return Bound(node, held, limit)
        return None

    def guarantee_in_the_way(
        self, project: ProjectId, milli: int, *, empty: bool = False, gone: Gone = Gone.NOBODY
    ) -> Bound | None:
        """The nearest project whose guarantee cannot hold ``milli`` more of non-preemptible work."""
        if milli == 0:
            return None
        for node in self.paths[project]:
            guaranteed = self.quotas[node].guaranteed_milli
            held = 0 if empty else self.held_firm_milli[node] + self._there_firm[gone].get(node, 0)
            if held + milli > guaranteed:
                return Bound(node, held, guaranteed)
        return None

    def closed_to(
        self,
        project: ProjectId,
        milli: int,
        preemptible: bool,
        *,
        empty: bool = False,
        gone: Gone = Gone.NOBODY,
    ) -> bool:
        """True when a limit, or for non-preemptible work a guarantee, is in the way of ``milli`` more."""
        if self.limit_in_the_way(project, milli, empty=empty, gone=gone) is not None:
            return True
        if preemptible:
            return False
        return self.guarantee_in_the_way(project, milli, empty=empty, gone=gone) is not None
