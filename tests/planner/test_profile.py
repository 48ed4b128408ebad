"""Profiles are read whole, or refused with a message that says where they are wrong."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scheduler.planner.comparison import compare_plans, merged_text
from scheduler.planner.cut_points import CutPoints
from scheduler.planner.partition import BandwidthLevel, CostModel, Partitioner, PlanError
from scheduler.planner.profile import MAX_LAYERS, ProfileError, parse_profile, read_profile

DATA = Path(__file__).parent.parent / "data/pipeline"


def node(name: str, **values: Any) -> dict[str, Any]:
    return {
        "id": name, "op": f"Linear {name}", "fwd_ms": 1.0, "bwd_ms": 2.0, "activation_bytes": 10.0,
        "parameter_bytes": 100.0,
    } | values  # fmt: skip


def graph(*edges: tuple[str, str], **values: Any) -> dict[str, Any]:
    names = sorted({name for edge in edges for name in edge})
    return {
        "model": "m",
        "nodes": [node(name) for name in names],
        "edges": [list(edge) for edge in edges],
    } | values


@pytest.mark.parametrize("model", ["alexnet", "vgg16", "resnet50"])
def test_nodes_and_chain_of_a_profile_have_the_same_layers(model: str) -> None:
    profile = json.loads((DATA / f"{model}.json").read_text())
    by_nodes = read_profile({key: profile[key] for key in ("nodes", "edges")}).cut_points
    by_chain = read_profile(
        {key: profile[key] for key in profile if key not in ("nodes", "edges")}
    ).cut_points
    for field in ("compute_s", "parameter_bytes", "activation_bytes"):
        assert getattr(by_nodes, field) == pytest.approx(getattr(by_chain, field), abs=1e-9)
    # before the sum of two branches, the chain also counts the input of the branches, which is used up
    differ = (by_nodes.output_bytes != by_chain.output_bytes).sum()
    assert differ == (4 if model == "resnet50" else 0)
    assert (by_nodes.output_bytes <= by_chain.output_bytes).all()


def test_branches_are_one_layer_and_a_skipped_connection_is_transferred() -> None:
    branches = read_profile(graph(("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")))
    assert [layer.name for layer in branches.layers] == ["Linear a", "Linear b + Linear c", "Linear d"]
    assert [layer.output_bytes for layer in branches.layers] == [10.0, 20.0, 10.0]
    assert branches.layers[1].compute_s == pytest.approx(0.006)
    skip = read_profile(graph(("a", "b"), ("b", "c"), ("a", "c")))
    assert [layer.output_bytes for layer in skip.layers] == [10.0, 20.0, 10.0]


def test_inputs_and_unused_elements_of_tuples_are_not_layers() -> None:
    profile = graph(("in", "a"), ("a", "b"), ("a", "unused"))
    for one in profile["nodes"]:
        one["op"] = {"in": "Input0", "unused": "__getitem__(1)"}.get(one["id"], one["op"])
    assert [layer.name for layer in read_profile(profile).layers] == ["Linear a", "Linear b"]


def test_a_root_beside_the_main_one_belongs_to_the_layer_that_needs_it() -> None:
    layers = read_profile(graph(("a", "b"), ("b", "d"), ("c", "d"))).layers
    assert [layer.name for layer in layers] == ["Linear a", "Linear b", "Linear c + Linear d"]


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(profile: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        target: Any = profile
        for part in parents:
            target = target[int(part) if part.isdigit() else part]
        target[int(last) if last.isdigit() else last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("colour", 1), "The profile has the unknown key 'colour'"),
        (changed("nodes.0.flops", 1), r"nodes\[0\] has the unknown key 'flops'"),
        (changed("nodes.1.fwd_ms", -0.5), "fwd_ms of b is -0.5; it must not be negative"),
        (changed("nodes.1.fwd_ms", "fast"), "fwd_ms of b is 'fast'; it must be a number"),
        (changed("nodes.1.bwd_ms", True), "bwd_ms of b is True; it must be a number"),
        (changed("nodes.1.parameter_bytes", 1e30), "at most 1e\\+18 is accepted"),
        (changed("nodes.1", {"id": "b"}), r"nodes\[1\] has no 'activation_bytes'"),
        (changed("nodes.1.id", "a"), r"nodes\[1\] has the id 'a' of an earlier node"),
        (changed("nodes", []), "is not a node"),
        (changed("nodes", [node(str(n)) for n in range(MAX_LAYERS + 1)]), f"at most {MAX_LAYERS} are planned"),
        (lambda profile: profile.update(nodes=[], edges=[]), "has no layers"),
        (changed("edges.0", ["b", "b"]), "The edges form a cycle through or before b"),
        (changed("edges.0", ["a", "z"]), r"edges\[0\] names 'z', which is not a node"),
        (changed("edges", []), "The node 'a' has no edge"),
        (lambda profile: profile["nodes"].append(node("z")), "The node 'z' has no edge"),
        (lambda profile: (profile["nodes"].extend([node("y"), node("z")]), profile["edges"].append(["y", "z"])),
         "disconnected parts: no edges lead from 'a' to 'y'"),
        (changed("nodes.1.fwd_ms", 10**400), "fwd_ms of b is a number above 1e18"),
        (changed("nodes.1.fwd_ms", -(10**5000)), "fwd_ms of b is a number below -1e18"),
        (changed("batch_size", 10**400), "batch_size is a number above 1e18"),
        (changed("edges.0", ["a"]), r"edges\[0\] must be a list of two node ids"),
        (changed("batch_size", 0), "batch_size is 0"),
        (changed("chain", [{"compute_s": 1.0}]), r"chain\[0\] has no 'activation_bytes'"),
    ],
)  # fmt: skip
def test_an_invalid_profile_is_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    profile = copy.deepcopy(graph(("a", "b"), ("b", "c")))
    assert read_profile(profile).layers
    change(profile)
    with pytest.raises(ProfileError, match=message):
        read_profile(profile)


def state(compute_s: float) -> dict[str, Any]:
    return {"compute_s": compute_s, "activation_bytes": 1, "parameter_bytes": 1, "output_activation_bytes": 1}


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ({"chain": [state(-1.0)]}, "compute_s of chain.0. is -1.0; it must not be negative"),
        ({"chain": [state(2.0), state(-1.0)], "chain_predecessors": [[], [0]]}, "compute_s along the chain decrease"),
        ({"chain": [state(1.0)] * 2, "chain_predecessors": [[], [1]]}, "it must be an earlier position"),
        ({"chain": [state(1.0)] * 2, "chain_predecessors": [[]]}, "one list of positions for each state"),
        ({"chain": [state(1.0)] * 2, "chain_predecessors": [[], []]}, "last state of the chain must follow"),
        ({"chain": []}, "chain is empty"),
        ({"chain": [state(1.0)], "nodes": [node("a")], "edges": []}, "both must describe the same model"),
    ],
)  # fmt: skip
def test_an_invalid_chain_is_refused(chain: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        read_profile(chain)


@pytest.mark.parametrize("text", ["", "[1]", '{"nodes": NaN}', "[" * 100_000, '{"model": 5, "nodes": []}'])
def test_text_that_is_not_a_profile_is_refused(text: str) -> None:
    with pytest.raises(ProfileError):
        parse_profile(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": "a", "model": "b"}', "the key 'model' twice"),
        ('{"nodes": [{"id": "a", "id": "b"}]}', "the key 'id' twice"),
        (f'{{"batch_size": {10**400}}}', "a number of 401 digits"),
        (f'{{"batch_size": -{"9" * 5000}}}', "a number of 5000 digits"),
        ('{"batch_size": 1e999}', "the number 1e999, which is too large"),
        (r'{"model": "a\ud800"}', "a character that cannot be stored"),
        (r'{"model": "a\u0000"}', "a character that cannot be stored"),
        ("a -- b", "Line 1 is neither a node"),
        ("node1 -- Linear -- forward_compute_time=x, backward_compute_time=1", "forward_compute_time is 'x'"),
        ("node1 -- Linear -- forward_compute_time=1", "has no backward_compute_time"),
        ("node1 -- Linear -- colour=1", "unknown value 'colour'"),
    ],
)
def test_a_text_is_refused_with_a_sentence(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_profile(text)


# -- any malformed profile ends in a sentence ----------------------------------------------------------

SMALL: dict[str, dict[str, Any]] = {
    "graph": graph(("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("d", "e"), batch_size=4),
    "chain": {
        "model": "m",
        "chain": [
            {"antichain": [str(number)], "compute_s": 1.0, "activation_bytes": 1, "parameter_bytes": 1,
             "output_activation_bytes": 1}
            for number in range(3)
        ],
        "chain_predecessors": [[], [0], [0, 1]],
    },
}  # fmt: skip
WRONG: tuple[Any, ...] = (
    None, True, 0, 1, -1, 0.0, -0.0, 1e18, 1e300, math.inf, math.nan, 10**400, -(10**400), 10**5000, "", "a",
    "\ud800", "x" * 10_000, [], {}, [[]], [None], ["a", "b"], [["a", "a"]], {"id": "a"}, [0, 0],
    [10**400], [[10**400]], [1.5],
)  # fmt: skip
LEVELS = [BandwidthLevel(2, 1e9), BandwidthLevel(2, 1e8)]


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*path, key)
        yield from paths_of(each, (*path, key))


@pytest.mark.parametrize("kind", SMALL)
def test_any_malformed_profile_ends_in_a_plan_or_a_sentence(kind: str) -> None:
    for path in paths_of(SMALL[kind]):
        for value in (*WRONG, ...):
            profile: Any = copy.deepcopy(SMALL[kind])
            target = profile
            for key in path[:-1]:
                target = target[key]
            if value is ...:
                del target[path[-1]]
            else:
                target[path[-1]] = value
            for cost in CostModel:
                try:
                    json.dumps(compare_plans(read_profile(profile), LEVELS, cost), allow_nan=False)
                except (ProfileError, PlanError) as error:
                    assert 10 < len(str(error)) < 1000


# -- graphs are planned as PipeDream's optimizer plans them ---------------------------------------------


def graph_text(profile: dict[str, Any]) -> str:
    """Return nodes and edges as PipeDream's profiler writes them."""
    lines = [
        f"{one['id']} -- {one['op']} -- forward_compute_time={one['fwd_ms']:.3f}, backward_compute_time="
        f"{one['bwd_ms']:.3f}, activation_size=[{one['activation_bytes']:.1f}; 0.0], "
        f"parameter_size={one['parameter_bytes']:.3f}"
        for one in profile["nodes"]
    ]
    return "\n".join([*lines, *(f"\t{tail} -- {head}" for tail, head in profile["edges"])]) + "\n"


