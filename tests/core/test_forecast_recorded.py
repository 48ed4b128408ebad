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
         1785, 1287, 843, 1397, 1877, 420, 5276, 2757, 8304, 1769, 1582, 3139, 1, 1872, 595, 2191, 3092,
         600, 333, 1112, 5676, 600, 600, 6531, 1, 3638, 600, 8907, 1, 3990, 6044, 11504, 2343, 1, 1, 1554,
         1, 1187, 2360, 507, 1, 13905, 2288, 600, 1120, 4903, 3139, 1415, 13683, 1802, 2074, 1170, 600, 1,
         3712, 12979, 4229, 787, 736, 1, 364, 1937, 1171, 14226, 1118, 2171, 356, 619, 600, 1132, 13476,
         5194, 1, 4634, 8566, 7272, 3199, 2039,
    ],
    2: [
         2196, 633, 945, 714, 2163, 5367, 565, 600, 947, 1141, 600, 1345, 11547, 1945, 13616, 1421, 1718,
         260, 1, 7014, 1721, 1421, 561, 633, 2623, 612, 1, 9806, 452, 2522, 3126, 5267, 377, 14359, 2803,
         633, 9256, 4288, 1, 3931, 10006, 7750, 636, 1221, 260, 3860, 1073, 2932, 13527, 1331, 2591, 2867,
         1334, 771, 3661, 246, 457, 286, 922, 1329, 1596, 1038, 3609, 2966, 1247, 1811, 1121, 3600, 1073,
         5246,
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
