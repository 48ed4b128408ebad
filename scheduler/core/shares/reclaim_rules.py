"""Who may start, and who may take from whom: the rules of limits, guarantees and shares, per resource.

*May it start?* With the job, every project from the leaf to the root stays within its limit, and the work
that is not preemptible within its guarantee (``in_the_way``).

*May it ask others to leave at all?* With the job its own project stays within its fair share in each
resource, and non-preemptible work within the guarantee (``may_ask``).

*May it take these?* (``Taking``) Compare the two projects just below their common ancestor, reclaimer and victim.
Each victim in turn, as things stand after the ones before it, needs one of two reasons:

1. *keep to the shares*: the victim holds more than is its own (``Owed.claimable``);
2. *give what is guaranteed*: the reclaimer with the job stays within its guarantee in every resource, and the
   victim holds more than its guarantee.

Afterwards, at each level of the reclaimer's path, it is compared with each sibling that gave: by saturation, which
is held / fair share (0 / 0 is 0, something / 0 is infinite, anything / no bound is 0). A reclaimer that would be
more than saturated, and no less so than the sibling, may not. Non-preemptible work has to fit inside the
guarantee of each level.

The two rules of KAI-Scheduler's proportion plug-in are these; ours are stricter in two points, which
``Reach`` turns on and off (docs/decisions/reclaim-rules.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from scheduler.core.model.resources import ROUNDING, Entitlement, ResourceVector

Key = TypeVar("Key", bound=str)
Involved = tuple[bool, bool, bool]


class ReclaimScope(NamedTuple):
    """How far a reclaimer's arm reaches; the defaults are ours.

    ``involved_only``: a victim counts as over its share or its guarantee only by resources that the reclaimer asks
    for. ``every_level``: work inside a guarantee is never taken, at no level of the victim's path below the
    common ancestor; otherwise only the topmost of them is looked at.
    """

    involved_only: bool = True
    every_level: bool = True

    @classmethod
    def kai(cls) -> ReclaimScope:
        """KAI-Scheduler's habit: any resource counts, and only the topmost level is looked at."""
        return cls(involved_only=False, every_level=False)


DEFAULT_SCOPE = ReclaimScope()


class QuotaBound(NamedTuple, Generic[Key]):
    """A number that stops a job: whose it is, whether it is the guarantee (or the limit), which resources."""

    project: Key
    is_guarantee: bool
    resources: Involved


class ReclaimVictim(NamedTuple, Generic[Key]):
    """Work that may be asked to leave: one task beyond a job's minimum, or all the others of the job at once."""

    leaf: Key
    amounts: ResourceVector


def exceeded_resources(held: ResourceVector, asked: ResourceVector, bound: ResourceVector) -> Involved:
    """Which resources would pass ``bound`` with ``asked`` more; what is not asked for is not looked at."""
    return (
        asked[0] > 0 and held[0] + asked[0] > bound[0] + ROUNDING,
        asked[1] > 0 and held[1] + asked[1] > bound[1] + ROUNDING,
        asked[2] > 0 and held[2] + asked[2] > bound[2] + ROUNDING,
    )


def first_exceeded_bound(
    path: Sequence[Key],
    entitlements: Mapping[Key, Entitlement],
    held: Mapping[Key, ResourceVector],
    held_non_preemptible: Mapping[Key, ResourceVector],
    requested: ResourceVector,
    preemptible: bool,
) -> QuotaBound[Key] | None:
    """The first number on ``path`` (leaf first) that ``asked`` more would pass: limits, then guarantees.

    ``held_firm`` is what non-preemptible work holds; only such work is measured by guarantees.
    """
    for level in path:
        if any(over := exceeded_resources(held[level], requested, entitlements[level].limit)):
            return QuotaBound(level, False, over)
    if not preemptible:
        for level in path:
            if any(
                over := exceeded_resources(
                    held_non_preemptible[level], requested, entitlements[level].guaranteed
                )
            ):
                return QuotaBound(level, True, over)
    return None


def may_reclaim(
    entitlement: Entitlement,
    held: ResourceVector,
    held_non_preemptible: ResourceVector,
    requested: ResourceVector,
    preemptible: bool,
) -> bool:
    """True when a project may ask other projects to leave for a job of ``asked``."""
    if not held.add(requested).fits_in(entitlement.fair_share):
        return False
    return preemptible or held_non_preemptible.add(requested).fits_in(entitlement.guaranteed)


