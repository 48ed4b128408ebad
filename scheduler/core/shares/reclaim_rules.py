"""The rules of guarantees and fair shares for reclaiming, per resource.

*May a project reclaim at all?* With the job it stays within its fair share in each resource, and its
non-preemptible work within the guarantee (``may_reclaim``).

*May it evict these victims?* (``ReclaimCheck``) Compare the reclaimer's and the victim's projects just below
their common ancestor. Each victim, counting earlier victims as gone, needs one of two reasons:

1. *over share*: the victim's project holds more than its entitlement (``Entitlement.entitled``);
2. *guarantee*: the reclaimer with the job stays within its guarantee in every resource, and the victim's
   project holds more than its guarantee.

Afterwards each level of the reclaimer's path is compared with each sibling that lost resources by saturation:
held / fair share (0 / 0 is 0, something / 0 is infinite, anything / no bound is 0). Reclaiming is refused if
the reclaimer would be more than saturated, and no less so than the sibling. Non-preemptible work has to fit
inside the guarantee of each level.

Work inside a guarantee is protected at every level of its project's path below the common ancestor. Source:
docs/decisions/reclaim-rules.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from scheduler.core.model.resources import Entitlement, ResourceVector
from scheduler.core.model.snapshot import ProjectId, QuotaRow

Key = TypeVar("Key", bound=str)
Involved = tuple[bool, bool, bool]


def may_reclaim(
    entitlement: Entitlement,
    held: ResourceVector,
    held_non_preemptible: ResourceVector,
    requested: ResourceVector,
    preemptible: bool,
) -> bool:
    """Return True if a project may reclaim from other projects for a job of ``requested``."""
    if not held.add(requested).fits_in(entitlement.fair_share):
        return False
    return preemptible or held_non_preemptible.add(requested).fits_in(entitlement.guaranteed)


def is_over_share(
    entitlement: Entitlement, held: ResourceVector, counted: Involved = (True, True, True)
) -> bool:
    """Return True if a project holds more than its entitlement in a counted resource."""
    return _any_of(held.exceeds_each(entitlement.entitled), counted)


def is_over_guarantee(
    entitlement: Entitlement, held: ResourceVector, counted: Involved = (True, True, True)
) -> bool:
    """Return True if a project holds more than its guarantee in a counted resource."""
    return _any_of(held.exceeds_each(entitlement.guaranteed), counted)


def is_within_guarantee(entitlement: Entitlement, held: ResourceVector, requested: ResourceVector) -> bool:
    """Return True if a project with ``requested`` more stays within its guarantee in every resource."""
    return held.add(requested).fits_in(entitlement.guaranteed)


def may_reclaim_from(
    victim: Entitlement,
    victim_held: ResourceVector,
    reclaimer: Entitlement,
    reclaimer_held: ResourceVector,
    requested: ResourceVector,
    counted: Involved = (True, True, True),
) -> bool:
    """Return True if one of the two reasons lets ``reclaimer`` evict work of ``victim``."""
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
    """Return False if ``victim`` certainly has nothing to reclaim for ``requested``.

    For a reclaimer within its guarantee, the victim must exceed its guarantee in a requested resource, or
    reach it in all of them; for other reclaimers it must exceed its entitlement.
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


def reclaim_min_runtime_s(
    path: Sequence[ProjectId], quotas: Mapping[ProjectId, QuotaRow], default_s: float
) -> float:
    """Return how long jobs of a project run before they may be reclaimed: the first setting on its path."""
    own_s = (quotas[project].reclaim_min_runtime_s for project in path)
    return next((each_s for each_s in own_s if each_s is not None), default_s)


def saturation(held: float, fair_share: float) -> float:
    """Return held / fair share: 1.0 is exactly full."""
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
    """Return True if the reclaimer is, per involved resource, at most full or less full than the sibling.

    Resources in which the sibling's share is zero or unbounded are not compared.
    """
    for i in (0, 1, 2):
        if involved[i] and 0 < sibling_share[i] < math.inf:
            ratio = saturation(held[i], fair_share[i])
            if ratio > 1 and ratio >= saturation(sibling_held[i], sibling_share[i]):
                return False
    return True


