"""Three amounts that are counted side by side: GPU, CPU and memory."""

from __future__ import annotations

import math
from typing import NamedTuple

ROUNDING = 1e-6
"""Shares are sums of floats; this much (in the units of ``Amounts``) is no difference."""


class ResourceVector(NamedTuple):
    """So much of each resource: thousandths of a GPU, thousandths of a core, MiB.

    In a bound (a guarantee, a limit, a share) ``math.inf`` means that there is none.
    """

    gpu_milli: float = 0
    cpu_milli: float = 0
    memory_mib: float = 0

    def add(self, other: ResourceVector) -> ResourceVector:
        """Both together."""
        return ResourceVector(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def subtract(self, other: ResourceVector) -> ResourceVector:
        """What is left; ``other`` must be finite."""
        return ResourceVector(self[0] - other[0], self[1] - other[1], self[2] - other[2])

    def multiply(self, count: int) -> ResourceVector:
        """So many of the same; ``count`` times no bound is no bound, and 0 times anything is nothing."""
        return ResourceVector(self[0] * count, self[1] * count, self[2] * count) if count else ZERO

    def fits_in(self, bound: ResourceVector) -> bool:
        """True when no resource is above ``bound``."""
        return (
            self[0] <= bound[0] + ROUNDING
            and self[1] <= bound[1] + ROUNDING
            and self[2] <= bound[2] + ROUNDING
        )

    def exceeds_each(self, bound: ResourceVector) -> tuple[bool, bool, bool]:
        """For each resource, whether it is above ``bound``."""
        return (
            self[0] > bound[0] + ROUNDING,
            self[1] > bound[1] + ROUNDING,
            self[2] > bound[2] + ROUNDING,
        )


ZERO = ResourceVector(0, 0, 0)

UNBOUNDED = ResourceVector(math.inf, math.inf, math.inf)


class Entitlement(NamedTuple):
    """What one project is promised and owed in a pool; it does not change while a plan is made.

    ``claimable`` is what counts as its own when others compare: the guarantee or the fair share, whichever is
    more, within the limit; with an unlimited guarantee it is the limit. ``owed_to`` makes it.
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
    """The numbers of one project together with what follows from them."""
    claimable = ResourceVector(
        *(
            most if promised == math.inf else min(most, max(promised, share))
            for promised, most, share in zip(guaranteed, limit, fair_share, strict=True)
        )
    )
    return Entitlement(guaranteed, limit, fair_share, claimable, priority, created_s)
