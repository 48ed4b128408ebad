"""The points at which a model can be cut, and the choice of those that are planned."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class CutPoints:
    """Points at which the model can be cut, in topological order.

    ``compute_s``, ``activation_bytes`` and ``parameter_bytes`` are sums over everything before the cut;
    ``before[k, j]`` is True if the part between the cuts ``k`` and ``j`` can be a stage.
    """

    compute_s: Floats
    activation_bytes: Floats
    parameter_bytes: Floats
    output_bytes: Floats
    before: Bools

    def __len__(self) -> int:
        return len(self.compute_s)

    def select(self, kept: list[int]) -> CutPoints:
        """Return only these cuts, in their order."""
        return CutPoints(
            self.compute_s[kept],
            self.activation_bytes[kept],
            self.parameter_bytes[kept],
            self.output_bytes[kept],
            self.before[np.ix_(kept, kept)],
        )


def cuts_of_merged_layers(cuts: CutPoints, limit: int) -> list[int]:
    """Return at most ``limit`` cuts of a chain, the last one included.

    The two neighbouring layers that are smallest together are merged until there are few enough; the size of a layer
    is its share of the compute time plus its share of the parameters.
    """
    count = len(cuts)
    sizes = np.zeros(count)
    for sums in (cuts.compute_s, cuts.parameter_bytes):
        if sums[-1] > 0:
            sizes += np.diff(sums, prepend=0.0) / sums[-1]
    size = sizes.tolist()
    following = [*range(1, count), -1]
    preceding = [-1, *range(count - 1)]
    is_kept = [True] * count
    pairs = [(size[cut] + size[cut + 1], cut, cut + 1) for cut in range(count - 1)]
    heapq.heapify(pairs)
    left = count
    while left > max(1, limit):
        total, cut, after = heapq.heappop(pairs)
        if not is_kept[cut] or following[cut] != after or total != size[cut] + size[after]:
            continue  # one of them was merged since
        is_kept[cut] = False
        left -= 1
        size[after] = total
        before = preceding[after] = preceding[cut]
        if before >= 0:
            following[before] = after
            heapq.heappush(pairs, (size[before] + total, before, after))
        if following[after] >= 0:
            heapq.heappush(pairs, (total + size[following[after]], after, following[after]))
    return [cut for cut in range(count) if is_kept[cut]]
