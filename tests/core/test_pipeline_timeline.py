"""The timeline of a pipeline step, and what the stages of a plan send between nodes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from portal.domain.jobs.pipeline_plans import bubble_fraction
from portal.domain.jobs.pipeline_timeline import (
    PassTime,
    has_timeline,
    link_bytes,
    node_traffic,
    pass_times,
    step_timeline,
)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (4, 8), (4, 2), (8, 16)])
def test_equal_stages_are_idle_as_the_formula_says(schedule: str, stages: int, micro_batches: int) -> None:
    found = step_timeline([PassTime(0.1, 0.2)] * stages, micro_batches, schedule)
    plan = {"stages": [{}] * stages}
    assert found.idle_fraction == pytest.approx(bubble_fraction(plan, micro_batches, schedule))
    assert found.step_s == pytest.approx(0.3 * (micro_batches + stages - 1))
    for stage in found.stages:
        assert len(stage) == 2 * micro_batches
        assert all(after.start_s >= before.end_s - 1e-9 for before, after in pairwise(stage))


def test_1f1b_keeps_no_more_micro_batches_in_flight_than_stages_follow() -> None:
    first = step_timeline([PassTime(0.1, 0.2)] * 3, 8, "1f1b").stages[0]
    in_flight, most = 0, 0
    for each in first:
        in_flight += 1 if each.is_forward else -1
        most = max(most, in_flight)
    assert most == 3
    assert [each.is_forward for each in step_timeline([PassTime(1, 1)] * 3, 8, "gpipe").stages[0][:8]] == [
        True
    ] * 8


def test_a_slow_stage_makes_the_others_wait() -> None:
    found = step_timeline([PassTime(1, 2), PassTime(2, 4), PassTime(1, 2)], 4, "1f1b")
    busy = [sum(each.end_s - each.start_s for each in stage) for stage in found.stages]
    assert busy == [12, 24, 12] and found.step_s > 24
    assert found.idle_fraction == pytest.approx(1 - 48 / (3 * found.step_s))


def test_the_time_of_a_stage_is_shared_by_its_replicas() -> None:
    layers: list[dict[str, Any]] = [
        {"compute_s": 3.0, "forward_s": 1.0, "backward_s": 2.0},
        {"compute_s": 6.0, "forward_s": 3.0, "backward_s": 3.0},
        {"compute_s": 3.0, "forward_s": None, "backward_s": None},
    ]
    stages = [
        {"layers": [0, 2], "compute_s": 9.0, "replicas": 2},
        {"layers": [2, 3], "compute_s": 3.0, "replicas": 1},
    ]
    first, second = pass_times(layers, stages)
    assert (first.forward_s, first.backward_s) == (pytest.approx(2.0), pytest.approx(2.5))
    assert (second.forward_s, second.backward_s) == (pytest.approx(1.0), pytest.approx(2.0))


def stage(*ranks: int, output: float = 10.0, parameters: float = 100.0) -> dict[str, Any]:
    return {
        "ranks": list(ranks),
        "replicas": len(ranks),
        "output_bytes": output,
        "parameter_bytes": parameters,
    }


def test_only_what_crosses_nodes_is_traffic() -> None:
    inside = node_traffic([stage(0), stage(1)], 2)
    assert (inside.micro_batch_bytes, inside.step_bytes) == (0.0, 0.0)
    across = node_traffic([stage(0, 1), stage(2, 3)], 2)
    assert (across.micro_batch_bytes, across.step_bytes) == (20.0, 0.0)
    half = node_traffic([stage(0), stage(1, 2)], 2)
    assert (half.micro_batch_bytes, half.step_bytes) == (10.0, 100.0)
    data_parallel = node_traffic([stage(0, 1, 2, 3)], 2)
    assert (data_parallel.micro_batch_bytes, data_parallel.step_bytes) == (0.0, 150.0)


def test_the_traffic_of_a_link_is_between_its_two_nodes() -> None:
    stages = [stage(0, 1), stage(2, 3), stage(4, 5, output=30.0)]
    assert [link_bytes(stages, 2, node) for node in (0, 1)] == [20.0, 20.0]
    assert link_bytes([stage(0), stage(2)], 1, 0) == 0.0  # its link is not to the next node


def test_only_steps_with_a_flush_and_few_stages_are_drawn() -> None:
    assert has_timeline(4, "1f1b") and has_timeline(16, "gpipe")
    assert not has_timeline(4, "pipedream") and not has_timeline(1, "1f1b") and not has_timeline(17, "gpipe")
