"""Whose turn it is between siblings, as a key to sort by: one comparison after the other, per resource.

Smaller goes first: who with the job stays within its fair share (KAI-Scheduler: who is not over it already); who
with the job stays within its guarantee; higher priority; who does not touch a resource of which nothing is its
own; lower dominant share counting the job (and without the victims, while room is made); lower without the job;
smaller share; older. (KAI-Scheduler's proportion plug-in compares in the same order.)

The dominant share is the largest, over the resources, of held / what is its own (``Owed.claimable``); where
that has no bound the capacity stands for it.
"""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, TypeVar

from scheduler.core.entitlement import within_guarantee
from scheduler.core.resources import NOTHING, ROUNDING, Amounts, Owed

Key = TypeVar("Key", bound=str)

NO_SHARE_FACTOR = 1_000.0
"""What is held of a resource of which nothing is its own counts this many times over."""


class SiblingKey(NamedTuple, Generic[Key]):
    """Smaller goes first; the fields stand in the order in which they decide."""

    over_fair_share: bool
    over_guarantee_with_job: bool
    priority_down: int
    takes_where_nothing_is_owed: bool
    share_with_job: float
    share_without_job: float
    claimable: Amounts
    created_s: float
    project: Key


def sibling_key(
    project: Key,
    owed: Owed,
    held: Amounts,
    job: Amounts,
    capacity: Amounts,
    leaving: Amounts = NOTHING,
    *,
    involved_only: bool = True,
) -> SiblingKey[Key]:
    """Where ``project`` stands among its siblings when its next job asks for ``job``.

    ``leaving`` is what the victims held of it that would make room for the job. ``involved_only``: it is over
    its fair share when it is so in a resource that the job asks for; otherwise (KAI-Scheduler) only when it is
    so in all three.
    """
    with_job = held.plus(job)
    return SiblingKey(
        over_in_any(owed, with_job, job) if involved_only else over_in_all(owed, held),
        not within_guarantee(owed, held, job),
        -owed.priority,
        _takes_where_nothing_is_owed(owed, with_job),
        dominant_share(owed, with_job.minus(leaving), capacity),
        dominant_share(owed, held, capacity),
        owed.claimable,
        owed.created_s,
        project,
    )


def over_in_any(owed: Owed, held: Amounts, job: Amounts) -> bool:
    """True when ``held`` is above the fair share in a resource that ``job`` asks for."""
    over = held.beyond(owed.fair_share)
    return (job[0] > 0 and over[0]) or (job[1] > 0 and over[1]) or (job[2] > 0 and over[2])


def over_in_all(owed: Owed, held: Amounts) -> bool:
    """True when ``held`` is above the fair share in every resource."""
    return all(held.beyond(owed.fair_share))


def dominant_share(owed: Owed, held: Amounts, capacity: Amounts) -> float:
    """The largest part that ``held`` is of what is the project's own, over the resources; never below 0."""
    largest = 0.0
    for i in (0, 1, 2):
        own = owed.claimable[i]
        if own == math.inf:
            own = capacity[i]
        largest = max(largest, held[i] / own if own > 0 else held[i] * NO_SHARE_FACTOR)
    return largest


def _takes_where_nothing_is_owed(owed: Owed, with_job: Amounts) -> bool:
    """True when the job, or what is held already, uses a resource of which nothing is the project's own."""
    own = owed.claimable
    return (
        (own[0] == 0 and with_job[0] > ROUNDING)
        or (own[1] == 0 and with_job[1] > ROUNDING)
        or (own[2] == 0 and with_job[2] > ROUNDING)
    )
