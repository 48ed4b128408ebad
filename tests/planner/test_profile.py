"""Profiles are read whole, or refused with a message that says where they are wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