def is_over_share(
    entitlement: Entitlement, held: ResourceVector, counted: Involved = (True, True, True)
) -> bool:
    """True when a project holds more than its own in a counted resource: others may keep it to its share."""
    return _any_of(held.exceeds_each(entitlement.entitled), counted)


def is_over_guarantee(
    entitlement: Entitlement, held: ResourceVector, counted: Involved = (True, True, True)
) -> bool:
    """True when a project holds more than it is promised in a counted resource."""
    return _any_of(held.exceeds_each(entitlement.guaranteed), counted)


def is_within_guarantee(entitlement: Entitlement, held: ResourceVector, requested: ResourceVector) -> bool:
    """True when a project with ``asked`` more stays within its guarantee in every resource."""
    return held.add(requested).fits_in(entitlement.guaranteed)


def may_reclaim_from(
    victim: Entitlement,
    victim_held: ResourceVector,
    reclaimer: Entitlement,
    reclaimer_held: ResourceVector,
    requested: ResourceVector,
    counted: Involved = (True, True, True),
) -> bool:
    """True when one of the two reasons lets ``reclaimer`` take one more piece of work from ``victim``."""
    if is_over_share(victim, victim_held, counted):
        return True
    return is_within_guarantee(reclaimer, reclaimer_held, requested) and is_over_guarantee(
        victim, victim_held, counted
    )


def may_have_reclaimable(
    victim: Entitlement,
    victim_held: ResourceVector,
    reclaimer: Entitlement,
    reclaimer_held: ResourceVector,
    requested: ResourceVector,
) -> bool:
    """A quick look before any victim is chosen: False when ``victim`` has nothing that ``asked`` could use.

    A reclaimer within its guarantee looks for somebody over the guarantee in a resource that it asks for, or at it
    in all of them; any other reclaimer for somebody over the share.
    """
    if not is_within_guarantee(reclaimer, reclaimer_held, requested):
        return is_over_share(victim, victim_held)
    below = False
    for amount, has, promised in zip(requested, victim_held, victim.guaranteed, strict=True):
        if amount > 0 and promised != math.inf:
            if has > promised:
                return True
            below = below or has < promised
    return not below


def saturation(held: float, fair_share: float) -> float:
    """How full a share is: 1.0 is exactly full."""
    if fair_share == 0:
        return math.inf if held > 0 else 0.0
    return held / fair_share


def is_less_saturated(
    held: ResourceVector,
    fair_share: ResourceVector,
    sibling_held: ResourceVector,
    sibling_share: ResourceVector,
    involved: Involved,
) -> bool:
    """True when in each involved resource a reclaimer is at most full, or less so than the sibling that gave.

    A sibling with nothing to its name, or with no bound on it, is not compared.
    """
    for i in (0, 1, 2):
        if involved[i] and 0 < sibling_share[i] < math.inf:
            ratio = saturation(held[i], fair_share[i])
            if ratio > 1 and ratio >= saturation(sibling_held[i], sibling_share[i]):
                return False
    return True


def diverging_paths(first: Sequence[Key], second: Sequence[Key]) -> tuple[Sequence[Key], Sequence[Key]]:
    """Two paths (leaf first) up to, and without, their common ancestor.

    Where one path is part of the other, nothing is left of it: such projects do not take from each other.
    """
    common = 0
    while common < min(len(first), len(second)) and first[-1 - common] == second[-1 - common]:
        common += 1
    return first[: len(first) - common], second[: len(second) - common]


