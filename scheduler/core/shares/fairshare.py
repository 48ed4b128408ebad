"""Fair share: divide one total among siblings, level by level, recording every step.

With T the total, g the guarantee, l the limit,
r the held and requested amount, W the weight and u the past usage over the capacity:

1. ``fs = min(g, min(l, r))``; guarantees are granted even if they exceed the total, and then the rest is 0.
   An unlimited guarantee counts as the total.
2. The rest, one priority level after the other (high first), in rounds:
   ``n = W / sum(W of the unmet)``, ``w = max(0, n + k (n - u))``, ``share = rest * w / sum(w)``.
   A sibling that needs less takes its need; others take whole units (floor) and keep the fraction.
   Another round follows while a sibling took less than its share.
3. What is left at a level is given in single units to the largest fraction, then the older sibling.

Each resource is divided separately. Source: docs/decisions/reclaim-rules.md.

Past usage decays with ``usage_half_life_s``. It also orders the users of a project.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from scheduler.core.model.plan import ShareStep
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import PoolId, ProjectId, Snapshot, UserId


def usage_over_capacity(gpu_seconds: float, capacity_milli: int, usage_half_life_s: float) -> float:
    """Return ``u`` of the fair share: 1.0 is a project that has always held the whole pool."""
    if capacity_milli <= 0:
        return 0.0
    return gpu_seconds / (capacity_milli / 1000 * usage_half_life_s / math.log(2))


def project_usage(
    snapshot: Snapshot,
    pool: PoolId,
    ancestors: Mapping[ProjectId, tuple[ProjectId, ...]],
    capacity_milli: int,
    policy: Policy,
) -> dict[ProjectId, float]:
    """Return ``u`` of each project in ``pool``, with the usage of its descendants."""
    seconds: dict[ProjectId, list[float]] = defaultdict(list)
    for row in snapshot.usage:
        if row.pool == pool:
            for project in ancestors[row.project]:
                seconds[project].append(row.gpu_seconds)
    return {
        project: usage_over_capacity(math.fsum(rows), capacity_milli, policy.usage_half_life_s)
        for project, rows in seconds.items()
    }


class ProjectUsers:
    """The users of one project in one pool, least usage first (Slurm's fair tree with equal shares).

    Fair tree ranks by the level fairness ``LF = shares / usage``; with equal shares that is least usage
    first. A start adds a charge at once, so that many submissions by one user count immediately.
    """

    def __init__(self, gpu_seconds: Mapping[UserId, float], start_charge_s: float) -> None:
        self._gpu_seconds = dict(gpu_seconds)
        self._start_charge_s = start_charge_s

    def rank_key(self, user: UserId) -> tuple[float, UserId]:
        """Return the sort key of a user; smaller goes first."""
        return (self._gpu_seconds.get(user, 0.0), user)

    def charge_start(self, user: UserId, milli: int) -> None:
        self._gpu_seconds[user] = self._gpu_seconds.get(user, 0.0) + milli / 1000 * self._start_charge_s


Key = TypeVar("Key", bound=str)

ROUNDING = 1e-9
"""A share this close below a whole unit counts as that unit, to absorb float errors."""


@dataclass(frozen=True, slots=True)
class Claim(Generic[Key]):
    """The input of one sibling to a division; infinity means no bound."""

    key: Key
    guaranteed: float
    limit: float
    weight: float
    priority: int
    requested: float  # held and requested
    usage: float = 0.0  # past usage over the capacity, 0 to 1
    created: float = 0.0

    @property
    def requestable(self) -> float:
        """The most it could get."""
        return min(self.limit, self.requested)


@dataclass(slots=True)
class FairShare:
    """The share of one sibling and the steps that lead to it."""

    amount: float = 0.0
    steps: list[ShareStep] = field(default_factory=list)

    def add(self, kind: str, amount: float, **details: float) -> None:
        self.amount += amount
        self.steps.append(ShareStep(kind, amount, details))


def divide(
    total: float,
    claims: Sequence[Claim[Key]],
    usage_weight: float,
    unit: float,
) -> tuple[dict[Key, FairShare], float]:
    """Return the shares of siblings in ``total`` and the remainder that none took.

    Step 2 gives multiples of ``unit`` to siblings that need more.
    """
    shares = grant_guarantees(total, claims)
    rest = max(0.0, total - sum(share.amount for share in shares.values()))
    return shares, divide_rest(rest, claims, shares, usage_weight, unit)


def grant_guarantees(total: float, claims: Iterable[Claim[Key]]) -> dict[Key, FairShare]:
    """Step 1: grant each sibling its guarantee, up to its request; an unlimited one counts as the total."""
    shares: dict[Key, FairShare] = {}
    for claim in claims:
        share = shares[claim.key] = FairShare()
        share.add(
            "guaranteed",
            min(total if claim.guaranteed == math.inf else claim.guaranteed, claim.requestable),
            guaranteed=claim.guaranteed,
            requestable=claim.requestable,
        )
    return shares


def divide_rest(
    rest: float,
    claims: Sequence[Claim[Key]],
    shares: dict[Key, FairShare],
    usage_weight: float,
    unit: float,
) -> float:
    """Steps 2 and 3: divide the rest by priority level; return what none could take."""
    for priority in sorted({claim.priority for claim in claims}, reverse=True):
        level = sorted((c for c in claims if c.priority == priority), key=lambda c: (c.created, c.key))
        rest, fractions = _rounds(rest, level, shares, usage_weight, unit)
        rest = _remainder(rest, level, shares, fractions, unit)
    return rest


def _rounds(
    rest: float, level: Sequence[Claim[Key]], shares: dict[Key, FairShare], usage_weight: float, unit: float
) -> tuple[float, dict[Key, float]]:
    """Step 2 within one priority level."""
    fractions: dict[Key, float] = {}
    another = True
    while another and rest > 0:
        another = False
        unmet = [c for c in level if c.weight > 0 and shares[c.key].amount < c.requestable]
        weights = _round_weights(unmet, usage_weight)
        weight_sum = math.fsum(weights.values())
        if weight_sum <= 0:
            break
        given = 0.0
        for claim in unmet:
            offered = rest * weights[claim.key] / weight_sum
            need = claim.requestable - shares[claim.key].amount
            if need <= offered:
                taken = need
                another = another or need < offered
                fractions.pop(claim.key, None)
            else:
                taken = math.floor(offered / unit + ROUNDING) * unit
                if offered > taken:
                    fractions[claim.key] = offered - taken
            given += taken
            shares[claim.key].add(
                "round",
                taken,
                rest=rest,
                weight=claim.weight,
                usage=claim.usage,
                part=weights[claim.key] / weight_sum,
                offered=offered,
                need=need,
            )
        rest = max(0.0, rest - given)
    return rest, fractions


def _round_weights(unmet: Sequence[Claim[Key]], usage_weight: float) -> dict[Key, float]:
    """Return ``w`` of each unmet sibling: its part by weight, reduced by past usage."""
    total = math.fsum(claim.weight for claim in unmet)
    weights = {}
    for claim in unmet:
        part = claim.weight / total
        weights[claim.key] = max(0.0, part + usage_weight * (part - claim.usage))
    return weights


def _remainder(
    rest: float,
    level: Sequence[Claim[Key]],
    shares: dict[Key, FairShare],
    fractions: Mapping[Key, float],
    unit: float,
) -> float:
    """Step 3 within one priority level: one unit each, largest fraction first."""
    for claim in sorted(
        (c for c in level if c.key in fractions), key=lambda c: (-fractions[c.key], c.created, c.key)
    ):
        if rest <= 0:
            break
        amount = min(unit, rest, claim.requestable - shares[claim.key].amount)
        shares[claim.key].add("remainder", amount, fraction=fractions[claim.key], rest=rest)
        rest -= amount
    return rest


def divide_tree(
    total: float,
    claims: Sequence[Claim[Key]],
    parent_of: Callable[[Key], Key | None],
    usage_weight: float,
    unit: float,
) -> dict[Key, FairShare]:
    """Divide a forest: the top siblings divide ``total``, the children of each divide its share."""
    children: dict[Key | None, list[Claim[Key]]] = {}
    for claim in claims:
        children.setdefault(parent_of(claim.key), []).append(claim)
    shares: dict[Key, FairShare] = {}
    waiting: list[tuple[Key | None, float]] = [(None, total)]
    while waiting:
        parent, amount = waiting.pop()
        if parent in children:
            level, _ = divide(amount, children[parent], usage_weight, unit)
            shares |= level
            waiting.extend((key, share.amount) for key, share in level.items())
    return shares
