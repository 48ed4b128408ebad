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

from scheduler.core.model.resources import ROUNDING, ZERO, Entitlement, ResourceVector
from scheduler.core.shares.reclaim_rules import is_within_guarantee

Key = TypeVar("Key", bound=str)

UNENTITLED_FACTOR = 1_000.0
"""What is held of a resource of which nothing is its own counts this many times over."""


class SiblingKey(NamedTuple, Generic[Key]):
    """Smaller goes first; the fields stand in the order in which they decide."""

    over_fair_share: bool
    over_guarantee_with_job: bool
    negated_priority: int
    uses_unentitled_resource: bool
    share_with_job: float
    share_without_job: float
    entitled: ResourceVector
    created_s: float
    project: Key


def sibling_key(
    project: Key,
    entitlement: Entitlement,
    held: ResourceVector,
    job: ResourceVector,
    capacity: ResourceVector,
    releasing: ResourceVector = ZERO,
    *,
    involved_only: bool = True,
) -> SiblingKey[Key]:
    """Where ``project`` stands among its siblings when its next job asks for ``job``.

    ``leaving`` is what the victims held of it that would make room for the job. ``involved_only``: it is over
    its fair share when it is so in a resource that the job asks for; otherwise (KAI-Scheduler) only when it is
    so in all three.
    """
    with_job = held.add(job)
    return SiblingKey(
        is_over_in_any(entitlement, with_job, job) if involved_only else is_over_in_all(entitlement, held),
        not is_within_guarantee(entitlement, held, job),
        -entitlement.priority,
        _uses_unentitled_resource(entitlement, with_job),
        dominant_share(entitlement, with_job.subtract(releasing), capacity),
        dominant_share(entitlement, held, capacity),
        entitlement.entitled,
        entitlement.created_s,
        project,
    )


def is_over_in_any(entitlement: Entitlement, held: ResourceVector, job: ResourceVector) -> bool:
    """True when ``held`` is above the fair share in a resource that ``job`` asks for."""
    over = held.exceeds_each(entitlement.fair_share)
    return (job[0] > 0 and over[0]) or (job[1] > 0 and over[1]) or (job[2] > 0 and over[2])


def is_over_in_all(entitlement: Entitlement, held: ResourceVector) -> bool:
    """True when ``held`` is above the fair share in every resource."""
    return all(held.exceeds_each(entitlement.fair_share))


def dominant_share(entitlement: Entitlement, held: ResourceVector, capacity: ResourceVector) -> float:
    """The largest part that ``held`` is of what is the project's own, over the resources; never below 0."""
    largest = 0.0
    for i in (0, 1, 2):
        own = entitlement.entitled[i]
        if own == math.inf:
            own = capacity[i]
        largest = max(largest, held[i] / own if own > 0 else held[i] * UNENTITLED_FACTOR)
    return largest


def _uses_unentitled_resource(entitlement: Entitlement, with_job: ResourceVector) -> bool:
    """True when the job, or what is held already, uses a resource of which nothing is the project's own."""
    own = entitlement.entitled
    return (
        (own[0] == 0 and with_job[0] > ROUNDING)
        or (own[1] == 0 and with_job[1] > ROUNDING)
        or (own[2] == 0 and with_job[2] > ROUNDING)
    )
