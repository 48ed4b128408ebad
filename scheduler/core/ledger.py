"""The ledger of one pool: quotas of the project tree, what each project holds, and what still may start.

*Held* is what runs, starts or keeps a place; *leaving* is what has to let go but has not. Of both, *firm* is the
part that is not preemptible. CPU and memory have no bound where a quota gives none. What each person holds is
counted only in projects whose quota bounds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from enum import Enum

from scheduler.core.cluster import UNLIMITED_MILLI, Bounds, ProjectId, QuotaRow, UserId
from scheduler.core.resources import NOTHING, Amounts, Owed, owed_to


@dataclass(frozen=True, slots=True)
class Bound:
    """The project on a job's path whose number stops it, and the numbers (of ``resource``, as in ``Amounts``)."""

    project: ProjectId
    held: float
    allowed: float
    resource: int = 0


class Gone(Enum):
    """Who counts as gone already, of those that are leaving."""

    NOBODY = "nobody"
    ASKED = "asked"
    """Those who make room for somebody; whoever leaves of their own accord is still there."""
    EVERYBODY = "everybody"


class People:
    """What each person holds through one project and those below it, in thousandths of a GPU."""

    __slots__ = ("held", "leaving", "most_milli", "unasked")

    def __init__(self, most_milli: float) -> None:
        self.most_milli = most_milli
        self.held: dict[UserId, float] = {}
        self.leaving: dict[UserId, float] = {}
        self.unasked: dict[UserId, float] = {}

    def has(self, user: UserId, gone: Gone) -> float:
        """What a person holds there, less what counts as gone."""
        there = {Gone.NOBODY: self.leaving, Gone.ASKED: self.unasked, Gone.EVERYBODY: {}}[gone]
        return self.held.get(user, 0.0) + there.get(user, 0.0)

    def copy(self) -> People:
        """The same, to change on its own."""
        other = copy(self)
        other.held, other.leaving, other.unasked = dict(self.held), dict(self.leaving), dict(self.unasked)
        return other

    def may_hold(self, asked: Mapping[UserId, float]) -> float:
        """What all people together hold and may still get of what they ask for."""
        everybody = sorted({*self.held, *self.leaving, *asked})
        return sum(min(self.most_milli, self.has(u, Gone.NOBODY) + asked.get(u, 0.0)) for u in everybody)