def diverging_paths(first: Sequence[Key], second: Sequence[Key]) -> tuple[Sequence[Key], Sequence[Key]]:
    """Return two paths (leaf first) up to, and without, their common ancestor.

    If one path contains the other, its remainder is empty: such projects do not reclaim from each other.
    """
    common = 0
    while common < min(len(first), len(second)) and first[-1 - common] == second[-1 - common]:
        common += 1
    return first[: len(first) - common], second[: len(second) - common]


@dataclass(slots=True)
class ReclaimCheck(Generic[Key]):
    """One reclaimer and the victims chosen so far; ``held`` itself is not changed.

    Call ``allows`` before each victim, then ``add_victim``, and finally ``is_balanced``.
    """

    paths: Mapping[Key, Sequence[Key]]
    entitlements: Mapping[Key, Entitlement]
    held: Mapping[Key, ResourceVector]
    held_non_preemptible: Mapping[Key, ResourceVector]
    reclaimer: Key
    requested: ResourceVector
    preemptible: bool
    _remaining: dict[Key, ResourceVector] = field(default_factory=dict)
    """What each project that lost resources still holds."""
    _involved: dict[Key, Involved] = field(default_factory=dict)
    _paths_by_leaf: dict[Key, tuple[Key, Sequence[Key]]] = field(default_factory=dict)

    def may_have_reclaimable(self, leaf: Key) -> bool:
        """Return False if certainly no work of ``leaf`` can be reclaimed."""
        reclaimer, victims = self._levels(leaf)
        if not victims:
            return False
        owed, held = self.entitlements, self.held
        return may_have_reclaimable(
            owed[victims[-1]], held[victims[-1]], owed[reclaimer], held[reclaimer], self.requested
        )

    def allows(self, leaf: Key) -> bool:
        """Return True if one of the two reasons allows evicting one more piece of work of ``leaf``."""
        reclaimer, victims = self._levels(leaf)
        if not victims:
            return False
        owed, left = self.entitlements, self._remaining
        victim = victims[-1]
        if not may_reclaim_from(
            owed[victim],
            left.get(victim) or self.held[victim],
            owed[reclaimer],
            self.held[reclaimer],
            self.requested,
            _given(self.requested),
        ):
            return False
        return all(
            is_over_guarantee(owed[level], left.get(level) or self.held[level], _given(self.requested))
            for level in victims[:-1]
        )

    def add_victim(self, leaf: Key, amounts: ResourceVector) -> None:
        """Subtract one victim, from its project up to the root."""
        gives = _given(amounts)
        for level in self.paths[leaf]:
            self._remaining[level] = (self._remaining.get(level) or self.held[level]).subtract(amounts)
            before = self._involved.get(level, (False, False, False))
            self._involved[level] = (before[0] or gives[0], before[1] or gives[1], before[2] or gives[2])

    def is_balanced(self) -> bool:
        """Return True if the reclaimer, with its job and without the victims, meets the rules."""
        owed, asks = self.entitlements, _given(self.requested)
        for depth, level in enumerate(self.paths[self.reclaimer]):
            now = (self._remaining.get(level) or self.held[level]).add(self.requested)
            parent = tuple(self.paths[self.reclaimer][depth + 1 : depth + 2])
            for sibling, left in self._remaining.items():
                if sibling == level or tuple(self.paths[sibling][1:2]) != parent:
                    continue
                gave = self._involved[sibling]
                involved = (gave[0] or asks[0], gave[1] or asks[1], gave[2] or asks[2])
                if not is_less_saturated(
                    now, owed[level].fair_share, left, owed[sibling].fair_share, involved
                ):
                    return False
            if not self.preemptible and not is_within_guarantee(
                owed[level], self.held_non_preemptible[level], self.requested
            ):
                return False
        return True

    def _levels(self, leaf: Key) -> tuple[Key, Sequence[Key]]:
        """Return the reclaimer's project below the common ancestor, and the victim's path up to there."""
        found = self._paths_by_leaf.get(leaf)
        if found is None:
            reclaimers, victims = diverging_paths(self.paths[self.reclaimer], self.paths[leaf])
            found = self._paths_by_leaf[leaf] = (
                reclaimers[-1] if reclaimers else self.paths[self.reclaimer][0],
                victims if reclaimers else (),
            )
        return found


def _given(amounts: ResourceVector) -> Involved:
    return amounts[0] > 0, amounts[1] > 0, amounts[2] > 0


def _any_of(flags: Involved, counted: Involved) -> bool:
    return (flags[0] and counted[0]) or (flags[1] and counted[1]) or (flags[2] and counted[2])
