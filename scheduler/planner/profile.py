"""Reads layer profiles: per layer forward and backward time, activation bytes and parameter bytes.

A profile is a JSON object with ``nodes`` and ``edges``, or with ``chain``, or with both
(docs/pipeline-plans.md describes the format). ``Profile.layers`` is always a chain: branches between two
points where the model can be cut are one layer. ``Profile.states`` are the cuts of parallel branches: those of
``chain``, or else the antichains of the graph (``scheduler/planner/antichains.py``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any

import numpy as np

from portal.domain.jobs.layer_profiles import ProfileTextError, decode_profile
from scheduler.planner.antichains import Amounts, antichain_states, bits
from scheduler.planner.cut_points import Bools, CutPoints

MAX_LAYERS = 5000
"""Maximum number of nodes, and of states of a chain without branches."""
MAX_STATES = 1000
"""Maximum number of states of a chain with branches."""
MAX_NUMBER = 1e18
MAX_BATCH_SIZE = 10**9
MAX_NAME = 200
SUM_TOLERANCE = 0.01
"""By how much the compute times of ``chain`` and ``nodes`` may differ, relative to their sum."""

_PROFILE_KEYS = frozenset(
    {
        "model", "input", "source", "licence", "units", "nodes", "edges", "totals", "chain", "chain_is_linear",
        "chain_predecessors", "batch_size", "device",
    }
)  # fmt: skip
_NODE_KEYS = frozenset({"id", "op", "fwd_ms", "bwd_ms", "activation_bytes", "parameter_bytes"})
_STATE_KEYS = frozenset(
    {"antichain", "compute_s", "activation_bytes", "parameter_bytes", "output_activation_bytes"}
)


class ProfileError(ValueError):
    """The profile is invalid; the message says where and why."""


@dataclass(frozen=True)
class Layer:
    """A part of the model that is not split. ``output_bytes`` pass to the next layer, per minibatch.

    ``forward_s`` and ``backward_s`` are None if the profile has only their sum.
    """

    name: str
    compute_s: float
    activation_bytes: float
    parameter_bytes: float
    output_bytes: float
    forward_s: float | None = None
    backward_s: float | None = None


@dataclass(frozen=True)
class Profile:
    """A layer profile. ``states`` is None if there are no parallel branches, or too many states of them.

    ``branches_merged`` is True if there are too many: only whole layers can be divided among stages.
    """

    model: str
    layers: tuple[Layer, ...]
    batch_size: int | None
    states: CutPoints | None
    branches_merged: bool = False

    @property
    def cut_points(self) -> CutPoints:
        """Return the ends of the layers."""
        return CutPoints(
            np.cumsum([layer.compute_s for layer in self.layers]),
            np.cumsum([layer.activation_bytes for layer in self.layers]),
            np.cumsum([layer.parameter_bytes for layer in self.layers]),
            np.array([layer.output_bytes for layer in self.layers], float),
            np.triu(np.ones((len(self.layers),) * 2, bool), 1),
        )


def parse_profile(text: str) -> Profile:
    """Return the profile in a text, JSON or a graph of PipeDream's profiler, or raise ProfileError."""
    try:
        read = decode_profile(text)
    except ProfileTextError as error:
        raise ProfileError(str(error)) from None
    return read_profile(read)


