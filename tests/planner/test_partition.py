"""Plans equal the best of all divisions, the published plans, and their limits on memory."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as drawing
from hypothesis import strategies as st

from scheduler.planner.comparison import (
    bubble_fraction,
    compare_plans,
    parameter_server_s,
    ring_all_reduce_s,
)
from scheduler.planner.cut_points import Floats
from scheduler.planner.partition import BandwidthLevel, CostModel, Partitioner, PlanError, _Search
from scheduler.planner.profile import Layer, Profile, parse_profile
from tests.planner.brute_force import Chain, best_time

DATA = Path(__file__).parent.parent / "data/pipeline"
PLANS = json.loads((DATA / "plans.json").read_text())
PROFILES = {
    name: parse_profile((DATA / f"{name}.json").read_text())
    for name in ("alexnet", "gnmt", "resnet50", "vgg16")
}
GB = 1e9

amounts = st.one_of(st.integers(0, 20).map(float), st.floats(0, 100, allow_subnormal=False))


def profile_of(chain: Chain) -> Profile:
    rows = zip(*chain, strict=True)
    layers = (Layer(f"layer {n}", c, a, w, a) for n, (c, w, a) in enumerate(rows))
    return Profile("chain", tuple(layers), None, None)


@st.composite
def chains(draw: st.DrawFn, longest: int) -> Chain:
    count = draw(st.integers(1, longest))
    return Chain(*(draw(st.lists(amounts, min_size=count, max_size=count)) for _ in range(3)))


def assert_best(
    chain: Chain, levels: list[tuple[int, float]], cost: str, memory_bytes: float | None = None
) -> None:
    wanted = best_time(chain, levels, cost, math.inf if memory_bytes is None else memory_bytes)
    planner = Partitioner(
        profile_of(chain), [BandwidthLevel(*level) for level in levels], CostModel(cost), memory_bytes
    )
    if math.isinf(wanted):
        with pytest.raises(PlanError, match="bytes per GPU"):
            planner.best()
        return
    plan = planner.best()
    assert plan.stage_time_s == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert [stage.start for stage in plan.stages] == [0, *(stage.end for stage in plan.stages)][:-1]
    assert plan.stages[-1].end == len(chain.compute_s)
    if len(levels) == 1:
        assert sum(stage.replicas for stage in plan.stages) == levels[0][0]
    if memory_bytes is not None:
        assert all(stage.memory_bytes <= memory_bytes for stage in plan.stages)


@given(chains(12), st.integers(1, 6), st.floats(0.1, 100), st.sampled_from(["paper", "original"]))
@drawing(max_examples=60)
def test_plan_equals_the_best_of_all_divisions(chain: Chain, gpus: int, bandwidth: float, cost: str) -> None:
    assert_best(chain, [(gpus, bandwidth)], cost)


@given(chains(8), st.integers(1, 5), st.floats(0, 600), st.sampled_from(["paper", "original"]))
@drawing(max_examples=40)
def test_plan_with_limited_memory_equals_the_best_that_fits(
    chain: Chain, gpus: int, memory_bytes: float, cost: str
) -> None:
    assert_best(chain, [(gpus, 10.0)], cost, memory_bytes)


@given(chains(5), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["paper", "original"]))
@drawing(max_examples=40)
def test_plan_on_two_levels_equals_the_best_of_all_divisions(
    chain: Chain, gpus: int, nodes: int, cost: str
) -> None:
    assert_best(chain, [(gpus, 40.0), (nodes, 5.0)], cost)


@pytest.mark.long
@pytest.mark.parametrize("cost", ["paper", "original"])
@pytest.mark.parametrize("gpus", range(1, 7))
@pytest.mark.parametrize("layers", range(1, 13))
def test_every_shape_equals_the_best_of_all_divisions(layers: int, gpus: int, cost: str) -> None:
    draw = random.Random(100 * layers + gpus)
    for number in range(20):
        chain = Chain(
            *([draw.choice((0.0, 1.0, draw.expovariate(0.1))) for _ in range(layers)] for _ in range(3))
        )
        assert_best(chain, [(gpus, draw.choice((0.5, 5.0, 50.0)))], cost, draw.choice((None, 20.0 * number)))


def levels_of(output: dict) -> list[BandwidthLevel]:
    if "topology" in output:  # "4 servers x 4 GPUs"
        servers, _, _, gpus, _ = output["topology"].split()
        return [BandwidthLevel(int(gpus), output["B1"]), BandwidthLevel(int(servers), output["B2"])]
    if "B" in output:
        return [BandwidthLevel(output["n"], output["B"])]
    return [BandwidthLevel(*level) for level in zip(output["n"], output["bandwidth"], strict=True)]


@pytest.mark.parametrize(
    "output",
    [one for one in PLANS["original_optimizer_outputs"] if one["activation_compression_ratio"]],
    ids=lambda one: one["run"],
)
def test_stage_time_of_the_original_optimizer(output: dict) -> None:
    levels = levels_of(output)
    plan = Partitioner(PROFILES[output["model"]], levels, CostModel.ORIGINAL).best(
        [1] * len(levels) if output["straight"] else None
    )
    assert plan.stage_time_s == pytest.approx(output["stage_time_s"], rel=1e-12)


@pytest.mark.parametrize(
    "output",
    [one for one in PLANS["independent_dp_results"] if one["variant"] == "paper"],
    ids=lambda one: f"{one['model']}-{one.get('topology', one.get('n'))}-{one.get('B', '')}",
)
def test_stage_time_of_the_paper_equals_an_independent_programme(output: dict) -> None:
    plan = compare_plans(PROFILES[output["model"]], levels_of(output))
    assert plan["stage_time_s"] == pytest.approx(output["stage_time_s"], abs=6e-7)
    data_parallel = plan["alternatives"]["data_parallel"]["stage_time_s"]
    assert data_parallel / plan["stage_time_s"] == pytest.approx(output["speedup_vs_dp"], abs=6e-4)


@pytest.mark.parametrize(
    ("model", "levels", "config"),
    [
        ("vgg16", [BandwidthLevel(4, GB)], "3-1"),
        ("alexnet", [BandwidthLevel(16, 1.25 * GB)], "15-1"),
        ("vgg16", [BandwidthLevel(16, 3.125 * GB)], "15-1"),
        ("resnet50", [BandwidthLevel(8, 30 * GB), BandwidthLevel(2, 3.125 * GB)], "16"),
        ("gnmt", [BandwidthLevel(4, GB)], "1-1-1-1"),
    ],
)
def test_published_configurations(model: str, levels: list[BandwidthLevel], config: str) -> None:
    assert compare_plans(PROFILES[model], levels)["config"] == config


def test_minibatches_in_flight_of_a_pipeline_over_two_nodes() -> None:
    """Two nodes with two GPUs each, four equal layers: a straight pipeline of four, so 4, 3, 2 and 1."""
    profile = profile_of(Chain([1.0] * 4, [1.0] * 4, [1.0] * 4))
    levels = [BandwidthLevel(2, GB), BandwidthLevel(2, GB)]
    plan = Partitioner(profile, levels, memory_bytes=8.0).best([1, 1])
    assert [stage.in_flight for stage in plan.stages] == [4, 3, 2, 1]
    assert [stage.memory_bytes for stage in plan.stages] == [8.0, 6.0, 4.0, 2.0]
    with pytest.raises(PlanError, match="within 7 bytes per GPU"):
        Partitioner(profile, levels, memory_bytes=7.0).best([1, 1])


def test_gpus_of_stages_on_two_nodes() -> None:
    """The stage on both nodes has the first two GPUs of each, the stage on one node the rest of it."""
    chain = profile_of(Chain([1.0] * 4, [0.0] * 4, [0.0] * 4))
    levels = [BandwidthLevel(2, GB), BandwidthLevel(3, GB)]
    plan = Partitioner(chain, levels).best([2, 1])
    assert plan.ranks(levels) == [[0, 1], [2, 3], [4, 5]]
    nested = Partitioner(profile_of(Chain([3.0, 3.0, 1.0, 1.0], [0.0] * 4, [0.0] * 4)), levels).best(
        [1, None]
    )
    assert sorted(rank for ranks in nested.ranks(levels) for rank in ranks) == list(range(6))
    assert [len(ranks) for ranks in nested.ranks(levels)] == [stage.replicas for stage in nested.stages]


def test_an_impossible_alternative_has_a_reason() -> None:
    alternatives = compare_plans(profile_of(Chain([1.0], [1.0], [1.0])), [BandwidthLevel(3, GB)])[
        "alternatives"
    ]
    assert alternatives["straight"] == {
        "impossible": "1 layers cannot be divided into such stages for 3 GPUs."
    }
    assert "divides these GPUs" in alternatives["hybrid"]["impossible"]
    assert alternatives["data_parallel"]["config"] == "3"


def test_hybrid_has_equal_replicas_and_is_the_fastest_of_them() -> None:
    profile, levels = PROFILES["vgg16"], [BandwidthLevel(16, GB)]
    hybrid = compare_plans(profile, levels)["alternatives"]["hybrid"]
    times = [Partitioner(profile, levels).best([n]).stage_time_s for n in (2, 4, 8)]
    assert hybrid["stage_time_s"] == min(times)
    assert len(set(hybrid["replicas"])) == 1


def test_samples_per_second_need_the_size_of_a_minibatch() -> None:
    profile = profile_of(Chain([0.5, 0.5], [0.0, 0.0], [0.0, 0.0]))
    assert compare_plans(profile, [BandwidthLevel(2, GB)])["samples_per_s"] is None
    known = Profile("chain", profile.layers, 64, None)
    assert compare_plans(known, [BandwidthLevel(2, GB)])["samples_per_s"] == pytest.approx(128.0)


def test_bubble_and_synchronization() -> None:
    assert bubble_fraction(4, 1) == 0.75
    assert bubble_fraction(4, 12) == pytest.approx(0.2)
    assert bubble_fraction(1, 8) == 0
    assert ring_all_reduce_s(GB, 4, GB) == 1.5
    assert parameter_server_s(GB, 4, GB) == 8.0
    assert parameter_server_s(GB, 4, GB, servers=4) == 2.0


def test_more_combinations_than_are_examined_are_refused() -> None:
    with pytest.raises(PlanError, match="too many to plan"):
        Partitioner(PROFILES["resnet50"], [BandwidthLevel(1_000_000, GB)])


@pytest.mark.parametrize("memory_bytes", [None, 1e12])
@pytest.mark.parametrize("machines", [(8,), (4, 2), (2, 8), (3, 6)])
def test_the_plans_that_are_compared_examine_no_more_combinations_than_permitted(
    monkeypatch: pytest.MonkeyPatch, machines: tuple[int, ...], memory_bytes: float | None
) -> None:
    """Each table of each search counts: of every alternative, and with a memory limit for each number in flight."""
    examined, max_steps = 0, 3_000_000
    fill = _Search._fill_tables

    def count_and_fill(search: _Search, level: int, group: int) -> dict[int, Floats]:
        nonlocal examined
        cuts = len(search._plan.cuts)
        rows = cuts if level < len(search._plan.levels) - 1 else 1
        used = range(1, search._plan.levels[level].machines + 1)
        examined += rows * cuts**2 * sum(len(search._choices(level, number)) for number in used)
        return fill(search, level, group)

    monkeypatch.setattr(_Search, "_fill_tables", count_and_fill)
    profile = profile_of(Chain(*([1.0] * 500 for _ in range(3))))
    levels = [BandwidthLevel(count, 1e9) for count in machines]
    plan = compare_plans(profile, levels, memory_bytes=memory_bytes, max_steps=max_steps)
    assert plan["merged"]["planned"] < 500
    assert max_steps / 3 < examined <= max_steps
