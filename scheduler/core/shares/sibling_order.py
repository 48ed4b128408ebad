"""The fair order of sibling projects as a sort key over all resources.

Smaller goes first. In order: with the job within its fair share (or not over it already, see ``sibling_key``); with
the job within its guarantee; higher priority; uses no resource that it is not entitled to; lower dominant
share with the job (and without the victims, during eviction); lower dominant share without the job; smaller
share; older.

The dominant share is the largest ratio held / ``Entitlement.entitled`` over the resources; the capacity
replaces an unbounded entitlement.
"""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, TypeVar

from scheduler.core.model.resources import ROUNDING, ZERO, Entitlement, ResourceVector
from scheduler.core.shares.reclaim_rules import is_within_guarantee

Key = TypeVar("Key", bound=str)

UNENTITLED_FACTOR = 1_000.0
"""Factor on held amounts of a resource that a project is not entitled to."""


class SiblingKey(NamedTuple, Generic[Key]):
    """Smaller goes first; fields are in order of comparison."""

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
    over_share_in_any: bool = True,
) -> SiblingKey[Key]:
    """Return the sort key of ``project`` if its next job requests ``job``.

    ``releasing`` is what victims of the project would release for the job. With ``over_share_in_any``
    a project is over its fair share if it is so, with the job, in a resource that the job requests; otherwise
    only if it is so in all three without the job.
    """
    with_job = held.add(job)
    return SiblingKey(
        is_over_in_any(entitlement, with_job, job)
        if over_share_in_any
        else all(held.exceeds_each(entitlement.fair_share)),
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
    """Return True if ``held`` exceeds the fair share in a resource that ``job`` requests."""
    over = held.exceeds_each(entitlement.fair_share)
    return (job[0] > 0 and over[0]) or (job[1] > 0 and over[1]) or (job[2] > 0 and over[2])


def dominant_share(entitlement: Entitlement, held: ResourceVector, capacity: ResourceVector) -> float:
    """Return the largest ratio of ``held`` to the entitlement over the resources; at least 0."""
    largest = 0.0
    for i in (0, 1, 2):
        own = entitlement.entitled[i]
        if own == math.inf:
            own = capacity[i]
        largest = max(largest, held[i] / own if own > 0 else held[i] * UNENTITLED_FACTOR)
    return largest


def _uses_unentitled_resource(entitlement: Entitlement, with_job: ResourceVector) -> bool:
    """Return True if the project with the job uses a resource that it is not entitled to."""
    own = entitlement.entitled
    return (
        (own[0] == 0 and with_job[0] > ROUNDING)
        or (own[1] == 0 and with_job[1] > ROUNDING)
        or (own[2] == 0 and with_job[2] > ROUNDING)
    )
