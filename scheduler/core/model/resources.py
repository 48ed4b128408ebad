"""Vectors of the three counted resources: GPU, CPU and memory."""

from __future__ import annotations

import math
from typing import NamedTuple

ROUNDING = 1e-6
"""Tolerance for sums of floats, in the units of ``ResourceVector``."""


class ResourceVector(NamedTuple):
    """An amount of each resource: thousandths of a GPU, thousandths of a core, MiB.

    In a bound (a guarantee, a limit, a share) ``math.inf`` means unbounded.
    """

    gpu_milli: float = 0
    cpu_milli: float = 0
    memory_mib: float = 0

    def add(self, other: ResourceVector) -> ResourceVector:
        return ResourceVector(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def subtract(self, other: ResourceVector) -> ResourceVector:
        """Subtract ``other``, which must be finite."""
        return ResourceVector(self[0] - other[0], self[1] - other[1], self[2] - other[2])

    def multiply(self, count: int) -> ResourceVector:
        """Multiply by ``count``; unbounded stays unbounded, except that 0 times anything is 0."""
        return ResourceVector(self[0] * count, self[1] * count, self[2] * count) if count else ZERO

    def fits_in(self, bound: ResourceVector) -> bool:
        """Return True if no resource exceeds ``bound``."""
        return (
            self[0] <= bound[0] + ROUNDING
            and self[1] <= bound[1] + ROUNDING
            and self[2] <= bound[2] + ROUNDING
        )

    def exceeds_each(self, bound: ResourceVector) -> tuple[bool, bool, bool]:
        """Return for each resource whether it exceeds ``bound``."""
        return (
            self[0] > bound[0] + ROUNDING,
            self[1] > bound[1] + ROUNDING,
            self[2] > bound[2] + ROUNDING,
        )


ZERO = ResourceVector(0, 0, 0)

UNBOUNDED = ResourceVector(math.inf, math.inf, math.inf)


class Entitlement(NamedTuple):
    """The bounds and the share of one project in a pool; constant during a decision.

    ``entitled`` is the amount that comparisons between projects treat as its own: the larger of guarantee and
    fair share, capped by the limit; with an unlimited guarantee it is the limit.
    """

    guaranteed: ResourceVector
    limit: ResourceVector
    fair_share: ResourceVector
    entitled: ResourceVector
    priority: int
    created_s: float


def build_entitlement(
    guaranteed: ResourceVector,
    limit: ResourceVector,
    fair_share: ResourceVector,
    priority: int = 0,
    created_s: float = 0.0,
) -> Entitlement:
    """Build the entitlement of one project, computing ``entitled``."""
    claimable = ResourceVector(
        *(
            most if promised == math.inf else min(most, max(promised, share))
            for promised, most, share in zip(guaranteed, limit, fair_share, strict=True)
        )
    )
    return Entitlement(guaranteed, limit, fair_share, claimable, priority, created_s)
