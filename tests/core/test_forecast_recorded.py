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
         10011, 1877, 679, 1781, 1713, 420, 5217, 2521, 7667, 1651, 1582, 5405, 1, 1872, 595, 2162, 3634,
         600, 333, 1132, 7018, 600, 600, 6088, 1, 4045, 600, 9418, 1, 3806, 6739, 12441, 2160, 1, 1, 1423,
         1, 1527, 2171, 600, 1, 17204, 1921, 600, 2782, 5029, 3367, 1802, 16004, 1769, 2331, 1369, 600, 1,
         6513, 13296, 3869, 836, 1171, 1, 364, 1626, 1187, 15406, 1118, 4368, 356, 1099, 600, 1131, 14602,
         4640, 1, 3222, 7800, 14291, 3650, 1904,
    ],
    2: [
         2274, 600, 1121, 799, 1153, 5788, 565, 637, 787, 1161, 600, 1574, 12722, 2371, 15603, 1326, 1693,
         260, 1, 6933, 3709, 1950, 561, 642, 3894, 975, 1, 12457, 473, 2057, 3204, 4852, 377, 16438, 2469,
         565, 10928, 4598, 1, 3600, 10520, 9082, 945, 1095, 260, 9082, 1089, 7200, 16262, 1525, 2193, 2674,
         1417, 839, 3109, 246, 457, 317, 771, 1240, 1596, 986, 4598, 2860, 1334, 2465, 1200, 3623, 1117,
         9153,
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
