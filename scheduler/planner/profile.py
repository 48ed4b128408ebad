"""Reads layer profiles: per layer forward and backward time, activation bytes and parameter bytes.

A profile is a JSON object with ``nodes`` and ``edges``, or with ``chain``, or with both
(docs/pipeline-plans.md describes the format). ``Profile.layers`` is always a chain: branches between two
points where the model can be cut are one layer.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_LAYERS = 400
"""Maximum number of nodes, and of states of the chain."""
MAX_NUMBER = 1e18
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
class CutPoints:
    """Points at which the model can be cut, in topological order.

    ``compute_s``, ``activation_bytes`` and ``parameter_bytes`` are sums over everything before the cut;
    ``before[k, j]`` is True if the part between the cuts ``k`` and ``j`` can be a stage.
    """

    compute_s: Floats
    activation_bytes: Floats
    parameter_bytes: Floats
    output_bytes: Floats
    before: Bools

    def __len__(self) -> int:
        return len(self.compute_s)


@dataclass(frozen=True)
class Profile:
    """A layer profile. ``states`` is None unless the profile lists the cuts of parallel branches."""

    model: str
    layers: tuple[Layer, ...]
    batch_size: int | None
    states: CutPoints | None

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
    """Return the profile in a JSON text, or raise ProfileError."""
    try:
        read = json.loads(text, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, RecursionError) as problem:
        raise ProfileError(f"The profile is not JSON: {problem}.") from None
    return read_profile(read)


def read_profile(read: Any) -> Profile:
    """Return the profile in a decoded JSON value, or raise ProfileError."""
    profile = _object(read, "The profile", _PROFILE_KEYS, required=())
    batch_size = profile.get("batch_size")
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ProfileError(f"batch_size is {batch_size!r}; it must be a whole number of at least 1.")
    model = profile.get("model", "model")
    if not isinstance(model, str):
        raise ProfileError(f"model is {model!r}; it must be a text.")
    from_nodes = _layers_of_nodes(profile) if "nodes" in profile else ()
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
    return Profile(model, layers, batch_size, states)


def _layers_of_nodes(profile: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Return the layers between the points at which the graph of nodes can be cut."""
    nodes: dict[str, Mapping[str, Any]] = {}
    for number, item in enumerate(_list(profile["nodes"], "nodes")):
        where = f"nodes[{number}]"
        node = _object(item, where, _NODE_KEYS, required=_NODE_KEYS - {"op"})
        if not isinstance(node["id"], str) or not isinstance(node.get("op", ""), str):
            raise ProfileError(f"{where} must have a text as its id and op.")
        if node["id"] in nodes:
            raise ProfileError(f"{where} has the id {node['id']!r} of an earlier node.")
        for key in ("fwd_ms", "bwd_ms", "activation_bytes", "parameter_bytes"):
            _number(node[key], f"{key} of {node['id']}")
        nodes[node["id"]] = node
    after = _edges(profile.get("edges"), nodes)
    order = _topological_order(after)
    entered = {head for heads in after.values() for head in heads}
    # inputs are always in the first stage, and an unused element of a tuple is no output of the model
    kept = [name for name in order if name in entered or not _op(nodes[name]).startswith("Input")]
    kept = [name for name in kept if after[name] or not _op(nodes[name]).startswith("__getitem__")]
    layers: list[Layer] = []
    inside: set[str] = set()
    for part in _parts(kept, after):
        inside |= set(part)
        members = [nodes[name] for name in part]
        forward_s, backward_s = (sum(one[key] for one in members) / 1000 for key in ("fwd_ms", "bwd_ms"))
        sent = [name for name in inside if not inside.issuperset(after[name])] or part[-1:]
        layers.append(
            Layer(
                " + ".join(_op(one) or one["id"] for one in members)[:MAX_NAME],
                forward_s + backward_s,
                sum(one["activation_bytes"] for one in members),
                sum(one["parameter_bytes"] for one in members),
                sum(nodes[name]["activation_bytes"] for name in sent),
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
            if head in ancestors:
                ancestors[head] |= ancestors[name]
    descendants = Counter(root for root in order for mask in ancestors.values() if mask & bit[root])
    roots = [name for name in order if ancestors[name] == bit[name]]
    main = max(roots, key=lambda root: descendants[root], default="")
    path = [name for name in order if ancestors[name] & bit.get(main, 0)]
    on_path = sum(bit[name] for name in path)
    cuts, common = [len(path)], on_path
    for end in range(len(path) - 1, 0, -1):
        common &= ancestors[path[end]] & ~bit[path[end]]
        if common.bit_count() == end:
            cuts.append(end)
    parts, taken = [], 0
    for begin, end in pairwise([0, *reversed(cuts)]):
        needed = reduce(or_, (ancestors[name] for name in path[begin:end]), 0)
        parts.append([name for name in order if needed & ~taken & bit[name]])
        taken |= needed
    if lost := [name for name in order if not taken & bit[name]]:
        parts[-1] += lost
    return parts


def _edges(value: Any, nodes: Mapping[str, Any]) -> dict[str, list[str]]:
    after: dict[str, list[str]] = {name: [] for name in nodes}
    for number, edge in enumerate(_list(value or [], "edges")):
        if not isinstance(edge, list) or len(edge) != 2 or not all(isinstance(end, str) for end in edge):
            raise ProfileError(f"edges[{number}] must be a list of two node ids.")
        for end in edge:
            if end not in nodes:
                raise ProfileError(f"edges[{number}] names {end!r}, which is not a node.")
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
        raise ProfileError(f"The edges form a cycle through or before {', '.join(stuck[:5])}.")
    return order


def _layers_of_chain(profile: Mapping[str, Any]) -> tuple[tuple[Layer, ...], CutPoints]:
    """Return the layers and the cut points of ``chain``: differences between consecutive states."""
    chain = _list(profile["chain"], "chain")
    if not chain:
        raise ProfileError("chain is empty.")
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
        names.append(" + ".join(ids) or f"layer {number}")
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
                    f"chain_predecessors[{state}] has {one!r}; it must be an earlier position of the chain."
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
            f"{where} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}."
        )
    if missing := sorted(set(required) - set(value)):
        raise ProfileError(f"{where} has no {missing[0]!r}.")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProfileError(f"{where} must be a list.")
    if where != "edges" and len(value) > MAX_LAYERS:
        raise ProfileError(f"{where} has {len(value)} entries; at most {MAX_LAYERS} are planned.")
    return value


def _number(value: Any, where: str, *, signed: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ProfileError(f"{where} is {value!r}; it must be a number.")
    if value < 0 and not signed:
        raise ProfileError(f"{where} is {value}; it must not be negative.")
    if abs(value) > MAX_NUMBER:
        raise ProfileError(f"{where} is {value}; at most {MAX_NUMBER:g} is accepted.")
    return float(value)


def _refuse_constant(text: str) -> NoReturn:
    raise ProfileError(f"The profile has the value {text}; numbers must be finite.")