class ReclaimCheck(Generic[Key]):
    """One reclaimer and the victims it has taken so far, on paper: ``held`` itself is not changed.

    Ask ``may_take`` before each victim, tell ``take``, and in the end ask ``balanced``.
    """

    def __init__(
        self,
        paths: Mapping[Key, Sequence[Key]],
        entitlements: Mapping[Key, Entitlement],
        held: Mapping[Key, ResourceVector],
        held_non_preemptible: Mapping[Key, ResourceVector],
        reclaimer: Key,
        requested: ResourceVector,
        preemptible: bool,
        scope: ReclaimScope = DEFAULT_SCOPE,
    ) -> None:
        self._paths = paths
        self._entitlements = entitlements
        self._held = held
        self._held_non_preemptible = held_non_preemptible
        self._path = paths[reclaimer]
        self._requested = requested
        self._preemptible = preemptible
        self._every_level = scope.every_level
        self._requested_resources: Involved = (requested[0] > 0, requested[1] > 0, requested[2] > 0)
        self._counted: Involved = self._requested_resources if scope.involved_only else (True, True, True)
        self._remaining: dict[Key, ResourceVector] = {}  # what each project that gave still holds
        self._involved: dict[Key, Involved] = {}
        self._paths_by_leaf: dict[Key, tuple[Key, Sequence[Key]]] = {}

    def may_have_reclaimable(self, leaf: Key) -> bool:
        """A quick look before victims are chosen: False when no work of ``leaf`` could ever be taken."""
        reclaimer, victims = self._levels(leaf)
        if not victims:
            return False
        owed, held = self._entitlements, self._held
        return may_have_reclaimable(
            owed[victims[-1]], held[victims[-1]], owed[reclaimer], held[reclaimer], self._requested
        )

    def allows(self, leaf: Key) -> bool:
        """True when one of the reasons lets the reclaimer take one more piece of work of ``leaf``."""
        reclaimer, victims = self._levels(leaf)
        if not victims:
            return False
        owed, left = self._entitlements, self._remaining
        victim = victims[-1]
        if not may_reclaim_from(
            owed[victim],
            left.get(victim) or self._held[victim],
            owed[reclaimer],
            self._held[reclaimer],
            self._requested,
            self._counted,
        ):
            return False
        if not self._every_level:
            return True
        return all(
            is_over_guarantee(owed[level], left.get(level) or self._held[level], self._counted)
            for level in victims[:-1]
        )

    def add_victim(self, leaf: Key, amounts: ResourceVector) -> None:
        """Count one victim as gone, from its project up to the root."""
        gives: Involved = (amounts[0] > 0, amounts[1] > 0, amounts[2] > 0)
        for level in self._paths[leaf]:
            self._remaining[level] = (self._remaining.get(level) or self._held[level]).subtract(amounts)
            before = self._involved.get(level, (False, False, False))
            self._involved[level] = (before[0] or gives[0], before[1] or gives[1], before[2] or gives[2])

    def is_balanced(self) -> bool:
        """True when the reclaimer, with its job and without the victims, stays in its place at every level."""
        owed, asks = self._entitlements, self._requested_resources
        for depth, level in enumerate(self._path):
            now = (self._remaining.get(level) or self._held[level]).add(self._requested)
            parent = tuple(self._path[depth + 1 : depth + 2])
            for sibling, left in self._remaining.items():
                if sibling == level or tuple(self._paths[sibling][1:2]) != parent:
                    continue
                gave = self._involved[sibling]
                involved = (gave[0] or asks[0], gave[1] or asks[1], gave[2] or asks[2])
                if not is_less_saturated(
                    now, owed[level].fair_share, left, owed[sibling].fair_share, involved
                ):
                    return False
            if not self._preemptible and not is_within_guarantee(
                owed[level], self._held_non_preemptible[level], self._requested
            ):
                return False
        return True

    def _levels(self, leaf: Key) -> tuple[Key, Sequence[Key]]:
        """The reclaimer just below the common ancestor, and the victim's path from its leaf up to there."""
        found = self._paths_by_leaf.get(leaf)
        if found is None:
            reclaimers, victims = diverging_paths(self._path, self._paths[leaf])
            found = self._paths_by_leaf[leaf] = (
                reclaimers[-1] if reclaimers else self._path[0],
                victims if reclaimers else (),
            )
        return found


def allows_all(check: ReclaimCheck[Key], victims: Iterable[ReclaimVictim[Key]]) -> bool:
    """True when all ``victims``, one after the other, may be taken, and the outcome is balanced."""
    for victim in victims:
        if not check.allows(victim.leaf):
            return False
        check.add_victim(victim.leaf, victim.amounts)
    return check.is_balanced()


def _any_of(flags: Involved, counted: Involved) -> bool:
    return (flags[0] and counted[0]) or (flags[1] and counted[1]) or (flags[2] and counted[2])
