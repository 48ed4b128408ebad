"""Forecasts of a plain cluster, held against recorded ones: what a play knows of beyond it changes nothing there."""

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
         8807, 1538, 1, 2360, 465, 381, 5605, 1398, 7406, 360, 1693, 3730, 574, 1821, 266, 804, 3466, 600, 1,
         1, 8400, 1, 1, 6517, 1, 4120, 600, 8238, 189, 4420, 6984, 10635, 2330, 1, 1, 315, 1, 1404, 2360,
         600, 1, 18080, 1477, 600, 2776, 4801, 3839, 1357, 16783, 1713, 2027, 1283, 600, 1, 5500, 13816,
         2744, 189, 1064, 1, 1, 1713, 445, 17592, 1196, 2776, 1, 1396, 1, 1396, 11800, 4635, 1, 2159, 7538,
         14472, 2519, 657,
    ],
    2: [
         2591, 1, 1240, 567, 2868, 4741, 582, 457, 1, 1073, 1, 1438, 11939, 3344, 14284, 694, 986, 1, 0,
         6626, 6208, 1934, 600, 600, 2544, 2544, 0, 12732, 473, 2444, 3038, 4607, 380, 14627, 1203, 600,
         10966, 4087, 1, 3696, 10485, 8703, 1010, 1085, 1, 8216, 1007, 7200, 14959, 1334, 1821, 2128, 1190,
         744, 3237, 319, 299, 317, 904, 600, 787, 997, 3894, 1808, 1771, 1712, 2544, 2757, 1, 9296,
    ],
}  # fmt: skip
"""By seed, before plays knew of limits, kinds of nodes and reservations."""


def plain(seed: int) -> Snapshot:
    """A busy cluster of equal nodes and whole GPUs, without limits, reservations or wishes."""
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
    """When each job that waits starts, at the median, in whole seconds from now."""
    snapshot, policy = plain(seed), Policy()
    plan = decide(snapshot, policy)
    outlook = QueueForecast(snapshot, plan, MAIN, taught(seed), policy)
    return [round(outlook.median_starts_s([verdict.job])[verdict.job]) for verdict in plan.verdicts]


@pytest.mark.parametrize("seed", RECORDED)
def test_a_plain_cluster_is_played_as_ever(seed: int) -> None:
    assert medians(seed) == RECORDED[seed]
