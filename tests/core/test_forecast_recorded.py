"""Forecasts of a cluster without limits, reservations and constraints equal recorded ones."""

from __future__ import annotations

import random

import pytest

from scheduler.core.decide import decide
from scheduler.core.forecast.durations import DurationHistory, DurationKey
from scheduler.core.forecast.start_times import QueueForecast
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import Snapshot
from tests.core.cluster_builder import MAIN, NOW_S, cluster, node, project, runs, waits

NODES, GPUS, PROJECTS, WAITING = 24, 8, 5, 90


RECORDED = {
    1: [
         6603, 1495, 843, 1465, 1921, 420, 5024, 2757, 8088, 1762, 1575, 3827, 1, 1872, 595, 2075, 3466,
         600, 333, 1042, 5784, 600, 600, 7067, 1, 3584, 600, 9687, 1, 3981, 7010, 10347, 2440, 1, 1, 1522,
         1, 1368, 2360, 600, 1, 16188, 2064, 600, 1912, 5931, 3903, 2009, 16106, 1872, 2395, 1664, 600, 1,
         3762, 11909, 4310, 787, 736, 1, 364, 2343, 1132, 13708, 1118, 3730, 356, 667, 600, 1287, 12514,
         5894, 1, 3750, 8787, 13900, 2920, 1981,
    ],
    2: [
         2274, 633, 945, 837, 2163, 5425, 565, 600, 947, 1153, 600, 1679, 11059, 2367, 14473, 1334, 1636,
         260, 1, 7163, 2382, 1583, 561, 670, 2710, 861, 1, 10671, 473, 2765, 3582, 5256, 377, 15133, 2465,
         714, 9644, 4635, 1, 3541, 10706, 7645, 716, 1178, 260, 5773, 1153, 4111, 13763, 1652, 2107, 2628,
         1417, 839, 3541, 246, 457, 286, 988, 1282, 1460, 1038, 3609, 2734, 1334, 2465, 734, 3373, 1119,
         7091,
    ],
}  # fmt: skip
"""By seed: median starts, in seconds, of the pending jobs."""


def plain(seed: int) -> Snapshot:
    """A busy cluster of equal nodes and whole GPUs, without limits, reservations or constraints."""
    dice = random.Random(seed)
    projects = [project(f"p{i}") for i in range(PROJECTS)]
    running = []
    for n in range(NODES):
        start = 0
        while start < GPUS and dice.random() < 0.9:
            end = min(GPUS, start + dice.choice([1, 1, 2, 4, 8]))
            running.append(
                runs(f"r{n}-{start}", f"p{dice.randrange(PROJECTS)}", (f"n{n}", range(start, end)),
                     started_s=NOW_S - dice.randrange(20_000))
            )  # fmt: skip
            start = end
    pending = [
        waits(f"j{i:03}", f"p{dice.randrange(PROJECTS)}", dice.choice([1, 1, 1, 2, 4, 8]),
              tasks=dice.choice([1, 1, 1, 1, 2, 3]), age_s=float(dice.randrange(9_000)),
              time_limit_s=dice.choice([None, None, 7_200.0]))
        for i in range(WAITING)
    ]  # fmt: skip
    nodes = [node(f"n{n}", GPUS) for n in range(NODES)]
    return cluster(nodes, projects, running=running, pending=pending)


def taught(seed: int) -> DurationHistory:
    """Some hundred jobs that ended."""
    dice = random.Random(seed)
    durations = DurationHistory()
    for _ in range(600):
        kind = DurationKey(f"p{dice.randrange(PROJECTS)}", "ada", None, 1_000 * dice.choice([1, 2, 4, 8, 16]))
        durations.learn(kind, dice.lognormvariate(8.0, 1.5))
    return durations


def medians(seed: int) -> list[int]:
    """Median start of each pending job, in whole seconds from now."""
    snapshot, policy = plain(seed), Policy()
    plan = decide(snapshot, policy)
    outlook = QueueForecast(snapshot, plan, MAIN, taught(seed), policy)
    return [round(outlook.median_starts_s([verdict.job])[verdict.job]) for verdict in plan.verdicts]


@pytest.mark.parametrize("seed", RECORDED)
def test_forecasts_of_a_plain_cluster_equal_the_recorded_ones(seed: int) -> None:
    assert medians(seed) == RECORDED[seed]