@pytest.mark.parametrize("model", ["alexnet", "vgg16", "resnet50", "gnmt"])
def test_graph_txt_of_pipedream_is_the_same_profile(model: str) -> None:
    profile = json.loads((DATA / f"{model}.json").read_text())
    by_text = parse_profile(graph_text(profile))
    by_json = read_profile({key: profile[key] for key in ("nodes", "edges")})
    assert [each.name for each in by_text.layers] == [each.name for each in by_json.layers]
    for field in ("compute_s", "parameter_bytes", "activation_bytes", "output_bytes"):
        assert getattr(by_text.cut_points, field) == pytest.approx(
            getattr(by_json.cut_points, field), abs=1e-5
        )
    divided = parse_profile(graph_text(profile).replace("\n\t", " -- stage_id=1\n\t", 1))
    assert len(divided.layers) == len(by_text.layers)


@pytest.mark.parametrize("model", ["resnet50", "gnmt"])
def test_the_states_of_a_graph_are_those_of_its_chain(model: str) -> None:
    profile = json.loads((DATA / f"{model}.json").read_text())
    by_nodes = read_profile({key: profile[key] for key in ("nodes", "edges")}).states
    by_chain = read_profile({key: profile[key] for key in profile if key not in ("nodes", "edges")}).states
    assert by_nodes is not None and by_chain is not None

    def rows(states: CutPoints) -> list[tuple[float, ...]]:
        amounts = zip(states.compute_s, states.parameter_bytes, states.output_bytes, strict=True)
        order = zip(states.before.sum(axis=0), states.before.sum(axis=1), strict=True)
        return sorted(
            (round(compute_s, 6), round(parameters), round(sent), *counts)
            for (compute_s, parameters, sent), counts in zip(amounts, order, strict=True)
        )

    assert rows(by_nodes) == rows(by_chain)


