"""Forecasts of a cluster without limits, reservations and constraints equal recorded ones."""

from __future__ import annotations

import math
import random

import pytest

from scheduler.core.decide import decide
from scheduler.core.forecast.durations import DurationHistory, DurationKey
from scheduler.core.forecast.start_times import QueueForecast
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import Snapshot
from tests.core.cluster_builder import MAIN, NOW_S, cluster, node, project, runs, waits

NODES, GPUS, PROJECTS, WAITING = 24, 8, 5, 90


RECORDED: dict[int, list[int | None]] = {
    1: [
         13900, 3092, 1356, 2837, 2265, 420, 8091, 3473, 11069, 2170, 3187, 9879, 1, 3712, 595, 2493, 4210,
         4041, 333, 1356, 9672, 715, 1118, 9955, 1, 5239, 1501, 13409, 1, 6584, 11724, 17410, 3459, 1, 1,
         2130, 1, 1769, 5288, 787, 1, 19484, 2664, 1239, 4041, 6909, 5544, 3092, 18125, 3145, 3945, 1769,
         1171, 1, 4111, 17600, 5325, 1397, 1283, 1, 364, 3729, 1187, 20028, 1792, 7409, 356, 2289, 1501,
         3638, 21131, 7239, 1, 4634, 11496, 19590, 4867, 2363,
    ],
    2: [
         2274, 633, 1121, 839, 2135, 7513, 565, 747, 878, 1387, 875, 1574, 12842, 2406, 17533, 1528, 1904,
         260, 1, 7543, 3709, 2503, 561, 670, 4111, 1319, 1, 11970, 473, 2867, 3600, 6026, 377, 19509, 2498,
         565, 9912, 4709, 1, 3541, 13218, 10369, 1025, 1322, 260, 8951, 1007, 7351, 18638, 1635, 2444, 3008,
         1387, 839, 3477, 246, 457, 317, 799, 1417, 1759, 1119, 5353, 3168, 1334, 3178, 1141, 3823, 1232,
         9376,
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


def medians(seed: int) -> list[int | None]:
    """Median start of each pending job, in whole seconds from now; None behind jobs of which no end is known."""
    snapshot, policy = plain(seed), Policy()
    plan = decide(snapshot, policy)
    outlook = QueueForecast(snapshot, plan, MAIN, taught(seed), policy)
    starts_s = (outlook.median_starts_s([verdict.job])[verdict.job] for verdict in plan.verdicts)
    return [None if start_s == math.inf else round(start_s) for start_s in starts_s]


@pytest.mark.parametrize("seed", RECORDED)
def test_forecasts_of_a_plain_cluster_equal_the_recorded_ones(seed: int) -> None:
    assert medians(seed) == RECORDED[seed]