class PoolLedger:
    """What every project holds in one pool; each change counts in the project and all its ancestors."""

    def __init__(
        self, quotas: Mapping[ProjectId, QuotaRow], paths: Mapping[ProjectId, tuple[ProjectId, ...]]
    ) -> None:
        self.quotas = quotas
        self.paths = paths
        self.guaranteed = {project: _guaranteed(quota) for project, quota in quotas.items()}
        self.limit = {project: _limit(quota) for project, quota in quotas.items()}
        self.owed: dict[ProjectId, Owed] = {}
        self.held: dict[ProjectId, Amounts] = dict.fromkeys(quotas, NOTHING)
        self.firm: dict[ProjectId, Amounts] = dict.fromkeys(quotas, NOTHING)
        self.leaving: dict[ProjectId, Amounts] = dict.fromkeys(quotas, NOTHING)
        self._leaving_firm: dict[ProjectId, Amounts] = dict.fromkeys(quotas, NOTHING)
        self._unasked: dict[ProjectId, Amounts] = dict.fromkeys(quotas, NOTHING)
        self._unasked_firm: dict[ProjectId, Amounts] = dict.fromkeys(quotas, NOTHING)
        self.counts_all = any(quota.cpu or quota.memory for quota in quotas.values())
        """False: only GPUs can be in the way."""
        self.people = {
            project: People(quota.user_limit_milli)
            for project, quota in quotas.items()
            if quota.user_limit_milli is not None
        }

    def copy(self) -> PoolLedger:
        """The same ledger, to count on its own; what never changes is shared."""
        other = copy(self)
        other.held, other.firm, other.leaving = dict(self.held), dict(self.firm), dict(self.leaving)
        other._leaving_firm = dict(self._leaving_firm)
        other._unasked, other._unasked_firm = dict(self._unasked), dict(self._unasked_firm)
        other.people = {project: people.copy() for project, people in self.people.items()}
        return other

    def divide(self, fair_share: Mapping[ProjectId, Amounts], created_s: Mapping[ProjectId, float]) -> None:
        """Take over the fair shares: from now on ``owed`` tells what each project may call its own."""
        self.owed = {
            project: owed_to(
                self.guaranteed[project],
                self.limit[project],
                share,
                self.quotas[project].priority,
                created_s[project],
            )
            for project, share in fair_share.items()
        }

    def add(
        self, project: ProjectId, user: UserId, amounts: Amounts, preemptible: bool, sign: int = 1
    ) -> None:
        """Count work in; a negative sign takes it out again."""
        _add(self.held, self.paths[project], amounts, sign)
        for people in self._people_above(project):
            _count(people.held, user, sign * amounts.gpu_milli)
        if not preemptible:
            _add(self.firm, self.paths[project], amounts, sign)

    def add_leaving(
        self,
        project: ProjectId,
        user: UserId,
        amounts: Amounts,
        preemptible: bool,
        sign: int = 1,
        *,
        asked: bool = True,
    ) -> None:
        """Count in what has to let go but has not; ``asked``: it makes room for somebody."""
        path = self.paths[project]
        for people in self._people_above(project):
            _count(people.leaving, user, sign * amounts.gpu_milli)
            if not asked:
                _count(people.unasked, user, sign * amounts.gpu_milli)
        _add(self.leaving, path, amounts, sign)
        if not asked:
            _add(self._unasked, path, amounts, sign)
        if not preemptible:
            _add(self._leaving_firm, path, amounts, sign)
            if not asked:
                _add(self._unasked_firm, path, amounts, sign)

    def bounds(self, preemptible: bool) -> bool:
        """True when a quota can keep somebody from starting, if all are ``preemptible``."""
        limited = any(each != math.inf for limit in self.limit.values() for each in limit)
        return limited or bool(self.people) or not preemptible

    def over_limit(self, project: ProjectId) -> bool:
        """True when ``project`` would hold more than a limit even once everybody leaving has left."""
        return not self.held[project].fits_in(self.limit[project])

    def levels_over(self, project: ProjectId, user: UserId) -> list[ProjectId]:
        """Where ``user`` would hold more than one person may even once everybody leaving has left."""
        if not self.people:
            return []
        return [
            level
            for level in self.paths[project]
            if level in self.people
            and self.people[level].has(user, Gone.EVERYBODY) > self.people[level].most_milli
        ]

    def counts_people(self, project: ProjectId) -> bool:
        """True when it matters in ``project`` who asks: its quota, or one above it, bounds what one person holds."""
        return any(True for _ in self._people_above(project))

    def _people_above(self, project: ProjectId) -> Iterable[People]:
        if not self.people:
            return ()
        return (self.people[level] for level in self.paths[project] if level in self.people)

    def limit_in_the_way(
        self, project: ProjectId, amounts: Amounts, *, empty: bool = False, gone: Gone = Gone.NOBODY
    ) -> Bound | None:
        """The nearest project on the path whose limit ``amounts`` more would pass; ``empty``: with nothing held."""
        there = {Gone.NOBODY: self.leaving, Gone.ASKED: self._unasked, Gone.EVERYBODY: None}[gone]
        return self._first(self.limit, self.held, there, project, amounts, empty)

    def guarantee_in_the_way(
        self, project: ProjectId, amounts: Amounts, *, empty: bool = False, gone: Gone = Gone.NOBODY
    ) -> Bound | None:
        """The nearest project whose guarantee cannot hold ``amounts`` more of non-preemptible work."""
        there = {Gone.NOBODY: self._leaving_firm, Gone.ASKED: self._unasked_firm, Gone.EVERYBODY: None}[gone]
        return self._first(self.guaranteed, self.firm, there, project, amounts, empty)

    def user_limit_in_the_way(
        self,
        project: ProjectId,
        user: UserId,
        amounts: Amounts,
        *,
        empty: bool = False,
        gone: Gone = Gone.NOBODY,
    ) -> Bound | None:
        """The nearest project in which ``user`` would hold more than one person may, with ``amounts`` more."""
        if not self.people or not amounts.gpu_milli:
            return None
        for level in self.paths[project]:
            people = self.people.get(level)
            if people is None:
                continue
            has = 0.0 if empty else people.has(user, gone)
            if has + amounts.gpu_milli > people.most_milli:
                return Bound(level, has, people.most_milli)
        return None

    def _first(
        self,
        bounds: Mapping[ProjectId, Amounts],
        held: Mapping[ProjectId, Amounts],
        there: Mapping[ProjectId, Amounts] | None,
        project: ProjectId,
        amounts: Amounts,
        empty: bool,
    ) -> Bound | None:
        resources = (0, 1, 2) if self.counts_all else (0,)
        for level in self.paths[project]:
            for resource in resources:
                bound = bounds[level][resource]
                if bound == math.inf or not amounts[resource]:
                    continue
                has = 0 if empty else held[level][resource] + (there[level][resource] if there else 0)
                if has + amounts[resource] > bound:
                    return Bound(level, has, bound, resource)
        return None

    def first_in_the_way(
        self,
        project: ProjectId,
        user: UserId,
        amounts: Amounts,
        preemptible: bool,
        *,
        empty: bool = False,
        gone: Gone = Gone.NOBODY,
    ) -> Bound | None:
        """The limit, or for non-preemptible work the guarantee, that ``amounts`` more would pass.

        ``empty``: even with nothing held.
        """
        limit = self.limit_in_the_way(project, amounts, empty=empty, gone=gone)
        if limit is None:
            limit = self.user_limit_in_the_way(project, user, amounts, empty=empty, gone=gone)
        if limit is not None or preemptible:
            return limit
        return self.guarantee_in_the_way(project, amounts, empty=empty, gone=gone)

    def closed_to(
        self,
        project: ProjectId,
        user: UserId,
        amounts: Amounts,
        preemptible: bool,
        *,
        empty: bool = False,
        gone: Gone = Gone.NOBODY,
    ) -> bool:
        """True when something is in the way of ``amounts`` more; ``empty``: even with nothing held."""
        return self.first_in_the_way(project, user, amounts, preemptible, empty=empty, gone=gone) is not None

    def highest_bound(self, project: ProjectId, preemptible: bool) -> ProjectId | None:
        """The highest project on the path whose quota can be in the way; None: no quota ever is."""
        path = self.paths[project]
        if not preemptible:
            return path[-1]
        bounds = (
            each for each in path if each in self.people or any(most != math.inf for most in self.limit[each])
        )
        return max(bounds, key=path.index, default=None)


def _add(book: dict[ProjectId, Amounts], path: tuple[ProjectId, ...], amounts: Amounts, sign: int) -> None:
    milli, cpu, memory = amounts
    for level in path:
        before = book[level]
        book[level] = Amounts(before[0] + sign * milli, before[1] + sign * cpu, before[2] + sign * memory)


def _count(book: dict[UserId, float], user: UserId, milli: float) -> None:
    book[user] = book.get(user, 0.0) + milli


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def _guaranteed(quota: QuotaRow) -> Amounts:
    milli = math.inf if quota.guaranteed_milli >= UNLIMITED_MILLI else quota.guaranteed_milli
    cpu, memory = quota.cpu or Bounds(), quota.memory or Bounds()
    return Amounts(milli, _number(cpu.guaranteed), _number(memory.guaranteed))


def _limit(quota: QuotaRow) -> Amounts:
    cpu, memory = quota.cpu or Bounds(), quota.memory or Bounds()
    return Amounts(_number(quota.limit_milli), _number(cpu.limit), _number(memory.limit))
