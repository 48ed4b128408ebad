"""Every division of a chain into replicated stages, examined one by one; shares no code with the planner."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple


class Chain(NamedTuple):
    compute_s: list[float]
    parameter_bytes: list[float]
    activation_bytes: list[float]


def divisions(count: int, machines: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield all divisions of ``count`` layers as (start, end, replicas), with exactly ``machines`` in all."""
    for stages in range(1, min(count, machines) + 1):
        for ends in itertools.combinations(range(1, count), stages - 1):
            bounds = list(itertools.pairwise((0, *ends, count)))
            for marks in itertools.combinations(range(1, machines), stages - 1):
                replicas = [high - low for low, high in itertools.pairwise((0, *marks, machines))]
                yield [(low, high, m) for (low, high), m in zip(bounds, replicas, strict=True)]


def best_time(
    chain: Chain,
    levels: list[tuple[int, float]],
    cost: str,
    memory_bytes: float = math.inf,
    span: tuple[int, int] | None = None,
) -> float:
    """Return the smallest time per minibatch, infinite if no division fits. ``levels`` start at the innermost.

    The memory limit is for one level only.
    """
    low, high = span or (0, len(chain.compute_s))
    if not levels:
        return sum(chain.compute_s[low:high])
    *inner, (machines, bandwidth) = levels
    best = math.inf
    for division in divisions(high - low, machines):
        slowest, later = 0.0, machines
        for number, (start, end, m) in enumerate(division):
            start, end = start + low, end + low
            weights = sum(chain.parameter_bytes[start:end])
            stored = weights + sum(chain.activation_bytes[start:end])
            if math.ceil(later / m) * stored > memory_bytes:
                break
            later -= m
            group = best_time(chain, inner, cost, math.inf, (start, end))
            if cost == "paper":
                time = max(group, 2 * (m - 1) * weights / bandwidth) / m
            else:
                below = inner[-1][0] if inner and not number else 1
                time = (group + 4 * (m - 1) * weights / (bandwidth * m) / below) / m
            slowest = max(slowest, time)
            if number:
                share = m if cost == "original" else 1
                slowest = max(slowest, 2 * chain.activation_bytes[start - 1] / (bandwidth * share))
                if cost == "original" and end < len(chain.compute_s):
                    slowest = max(slowest, 2 * chain.activation_bytes[end - 1] / (bandwidth * share))
        else:
            best = min(best, slowest)
    return best