def read_profile(read: Any) -> Profile:
    """Return the profile in a decoded JSON value, or raise ProfileError."""
    profile = _object(read, "The profile", _PROFILE_KEYS, required=())
    batch_size = profile.get("batch_size")
    if batch_size is not None and not (type(batch_size) is int and 1 <= batch_size <= MAX_BATCH_SIZE):
        raise ProfileError(
            f"batch_size is {_shown(batch_size)}; it must be a whole number from 1 to {MAX_BATCH_SIZE}."
        )
    model = profile.get("model", "model")
    if not isinstance(model, str):
        raise ProfileError(f"model is {_shown(model)}; it must be a text.")
    graph = _read_graph(profile) if "nodes" in profile else None
    from_nodes = _layers_of_graph(*graph) if graph else ()
    from_chain, states = _layers_of_chain(profile) if "chain" in profile else ((), None)
    if not from_nodes and not from_chain:
        raise ProfileError("The profile has no layers: it needs nodes and edges, or a chain.")
    if from_nodes and from_chain:
        nodes_s, chain_s = (sum(layer.compute_s for layer in layers) for layers in (from_nodes, from_chain))
        if abs(nodes_s - chain_s) > SUM_TOLERANCE * max(nodes_s, chain_s):
            raise ProfileError(
                f"The nodes take {nodes_s:.6g} s and the chain takes {chain_s:.6g} s; both must describe the "
                "same model."
            )
    # nodes have forward and backward times, but the chain may know of fewer cuts than its nodes allow
    layers = from_nodes if not from_chain or len(from_nodes) == len(from_chain) else from_chain
    if graph and not from_chain and len(graph[1]) > len(layers):  # it has parallel branches
        states = antichain_states(*graph)
        return Profile(model, layers, batch_size, states, branches_merged=states is None)
    return Profile(model, layers, batch_size, states)


def _read_graph(profile: Mapping[str, Any]) -> tuple[dict[str, Amounts], list[str], dict[str, list[str]]]:
    """Return the amounts of the nodes, and their ids in topological order with the ids of those that follow each.

    Inputs, which are always in the first stage, and unused elements of tuples are left out.
    """
    nodes: dict[str, Mapping[str, Any]] = {}
    for number, item in enumerate(_list(profile["nodes"], "nodes")):
        where = f"nodes[{number}]"
        node = _object(item, where, _NODE_KEYS, required=_NODE_KEYS - {"op"})
        if not isinstance(node["id"], str) or not isinstance(node.get("op", ""), str):
            raise ProfileError(f"{where} must have a text as its id and op.")
        if node["id"] in nodes:
            raise ProfileError(f"{where} has the id {_shown(node['id'])} of an earlier node.")
        for key in ("fwd_ms", "bwd_ms", "activation_bytes", "parameter_bytes"):
            _number(node[key], f"{key} of {node['id'][:MAX_NAME]}")
        nodes[node["id"]] = node
    after = _edges(profile.get("edges"), nodes)
    order = _topological_order(after)
    entered = {head for heads in after.values() for head in heads}
    kept = [name for name in order if name in entered or not _op(nodes[name]).startswith("Input")]
    kept = [name for name in kept if after[name] or not _op(nodes[name]).startswith("__getitem__")]
    _require_connected(order, after, kept)
    within = set(kept)
    after = {name: [head for head in after[name] if head in within] for name in kept}
    amounts = {
        name: Amounts(
            _op(node) or name,
            node["fwd_ms"] / 1000,
            node["bwd_ms"] / 1000,
            node["activation_bytes"],
            node["parameter_bytes"],
        )
        for name, node in nodes.items()
        if name in within
    }
    return amounts, kept, after


def _require_connected(order: Sequence[str], after: Mapping[str, Sequence[str]], kept: Sequence[str]) -> None:
    """Raise ProfileError unless the nodes are one graph; one node alone is one, too."""
    beside: dict[str, list[str]] = {name: [] for name in order}
    for name, heads in after.items():
        for head in heads:
            beside[name].append(head)
            beside[head].append(name)
    if len(kept) > 1 and (alone := [name for name in kept if not beside[name]]):
        raise ProfileError(f"The node {_shown(alone[0])} has no edge; the edges must connect all nodes.")
    reached, waiting = set(kept[:1]), list(kept[:1])
    while waiting:
        new = set(beside[waiting.pop()]) - reached
        reached |= new
        waiting += new
    if apart := [name for name in kept if name not in reached]:
        raise ProfileError(
            f"The nodes are disconnected parts: no edges lead from {_shown(kept[0])} to {_shown(apart[0])}."
        )


