"""Which replicas of a service start and stop: tables, and rollouts played to their end."""

from __future__ import annotations

import random

import pytest

from portal.domain.serving.model_servers import Replica, RolloutStep, plan_rollout


def ready(id_: int, version: int) -> Replica:
    return Replica(id_, version, True)


def starting(id_: int, version: int) -> Replica:
    return Replica(id_, version, False)


@pytest.mark.parametrize(
    ("desired", "target", "replicas", "step"),
    [
        (3, 1, [], RolloutStep(start=3)),
        (3, 1, [starting(1, 1)], RolloutStep(start=2)),
        (2, 1, [ready(1, 1), ready(2, 1)], RolloutStep(complete=True)),
        (1, 1, [starting(1, 1), ready(2, 1)], RolloutStep(stop=(1,), complete=True)),  # the ready one stays
        (0, 1, [ready(1, 1), starting(2, 1)], RolloutStep(stop=(1, 2), complete=True)),
        # an update: one new replica starts, then one old one stops
        (2, 2, [ready(1, 1), ready(2, 1)], RolloutStep(start=1)),
        (2, 2, [ready(1, 1), ready(2, 1), starting(3, 2)], RolloutStep()),
        (2, 2, [ready(1, 1), ready(2, 1), ready(3, 2)], RolloutStep(start=1, stop=(2,))),
        (2, 2, [ready(1, 1), ready(3, 2), ready(4, 2)], RolloutStep(stop=(1,), complete=True)),
        (
            2,
            2,
            [starting(1, 1), ready(2, 1)],
            RolloutStep(start=1, stop=(1,)),
        ),  # an old one that does not serve
        (2, 2, [starting(1, 1)], RolloutStep(start=2, stop=(1,))),  # nothing serves: all at once
        (1, 2, [ready(1, 1), ready(2, 1)], RolloutStep(start=1, stop=(2,))),
    ],
)
def test_next_step(desired: int, target: int, replicas: list[Replica], step: RolloutStep) -> None:
    assert plan_rollout(desired, target, replicas) == step


@pytest.mark.parametrize("seed", range(200))
def test_an_update_ends_and_always_serves_with_the_wanted_number(seed: int) -> None:
    chance = random.Random(seed)
    desired = chance.randint(1, 6)
    replicas = [ready(number, 1) for number in range(desired)]
    number = desired
    for _ in range(200):
        step = plan_rollout(desired, 2, replicas)
        replicas = [each for each in replicas if each.id not in step.stop]
        replicas += [starting(number + extra, 2) for extra in range(step.start)]
        number += step.start
        assert sum(each.ready for each in replicas) >= desired
        assert len(replicas) <= desired + 1
        if step.complete:
            break
        replicas = [Replica(each.id, each.version, each.ready or chance.random() < 0.3) for each in replicas]
    assert [each.version for each in replicas if each.ready] == [2] * desired
