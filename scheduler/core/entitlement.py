"""Who may start, and who may take from whom: the rules of limits, guarantees and shares, per resource.

*May it start?* With the job, every project from the leaf to the root stays within its limit, and the work
that is not preemptible within its guarantee (``in_the_way``).

*May it ask others to leave at all?* With the job its own project stays within its fair share in each
resource, and non-preemptible work within the guarantee (``may_ask``).

*May it take these?* (``Taking``) Compare the two projects just below their common ancestor, taker and giver.
Each victim in turn, as things stand after the ones before it, needs one of two reasons:

1. *keep to the shares*: the giver holds more than is its own (``Owed.claimable``);
2. *give what is guaranteed*: the taker with the job stays within its guarantee in every resource, and the
   giver holds more than its guarantee.

Afterwards, at each level of the taker's path, it is compared with each sibling that gave: by saturation, which
is held / fair share (0 / 0 is 0, something / 0 is infinite, anything / no bound is 0). A taker that would be
more than saturated, and no less so than the sibling, may not. Non-preemptible work has to fit inside the
guarantee of each level.

The two rules of KAI-Scheduler's proportion plug-in are these; ours are stricter in two points, which
``Reach`` turns on and off (docs/decisions/reclaim-rules.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from scheduler.core.resources import ROUNDING, Amounts, Owed

Key = TypeVar("Key", bound=str)
Involved = tuple[bool, bool, bool]


class Reach(NamedTuple):
    """How far a taker's arm reaches; the defaults are ours.

    ``involved_only``: a giver counts as over its share or its guarantee only by resources that the taker asks
    for. ``every_level``: work inside a guarantee is never taken, at no level of the giver's path below the
    common ancestor; otherwise only the topmost of them is looked at.
    """

    involved_only: bool = True
    every_level: bool = True

    @classmethod
    def kai(cls) -> Reach:
        """KAI-Scheduler's habit: any resource counts, and only the topmost level is looked at."""
        return cls(involved_only=False, every_level=False)


OURS = Reach()


class Obstacle(NamedTuple, Generic[Key]):
    """A number that stops a job: whose it is, whether it is the guarantee (or the limit), which resources."""

    project: Key
    is_guarantee: bool
    resources: Involved


class Victim(NamedTuple, Generic[Key]):
    """Work that may be asked to leave: one task beyond a job's minimum, or all the others of the job at once."""

    leaf: Key
    amounts: Amounts


def exceeded(held: Amounts, asked: Amounts, bound: Amounts) -> Involved:
    """Which resources would pass ``bound`` with ``asked`` more; what is not asked for is not looked at."""
    return (
        asked[0] > 0 and held[0] + asked[0] > bound[0] + ROUNDING,
        asked[1] > 0 and held[1] + asked[1] > bound[1] + ROUNDING,
        asked[2] > 0 and held[2] + asked[2] > bound[2] + ROUNDING,
    )


def in_the_way(
    path: Sequence[Key],
    owed: Mapping[Key, Owed],
    held: Mapping[Key, Amounts],
    held_firm: Mapping[Key, Amounts],
    asked: Amounts,
    preemptible: bool,
) -> Obstacle[Key] | None:
    """The first number on ``path`` (leaf first) that ``asked`` more would pass: limits, then guarantees.

    ``held_firm`` is what non-preemptible work holds; only such work is measured by guarantees.
    """
    for level in path:
        if any(over := exceeded(held[level], asked, owed[level].limit)):
            return Obstacle(level, False, over)
    if not preemptible:
        for level in path:
            if any(over := exceeded(held_firm[level], asked, owed[level].guaranteed)):
                return Obstacle(level, True, over)
    return None


def may_ask(owed: Owed, held: Amounts, held_firm: Amounts, asked: Amounts, preemptible: bool) -> bool:
    """True when a project may ask other projects to leave for a job of ``asked``."""
    if not held.plus(asked).fits_in(owed.fair_share):
        return False
    return preemptible or held_firm.plus(asked).fits_in(owed.guaranteed)


def over_share(owed: Owed, held: Amounts, counted: Involved = (True, True, True)) -> bool:
    """True when a project holds more than its own in a counted resource: others may keep it to its share."""
    return _any_of(held.beyond(owed.claimable), counted)


def over_guarantee(owed: Owed, held: Amounts, counted: Involved = (True, True, True)) -> bool:
    """True when a project holds more than it is promised in a counted resource."""
    return _any_of(held.beyond(owed.guaranteed), counted)


def within_guarantee(owed: Owed, held: Amounts, asked: Amounts) -> bool:
    """True when a project with ``asked`` more stays within its guarantee in every resource."""
    return held.plus(asked).fits_in(owed.guaranteed)


def may_give(
    giver: Owed,
    giver_held: Amounts,
    taker: Owed,
    taker_held: Amounts,
    asked: Amounts,
    counted: Involved = (True, True, True),
) -> bool:
    """True when one of the two reasons lets ``taker`` take one more piece of work from ``giver``."""
    if over_share(giver, giver_held, counted):
        return True
    return within_guarantee(taker, taker_held, asked) and over_guarantee(giver, giver_held, counted)


def worth_trying(giver: Owed, giver_held: Amounts, taker: Owed, taker_held: Amounts, asked: Amounts) -> bool:
    """A quick look before any victim is chosen: False when ``giver`` has nothing that ``asked`` could use.

    A taker within its guarantee looks for somebody over the guarantee in a resource that it asks for, or at it
    in all of them; any other taker for somebody over the share.
    """
    if not within_guarantee(taker, taker_held, asked):
        return over_share(giver, giver_held)
    below = False
    for amount, has, promised in zip(asked, giver_held, giver.guaranteed, strict=True):
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