@pytest.mark.parametrize("model", ["alexnet", "vgg16", "gnmt"])
@pytest.mark.parametrize(
    "levels",
    [[BandwidthLevel(16, 1.25e9)], [BandwidthLevel(16, 3.125e9)], [BandwidthLevel(4, 30e9), BandwidthLevel(4, 1e9)]],
)  # fmt: skip
def test_a_graph_is_planned_as_fast_as_its_chain(model: str, levels: list[BandwidthLevel]) -> None:
    profile = json.loads((DATA / f"{model}.json").read_text())
    by_nodes = read_profile({key: profile[key] for key in ("nodes", "edges")})
    by_chain = read_profile({key: profile[key] for key in profile if key not in ("nodes", "edges")})
    nodes_s, chain_s = (
        Partitioner(each, levels, CostModel.ORIGINAL).best().stage_time_s for each in (by_nodes, by_chain)
    )
    assert nodes_s == pytest.approx(chain_s, rel=1e-9)
    nodes_s, chain_s = (Partitioner(each, levels).best().stage_time_s for each in (by_nodes, by_chain))
    assert nodes_s <= chain_s * (1 + 1e-9)  # it has more cuts, and counts a skipped connection once


def test_deep_models_are_merged_and_the_answer_says_so() -> None:
    names = [f"n{number}" for number in range(1500)]
    deep = graph(*pairwise(names))
    deep["nodes"] = [node(name, fwd_ms=float(number % 7)) for number, name in enumerate(names)]
    profile = read_profile(deep)
    assert len(profile.layers) == 1500
    plan = compare_plans(profile, LEVELS)
    assert plan["merged"] == {"layers": 1500, "planned": 400, "branches": False}
    ends = [stage["layers"] for stage in plan["stages"]]
    assert ends[0][0] == 0 and ends[-1][1] == 1500
    assert all(end == start for (_, end), (start, _) in pairwise(ends))
    assert plan["speedup"] > 3.9
    assert sum(stage["compute_s"] for stage in plan["stages"]) == pytest.approx(
        sum(layer.compute_s for layer in profile.layers)
    )
    wide = compare_plans(profile, [BandwidthLevel(8, 30e9), BandwidthLevel(8, 3e9)], max_steps=10**7)
    assert wide["merged"]["planned"] < 200
    assert "1500 layers are planned as" in merged_text(wide["merged"])


def test_branches_that_can_be_cut_in_too_many_ways_are_one_layer() -> None:
    branches = [[f"b{row}-{column}" for column in range(12)] for row in range(6)]
    edges = [edge for branch in branches for edge in pairwise(["a", *branch, "z"])]
    profile = read_profile(graph(*edges))
    assert profile.branches_merged and profile.states is None and len(profile.layers) == 3
    plan = compare_plans(profile, LEVELS, CostModel.ORIGINAL)
    assert plan["merged"] == {"layers": 3, "planned": 3, "branches": True}
    assert "Parallel branches are planned as one layer" in merged_text(plan["merged"])
