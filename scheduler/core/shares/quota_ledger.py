"""The ledger of one pool: quotas of the project tree, what each project holds, and what may still start.

*Held* is what runs, starts or is nominated; *releasing* is what is stopping but not gone yet. The
non-preemptible part of both is counted separately. CPU and memory are unbounded where a quota has none.
Holdings of users are counted only in projects with a user limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, Self, TypeVar

from scheduler.core.model.resources import ZERO, Entitlement, ResourceVector, build_entitlement
from scheduler.core.model.snapshot import UNLIMITED_MILLI, ProjectId, QuotaRow, ResourceQuota, UserId

Owner = TypeVar("Owner")
Amount = TypeVar("Amount")


@dataclass(frozen=True, slots=True)
class ExceededQuota:
    """The project whose quota blocks a job, with amounts of ``resource`` (index in ``ResourceVector``)."""

    project: ProjectId
    held: float
    allowed: float
    resource: int = 0


class JobOwner(NamedTuple):
    """The project and user that a job counts for, and its amounts."""

    project: ProjectId
    leaf_project: ProjectId
    user: UserId
    preemptible: bool
    amounts: ResourceVector


class AssumeReleased(Enum):
    """What counts as released already."""

    NONE = "none"
    EVICTED = "evicted"
    """What evicted jobs are releasing; jobs that stop for other reasons still hold theirs."""
    ALL = "all"
    """Everything that is releasing."""
    HELD = "held"
    """Everything that is held, too: what could ever start."""


@dataclass
class _Holdings(Generic[Owner, Amount]):
    """Amounts by owner: held, releasing, and the part of the latter that is not released for another job."""

    held: dict[Owner, Amount] = field(default_factory=dict)
    releasing: dict[Owner, Amount] = field(default_factory=dict)
    releasing_voluntarily: dict[Owner, Amount] = field(default_factory=dict)

    def copy(self) -> Self:
        """Return an independent copy."""
        other = copy(self)
        other.held, other.releasing = dict(self.held), dict(self.releasing)
        other.releasing_voluntarily = dict(self.releasing_voluntarily)
        return other

    def unreleased(self, assume_released: AssumeReleased) -> Mapping[Owner, Amount]:
        """Return what is releasing and does not count as released."""
        if assume_released is AssumeReleased.NONE:
            return self.releasing
        return self.releasing_voluntarily if assume_released is AssumeReleased.EVICTED else {}


@dataclass
class UserHoldings(_Holdings[UserId, float]):
    """What each user holds in one project and its descendants, in thousandths of a GPU."""

    limit_milli: float = math.inf

    def held_by(self, user: UserId, assume_released: AssumeReleased) -> float:
        """Return what a user holds, less what counts as released."""
        if assume_released is AssumeReleased.HELD:
            return 0.0
        return self.held.get(user, 0.0) + self.unreleased(assume_released).get(user, 0.0)

    def requestable(self, requested: Mapping[UserId, float]) -> float:
        """Return the sum over users of what they hold and request, each capped by the limit."""
        everybody = sorted({*self.held, *self.releasing, *requested})
        return sum(
            min(self.limit_milli, self.held_by(u, AssumeReleased.NONE) + requested.get(u, 0.0))
            for u in everybody
        )


class PoolLedger:
    """What every project holds in one pool; each change counts in the project and all its ancestors."""

    def __init__(
        self, quotas: Mapping[ProjectId, QuotaRow], paths: Mapping[ProjectId, tuple[ProjectId, ...]]
    ) -> None:
        self.quotas = quotas
        self.paths = paths
        self.guaranteed = {project: _guaranteed(quota) for project, quota in quotas.items()}
        self.limit = {project: _limit(quota) for project, quota in quotas.items()}
        self.entitlements: dict[ProjectId, Entitlement] = {}
        nothing = dict.fromkeys(quotas, ZERO)
        self._all = _Holdings(nothing, nothing, nothing).copy()
        self._non_preemptible = self._all.copy()
        self.has_cpu_or_memory_quota = any(quota.cpu or quota.memory for quota in quotas.values())
        """False if only GPUs can be bounded."""
        self.user_holdings = {
            project: UserHoldings(limit_milli=quota.user_limit_milli)
            for project, quota in quotas.items()
            if quota.user_limit_milli is not None
        }

    @property
    def held(self) -> dict[ProjectId, ResourceVector]:
        return self._all.held

    @property
    def held_non_preemptible(self) -> dict[ProjectId, ResourceVector]:
        return self._non_preemptible.held

    @property
    def releasing(self) -> dict[ProjectId, ResourceVector]:
        return self._all.releasing

    def copy(self) -> PoolLedger:
        """Return an independent copy that shares what never changes."""
        other = copy(self)
        other._all, other._non_preemptible = self._all.copy(), self._non_preemptible.copy()
        other.user_holdings = {project: users.copy() for project, users in self.user_holdings.items()}
        return other

    def set_fair_shares(
        self, fair_share: Mapping[ProjectId, ResourceVector], created_s: Mapping[ProjectId, float]
    ) -> None:
        self.entitlements = {
            project: build_entitlement(
                self.guaranteed[project],
                self.limit[project],
                share,
                self.quotas[project].priority,
                created_s[project],
            )
            for project, share in fair_share.items()
        }

    def add(
        self, project: ProjectId, user: UserId, amounts: ResourceVector, preemptible: bool, sign: int = 1
    ) -> None:
        """Add held resources; a negative sign removes them."""
        for users in self._user_holdings_above(project):
            _count(users.held, user, sign * amounts.gpu_milli)
        for holdings in self._holdings_of(preemptible):
            _add(holdings.held, self.paths[project], amounts, sign)

    def add_releasing(
        self,
        project: ProjectId,
        user: UserId,
        amounts: ResourceVector,
        preemptible: bool,
        sign: int = 1,
        *,
        evicted: bool = True,
    ) -> None:
        """Add resources that are stopping but not gone; ``evicted``: they are released for another job."""
        for users in self._user_holdings_above(project):
            _count(users.releasing, user, sign * amounts.gpu_milli)
            if not evicted:
                _count(users.releasing_voluntarily, user, sign * amounts.gpu_milli)
        for holdings in self._holdings_of(preemptible):
            _add(holdings.releasing, self.paths[project], amounts, sign)
            if not evicted:
                _add(holdings.releasing_voluntarily, self.paths[project], amounts, sign)

    def _holdings_of(self, preemptible: bool) -> tuple[_Holdings[ProjectId, ResourceVector], ...]:
        """Return the holdings that a job counts in."""
        return (self._all,) if preemptible else (self._all, self._non_preemptible)

    def can_block(self, preemptible: bool) -> bool:
        """Return True if a quota can block any job; ``preemptible``: all jobs are preemptible."""
        limited = any(each != math.inf for limit in self.limit.values() for each in limit)
        return limited or bool(self.user_holdings) or not preemptible

    def is_over_limit(self, project: ProjectId) -> bool:
        """Return True if ``project`` exceeds a limit even after all releases."""
        return not self.held[project].fits_in(self.limit[project])

    def user_limits_exceeded(self, project: ProjectId, user: UserId) -> list[ProjectId]:
        """Return the projects on the path in which ``user`` exceeds a limit even after all releases."""
        if not self.user_holdings:
            return []
        return [
            level
            for level in self.paths[project]
            if level in self.user_holdings
            and self.user_holdings[level].held_by(user, AssumeReleased.ALL)
            > self.user_holdings[level].limit_milli
        ]

    def has_user_limit(self, project: ProjectId) -> bool:
        """Return True if the project or an ancestor has a user limit."""
        return any(True for _ in self._user_holdings_above(project))

    def _user_holdings_above(self, project: ProjectId) -> Iterable[UserHoldings]:
        if not self.user_holdings:
            return ()
        return (self.user_holdings[level] for level in self.paths[project] if level in self.user_holdings)

    def exceeded_limit(
        self,
        project: ProjectId,
        amounts: ResourceVector,
        assume_released: AssumeReleased = AssumeReleased.NONE,
    ) -> ExceededQuota | None:
        """Return the nearest limit that ``amounts`` more would exceed."""
        return self._first_exceeded(self.limit, self._all, project, amounts, assume_released)

    def exceeded_guarantee(
        self,
        project: ProjectId,
        amounts: ResourceVector,
        assume_released: AssumeReleased = AssumeReleased.NONE,
    ) -> ExceededQuota | None:
        """Return the nearest guarantee that ``amounts`` more of non-preemptible work would exceed."""
        return self._first_exceeded(self.guaranteed, self._non_preemptible, project, amounts, assume_released)

    def exceeded_user_limit(
        self,
        project: ProjectId,
        user: UserId,
        amounts: ResourceVector,
        assume_released: AssumeReleased = AssumeReleased.NONE,
    ) -> ExceededQuota | None:
        """Return the nearest user limit that ``amounts`` more would exceed."""
        if not self.user_holdings or not amounts.gpu_milli:
            return None
        for level in self.paths[project]:
            if (users := self.user_holdings.get(level)) is not None:
                has = users.held_by(user, assume_released)
                if has + amounts.gpu_milli > users.limit_milli:
                    return ExceededQuota(level, has, users.limit_milli)
        return None

    def _first_exceeded(
        self,
        bounds: Mapping[ProjectId, ResourceVector],
        holdings: _Holdings[ProjectId, ResourceVector],
        project: ProjectId,
        amounts: ResourceVector,
        assume_released: AssumeReleased,
    ) -> ExceededQuota | None:
        resources = (0, 1, 2) if self.has_cpu_or_memory_quota else (0,)
        held, releasing = holdings.held, holdings.unreleased(assume_released)
        for level in self.paths[project]:
            for resource in resources:
                bound = bounds[level][resource]
                if bound == math.inf or not amounts[resource]:
                    continue
                has: float = 0
                if assume_released is not AssumeReleased.HELD:
                    has = held[level][resource] + (releasing[level][resource] if releasing else 0)
                if has + amounts[resource] > bound:
                    return ExceededQuota(level, has, bound, resource)
        return None

    def exceeded_quota(
        self,
        project: ProjectId,
        user: UserId,
        amounts: ResourceVector,
        preemptible: bool,
        assume_released: AssumeReleased = AssumeReleased.NONE,
    ) -> ExceededQuota | None:
        """Return the limit, or for non-preemptible work the guarantee, that ``amounts`` more would exceed."""
        limit = self.exceeded_limit(project, amounts, assume_released)
        if limit is None:
            limit = self.exceeded_user_limit(project, user, amounts, assume_released)
        if limit is not None or preemptible:
            return limit
        return self.exceeded_guarantee(project, amounts, assume_released)

    def is_blocked(
        self,
        project: ProjectId,
        user: UserId,
        amounts: ResourceVector,
        preemptible: bool,
        assume_released: AssumeReleased = AssumeReleased.NONE,
    ) -> bool:
        return self.exceeded_quota(project, user, amounts, preemptible, assume_released) is not None

    def highest_bounded_project(self, project: ProjectId, preemptible: bool) -> ProjectId | None:
        """Return the highest project on the path whose quota can block a job; None if none can."""
        path = self.paths[project]
        if not preemptible:
            return path[-1]
        bounds = (
            each
            for each in path
            if each in self.user_holdings or any(most != math.inf for most in self.limit[each])
        )
        return max(bounds, key=path.index, default=None)


def _add(
    book: dict[ProjectId, ResourceVector], path: tuple[ProjectId, ...], amounts: ResourceVector, sign: int
) -> None:
    milli, cpu, memory = amounts
    for level in path:
        before = book[level]
        book[level] = ResourceVector(
            before[0] + sign * milli, before[1] + sign * cpu, before[2] + sign * memory
        )


def _count(book: dict[UserId, float], user: UserId, milli: float) -> None:
    book[user] = book.get(user, 0.0) + milli


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def _guaranteed(quota: QuotaRow) -> ResourceVector:
    milli = math.inf if quota.guaranteed_milli >= UNLIMITED_MILLI else quota.guaranteed_milli
    cpu, memory = quota.cpu or ResourceQuota(), quota.memory or ResourceQuota()
    return ResourceVector(milli, _number(cpu.guaranteed), _number(memory.guaranteed))


def _limit(quota: QuotaRow) -> ResourceVector:
    cpu, memory = quota.cpu or ResourceQuota(), quota.memory or ResourceQuota()
    return ResourceVector(_number(quota.limit_milli), _number(cpu.limit), _number(memory.limit))
