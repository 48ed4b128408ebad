"""The ledger of one pool: quotas of the project tree, what each project holds, and what may still start.

*Held* is what runs, starts or is nominated; *releasing* is what is stopping but not gone yet. The
non-preemptible part of both is counted separately. CPU and memory are unbounded where a quota has none.
Holdings of users are counted only in projects with a user limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from enum import Enum

from scheduler.core.model.resources import ZERO, Entitlement, ResourceVector, build_entitlement
from scheduler.core.model.snapshot import UNLIMITED_MILLI, ProjectId, QuotaRow, ResourceQuota, UserId


@dataclass(frozen=True, slots=True)
class ExceededQuota:
    """The project whose quota blocks a job, with amounts of ``resource`` (index in ``ResourceVector``)."""

    project: ProjectId
    held: float
    allowed: float
    resource: int = 0


class AssumeReleased(Enum):
    """Which releasing resources count as released already."""

    NONE = "none"
    EVICTED = "evicted"
    """Those of evicted jobs; jobs that stop for other reasons still hold theirs."""
    ALL = "all"


class UserHoldings:
    """What each user holds in one project and its descendants, in thousandths of a GPU."""

    __slots__ = ("held", "limit_milli", "releasing", "releasing_voluntarily")

    def __init__(self, limit_milli: float) -> None:
        self.limit_milli = limit_milli
        self.held: dict[UserId, float] = {}
        self.releasing: dict[UserId, float] = {}
        self.releasing_voluntarily: dict[UserId, float] = {}

    def held_by(self, user: UserId, assume_released: AssumeReleased) -> float:
        """Return what a user holds, less what counts as released."""
        there = {
            AssumeReleased.NONE: self.releasing,
            AssumeReleased.EVICTED: self.releasing_voluntarily,
            AssumeReleased.ALL: {},
        }[assume_released]
        return self.held.get(user, 0.0) + there.get(user, 0.0)

    def copy(self) -> UserHoldings:
        """Return an independent copy."""
        other = copy(self)
        other.held, other.releasing, other.releasing_voluntarily = (
            dict(self.held),
            dict(self.releasing),
            dict(self.releasing_voluntarily),
        )
        return other

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
        self.held: dict[ProjectId, ResourceVector] = dict.fromkeys(quotas, ZERO)
        self.held_non_preemptible: dict[ProjectId, ResourceVector] = dict.fromkeys(quotas, ZERO)
        self.releasing: dict[ProjectId, ResourceVector] = dict.fromkeys(quotas, ZERO)
        self._releasing_non_preemptible: dict[ProjectId, ResourceVector] = dict.fromkeys(quotas, ZERO)
        self._releasing_voluntarily: dict[ProjectId, ResourceVector] = dict.fromkeys(quotas, ZERO)
        self._releasing_voluntarily_non_preemptible: dict[ProjectId, ResourceVector] = dict.fromkeys(
            quotas, ZERO
        )
        self.has_cpu_or_memory_quota = any(quota.cpu or quota.memory for quota in quotas.values())
        """False if only GPUs can be bounded."""
        self.user_holdings = {
            project: UserHoldings(quota.user_limit_milli)
            for project, quota in quotas.items()
            if quota.user_limit_milli is not None
        }

    def copy(self) -> PoolLedger:
        """Return an independent copy that shares what never changes."""
        other = copy(self)
        other.held, other.held_non_preemptible, other.releasing = (
            dict(self.held),
            dict(self.held_non_preemptible),
            dict(self.releasing),
        )
        other._releasing_non_preemptible = dict(self._releasing_non_preemptible)
        other._releasing_voluntarily, other._releasing_voluntarily_non_preemptible = (
            dict(self._releasing_voluntarily),
            dict(self._releasing_voluntarily_non_preemptible),
        )
        other.user_holdings = {project: users.copy() for project, users in self.user_holdings.items()}
        return other

    def set_fair_shares(
        self, fair_share: Mapping[ProjectId, ResourceVector], created_s: Mapping[ProjectId, float]
    ) -> None:
        """Set ``entitlements`` from the fair shares."""
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
        _add(self.held, self.paths[project], amounts, sign)
        for users in self._user_holdings_above(project):
            _count(users.held, user, sign * amounts.gpu_milli)
        if not preemptible:
            _add(self.held_non_preemptible, self.paths[project], amounts, sign)

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
        path = self.paths[project]
        for users in self._user_holdings_above(project):
            _count(users.releasing, user, sign * amounts.gpu_milli)
            if not evicted:
                _count(users.releasing_voluntarily, user, sign * amounts.gpu_milli)
        _add(self.releasing, path, amounts, sign)
        if not evicted:
            _add(self._releasing_voluntarily, path, amounts, sign)
        if not preemptible:
            _add(self._releasing_non_preemptible, path, amounts, sign)
            if not evicted:
                _add(self._releasing_voluntarily_non_preemptible, path, amounts, sign)

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
        *,
        empty: bool = False,
        assume_released: AssumeReleased = AssumeReleased.NONE,
    ) -> ExceededQuota | None:
        """Return the nearest limit that ``amounts`` more would exceed; ``empty``: with nothing held."""
        there = {
            AssumeReleased.NONE: self.releasing,
            AssumeReleased.EVICTED: self._releasing_voluntarily,
            AssumeReleased.ALL: None,
        }[assume_released]
        return self._first_exceeded(self.limit, self.held, there, project, amounts, empty)

    def exceeded_guarantee(
        self,
        project: ProjectId,
        amounts: ResourceVector,
        *,
        empty: bool = False,
        assume_released: AssumeReleased = AssumeReleased.NONE,
    ) -> ExceededQuota | None:
        """Return the nearest guarantee that ``amounts`` more of non-preemptible work would exceed."""
        there = {
            AssumeReleased.NONE: self._releasing_non_preemptible,
            AssumeReleased.EVICTED: self._releasing_voluntarily_non_preemptible,
            AssumeReleased.ALL: None,
        }[assume_released]
        return self._first_exceeded(
            self.guaranteed, self.held_non_preemptible, there, project, amounts, empty
        )

    def exceeded_user_limit(
        self,
        project: ProjectId,
        user: UserId,
        amounts: ResourceVector,
        *,
        empty: bool = False,
        assume_released: AssumeReleased = AssumeReleased.NONE,
    ) -> ExceededQuota | None:
        """Return the nearest user limit that ``amounts`` more would exceed."""
        if not self.user_holdings or not amounts.gpu_milli:
            return None
        for level in self.paths[project]:
            users = self.user_holdings.get(level)
            if users is None:
                continue
            has = 0.0 if empty else users.held_by(user, assume_released)
            if has + amounts.gpu_milli > users.limit_milli:
                return ExceededQuota(level, has, users.limit_milli)
        return None

    def _first_exceeded(
        self,
        bounds: Mapping[ProjectId, ResourceVector],
        held: Mapping[ProjectId, ResourceVector],
        releasing: Mapping[ProjectId, ResourceVector] | None,
        project: ProjectId,
        amounts: ResourceVector,
        empty: bool,
    ) -> ExceededQuota | None:
        resources = (0, 1, 2) if self.has_cpu_or_memory_quota else (0,)
        for level in self.paths[project]:
            for resource in resources:
                bound = bounds[level][resource]
                if bound == math.inf or not amounts[resource]:
                    continue
                has = 0 if empty else held[level][resource] + (releasing[level][resource] if releasing else 0)
                if has + amounts[resource] > bound:
                    return ExceededQuota(level, has, bound, resource)
        return None

    def exceeded_quota(
        self,
        project: ProjectId,
        user: UserId,
        amounts: ResourceVector,
        preemptible: bool,
        *,
        empty: bool = False,
        assume_released: AssumeReleased = AssumeReleased.NONE,
    ) -> ExceededQuota | None:
        """Return the limit, or for non-preemptible work the guarantee, that ``amounts`` more would exceed.

        ``empty``: with nothing held.
        """
        limit = self.exceeded_limit(project, amounts, empty=empty, assume_released=assume_released)
        if limit is None:
            limit = self.exceeded_user_limit(
                project, user, amounts, empty=empty, assume_released=assume_released
            )
        if limit is not None or preemptible:
            return limit
        return self.exceeded_guarantee(project, amounts, empty=empty, assume_released=assume_released)

    def is_blocked(
        self,
        project: ProjectId,
        user: UserId,
        amounts: ResourceVector,
        preemptible: bool,
        *,
        empty: bool = False,
        assume_released: AssumeReleased = AssumeReleased.NONE,
    ) -> bool:
        """Return True if a quota blocks ``amounts`` more; ``empty``: with nothing held."""
        return (
            self.exceeded_quota(
                project, user, amounts, preemptible, empty=empty, assume_released=assume_released
            )
            is not None
        )

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