def _layers_of_graph(
    nodes: Mapping[str, Amounts], order: Sequence[str], after: Mapping[str, Sequence[str]]
) -> tuple[Layer, ...]:
    """Return the layers between the points at which a graph can be cut."""
    before: dict[str, list[str]] = {name: [] for name in order}
    for name in order:
        for head in after[name]:
            before[head].append(name)
    missing = {name: len(after[name]) for name in order}  # of those that follow
    layers: list[Layer] = []
    open_nodes: dict[str, None] = {}
    for part in _parts(order, after):
        for name in part:
            open_nodes[name] = None
            for tail in before[name]:
                missing[tail] -= 1
        for name in [each for each in open_nodes if not missing[each]]:
            del open_nodes[name]
        members = [nodes[name] for name in part]
        forward_s, backward_s = (
            sum(getattr(one, key) for one in members) for key in ("forward_s", "backward_s")
        )
        layers.append(
            Layer(
                " + ".join(one.op for one in members)[:MAX_NAME],
                forward_s + backward_s,
                sum(one.activation_bytes for one in members),
                sum(one.parameter_bytes for one in members),
                sum(nodes[name].activation_bytes for name in open_nodes or part[-1:]),
                forward_s,
                backward_s,
            )
        )
    return tuple(layers)


def _parts(order: Sequence[str], after: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Divide a graph, given in topological order, at each point that all nodes precede or follow.

    The points are on the paths from the main root, from which most nodes descend. A node that does not
    depend on it, such as the embedding of a decoder, belongs to the part that needs it first.
    """
    if not order:
        return []
    bit = {name: 1 << number for number, name in enumerate(order)}
    ancestors = bit.copy()
    for name in order:
        for head in after[name]:
            ancestors[head] |= ancestors[name]
    roots = [name for name in order if ancestors[name] == bit[name]]
    main = bit[max(roots, key=lambda root: sum(1 for mask in ancestors.values() if mask & bit[root]))]
    path = [name for name in order if ancestors[name] & main]
    common = sum(bit[name] for name in path)
    cuts = [len(path)]
    for end in range(len(path) - 1, 0, -1):
        common &= ancestors[path[end]] & ~bit[path[end]]
        if common.bit_count() == end:
            cuts.append(end)
    parts, taken = [], 0
    for begin, end in pairwise([0, *reversed(cuts)]):
        needed = reduce(or_, (ancestors[name] for name in path[begin:end]), 0) & ~taken
        parts.append([order[number] for number in bits(needed)])
        taken |= needed
    parts[-1] += [name for name in order if not taken & bit[name]]
    return parts


def _edges(value: Any, nodes: Mapping[str, Any]) -> dict[str, list[str]]:
    after: dict[str, list[str]] = {name: [] for name in nodes}
    for number, edge in enumerate(_list([] if value is None else value, "edges")):
        if not isinstance(edge, list) or len(edge) != 2 or not all(isinstance(end, str) for end in edge):
            raise ProfileError(f"edges[{number}] must be a list of two node ids.")
        for end in edge:
            if end not in nodes:
                raise ProfileError(f"edges[{number}] names {_shown(end)}, which is not a node.")
        if edge[1] not in after[edge[0]]:  # an operation may use an output twice
            after[edge[0]].append(edge[1])
    return after


def _topological_order(after: Mapping[str, Sequence[str]]) -> list[str]:
    missing = dict.fromkeys(after, 0)
    for heads in after.values():
        for head in heads:
            missing[head] += 1
    order = [name for name, count in missing.items() if not count]
    for name in order:
        for head in after[name]:
            missing[head] -= 1
            if not missing[head]:
                order.append(head)
    if len(order) < len(after):
        stuck = sorted(set(after) - set(order))
        raise ProfileError(f"The edges form a cycle through or before {', '.join(stuck[:5])[:MAX_NAME]}.")
    return order


def _layers_of_chain(profile: Mapping[str, Any]) -> tuple[tuple[Layer, ...], CutPoints]:
    """Return the layers and the cut points of ``chain``: differences between consecutive states."""
    chain = _list(profile["chain"], "chain")
    if not chain:
        raise ProfileError("chain is empty.")
    if len(chain) > MAX_STATES and profile.get("chain_predecessors") is not None:
        raise ProfileError(f"chain has {len(chain)} states with branches; at most {MAX_STATES} are planned.")
    # between branches that are not ordered, a state may have less before it than the state listed earlier
    linear = profile.get("chain_predecessors") is None
    keys = ("compute_s", "activation_bytes", "parameter_bytes", "output_activation_bytes")
    rows, names = [], []
    for number, item in enumerate(chain):
        where = f"chain[{number}]"
        state = _object(item, where, _STATE_KEYS, required=keys)
        signed = keys[:3] if not linear else ()
        rows.append([_number(state[key], f"{key} of {where}", signed=key in signed) for key in keys])
        ids = state.get("antichain", [])
        if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
            raise ProfileError(f"antichain of {where} must be a list of node ids.")
        names.append(" + ".join(ids)[:MAX_NAME] or f"layer {number}")
    table = np.array(rows, float)
    sums = np.cumsum(table[:, :3], axis=0)
    before = _chain_order(profile.get("chain_predecessors"), len(chain))
    for column, key in enumerate(keys[:3]):
        cumulative = sums[:, column]
        slack = 1e-9 * max(1e-3, float(np.abs(cumulative).max()))
        if (cumulative < -slack).any() or (
            before & (cumulative[:, None] > cumulative[None, :] + slack)
        ).any():
            raise ProfileError(f"The sums of {key} along the chain decrease; no layer may be negative.")
    states = CutPoints(sums[:, 0], sums[:, 1], sums[:, 2], table[:, 3], before)
    ordered = before | before.T | np.eye(len(chain), dtype=bool)
    cuts = [int(cut) for cut in np.flatnonzero(ordered.all(axis=1))]
    if not cuts or cuts[-1] != len(chain) - 1:
        raise ProfileError("The last state of the chain must follow all others.")
    ends = np.vstack([np.zeros(3), sums[cuts]])
    layers = []
    for cut, (low, high) in zip(cuts, pairwise(ends), strict=True):
        compute_s, activation_bytes, parameter_bytes = (float(number) for number in high - low)
        sent = float(table[cut, 3])
        layers.append(Layer(names[cut], compute_s, activation_bytes, parameter_bytes, sent))
    return tuple(layers), states


def _chain_order(value: Any, count: int) -> Bools:
    before = np.zeros((count, count), bool)
    if value is None:
        return np.triu(np.ones((count, count), bool), 1)
    if not isinstance(value, list) or len(value) != count:
        raise ProfileError("chain_predecessors must have one list of positions for each state of the chain.")
    for state, earlier in enumerate(value):
        if not isinstance(earlier, list):
            raise ProfileError(f"chain_predecessors[{state}] must be a list of positions.")
        for one in earlier:
            if type(one) is not int or not 0 <= one < state:
                raise ProfileError(
                    f"chain_predecessors[{state}] has {_shown(one)}; it must be an earlier position of the chain."
                )
            before[one, state] = True
    return before


def _op(node: Mapping[str, Any]) -> str:
    op: str = node.get("op", "")
    return op


def _object(
    value: Any, where: str, known: Collection[str], *, required: Collection[str]
) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ProfileError(f"{where} must be a JSON object.")
    if unknown := sorted(set(value) - set(known)):
        raise ProfileError(
            f"{where} has the unknown key {_shown(unknown[0])}; known are {', '.join(sorted(known))}."
        )
    if missing := sorted(set(required) - set(value)):
        raise ProfileError(f"{where} has no {missing[0]!r}.")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProfileError(f"{where} must be a list.")
    most = 4 * MAX_LAYERS if where == "edges" else MAX_LAYERS
    if len(value) > most:
        raise ProfileError(f"{where} has {len(value)} entries; at most {most} are planned.")
    return value


def _number(value: Any, where: str, *, signed: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and abs(value) > MAX_NUMBER:  # compared first: an integer may be too large for a float
        raise ProfileError(f"{where} is {_shown(value)}; at most {MAX_NUMBER:g} is accepted.")
    if not is_number or not math.isfinite(value):
        raise ProfileError(f"{where} is {_shown(value)}; it must be a number.")
    if value < 0 and not signed:
        raise ProfileError(f"{where} is {value}; it must not be negative.")
    return float(value)


def _shown(value: Any) -> str:
    """Return a value of the profile for a message, also if it is long."""
    if isinstance(value, int) and abs(value) > 10 * MAX_NUMBER:
        return "a number above 1e18" if value > 0 else "a number below -1e18"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