def less_saturated(
    held: Amounts, fair_share: Amounts, sibling_held: Amounts, sibling_share: Amounts, involved: Involved
) -> bool:
    """True when in each involved resource a taker is at most full, or less so than the sibling that gave.

    A sibling with nothing to its name, or with no bound on it, is not compared.
    """
    for i in (0, 1, 2):
        if involved[i] and 0 < sibling_share[i] < math.inf:
            ratio = saturation(held[i], fair_share[i])
            if ratio > 1 and ratio >= saturation(sibling_held[i], sibling_share[i]):
                return False
    return True


def sides(mine: Sequence[Key], theirs: Sequence[Key]) -> tuple[Sequence[Key], Sequence[Key]]:
    """Two paths (leaf first) up to, and without, their common ancestor.

    Where one path is part of the other, nothing is left of it: such projects do not take from each other.
    """
    common = 0
    while common < min(len(mine), len(theirs)) and mine[-1 - common] == theirs[-1 - common]:
        common += 1
    return mine[: len(mine) - common], theirs[: len(theirs) - common]


class Taking(Generic[Key]):
    """One taker and the victims it has taken so far, on paper: ``held`` itself is not changed.

    Ask ``may_take`` before each victim, tell ``take``, and in the end ask ``balanced``.
    """

    def __init__(
        self,
        paths: Mapping[Key, Sequence[Key]],
        owed: Mapping[Key, Owed],
        held: Mapping[Key, Amounts],
        held_firm: Mapping[Key, Amounts],
        taker: Key,
        asked: Amounts,
        preemptible: bool,
        reach: Reach = OURS,
    ) -> None:
        self._paths = paths
        self._owed = owed
        self._held = held
        self._held_firm = held_firm
        self._path = paths[taker]
        self._asked = asked
        self._preemptible = preemptible
        self._every_level = reach.every_level
        self._asks: Involved = (asked[0] > 0, asked[1] > 0, asked[2] > 0)
        self._counted: Involved = self._asks if reach.involved_only else (True, True, True)
        self._left: dict[Key, Amounts] = {}  # what each project that gave still holds
        self._involved: dict[Key, Involved] = {}
        self._sides: dict[Key, tuple[Key, Sequence[Key]]] = {}

    def worth_trying(self, leaf: Key) -> bool:
        """A quick look before victims are chosen: False when no work of ``leaf`` could ever be taken."""
        taker, givers = self._levels(leaf)
        if not givers:
            return False
        owed, held = self._owed, self._held
        return worth_trying(owed[givers[-1]], held[givers[-1]], owed[taker], held[taker], self._asked)

    def may_take(self, leaf: Key) -> bool:
        """True when one of the reasons lets the taker take one more piece of work of ``leaf``."""
        taker, givers = self._levels(leaf)
        if not givers:
            return False
        owed, left = self._owed, self._left
        giver = givers[-1]
        if not may_give(
            owed[giver],
            left.get(giver) or self._held[giver],
            owed[taker],
            self._held[taker],
            self._asked,
            self._counted,
        ):
            return False
        if not self._every_level:
            return True
        return all(
            over_guarantee(owed[level], left.get(level) or self._held[level], self._counted)
            for level in givers[:-1]
        )

    def take(self, leaf: Key, amounts: Amounts) -> None:
        """Count one victim as gone, from its project up to the root."""
        gives: Involved = (amounts[0] > 0, amounts[1] > 0, amounts[2] > 0)
        for level in self._paths[leaf]:
            self._left[level] = (self._left.get(level) or self._held[level]).minus(amounts)
            before = self._involved.get(level, (False, False, False))
            self._involved[level] = (before[0] or gives[0], before[1] or gives[1], before[2] or gives[2])

    def balanced(self) -> bool:
        """True when the taker, with its job and without the victims, stays in its place at every level."""
        owed, asks = self._owed, self._asks
        for depth, level in enumerate(self._path):
            now = (self._left.get(level) or self._held[level]).plus(self._asked)
            parent = tuple(self._path[depth + 1 : depth + 2])
            for sibling, left in self._left.items():
                if sibling == level or tuple(self._paths[sibling][1:2]) != parent:
                    continue
                gave = self._involved[sibling]
                involved = (gave[0] or asks[0], gave[1] or asks[1], gave[2] or asks[2])
                if not less_saturated(now, owed[level].fair_share, left, owed[sibling].fair_share, involved):
                    return False
            if not self._preemptible and not within_guarantee(
                owed[level], self._held_firm[level], self._asked
            ):
                return False
        return True

    def _levels(self, leaf: Key) -> tuple[Key, Sequence[Key]]:
        """The taker just below the common ancestor, and the giver's path from its leaf up to there."""
        found = self._sides.get(leaf)
        if found is None:
            takers, givers = sides(self._path, self._paths[leaf])
            found = self._sides[leaf] = (takers[-1] if takers else self._path[0], givers if takers else ())
        return found


def may_take_all(taking: Taking[Key], victims: Iterable[Victim[Key]]) -> bool:
    """True when all ``victims``, one after the other, may be taken, and the outcome is balanced."""
    for victim in victims:
        if not taking.may_take(victim.leaf):
            return False
        taking.take(victim.leaf, victim.amounts)
    return taking.balanced()


def _any_of(flags: Involved, counted: Involved) -> bool:
    return (flags[0] and counted[0]) or (flags[1] and counted[1]) or (flags[2] and counted[2])
