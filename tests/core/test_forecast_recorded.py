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
         10057, 1872, 1132, 2170, 1369, 420, 4390, 1816, 7800, 869, 1415, 4041, 1, 1872, 595, 1769, 2949,
         600, 333, 1397, 7537, 615, 600, 6320, 1, 4871, 600, 9927, 1, 4390, 7200, 11940, 2019, 1, 1, 787, 1,
         1701, 3057, 600, 1, 17103, 1548, 600, 3712, 4850, 3139, 1973, 16637, 1973, 2293, 1369, 600, 1,
         6543, 12828, 3006, 1096, 1283, 1, 364, 1981, 1187, 17383, 1171, 3730, 356, 640, 600, 1678, 17225,
         4476, 1, 2676, 7629, 13708, 2816, 1397,
    ],
    2: [
         2905, 600, 1575, 757, 2503, 5438, 565, 600, 747, 1238, 878, 1282, 13570, 3065, 16027, 1208, 1507,
         260, 1, 6632, 3894, 2444, 600, 720, 3894, 2287, 1, 13415, 473, 2611, 3178, 5059, 377, 14704, 1811,
         600, 11142, 3965, 1, 3600, 11650, 10114, 1141, 1089, 260, 9770, 1084, 7432, 15088, 1259, 2050,
         2377, 1208, 839, 3623, 246, 457, 317, 771, 1089, 1326, 1003, 4541, 2287, 1426, 2465, 1835, 2861,
         835, 10750,
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
