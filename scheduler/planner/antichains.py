"""The states between which PipeDream's optimizer cuts a graph with parallel branches.

A state is an antichain, nodes of which none precedes another; before its cut are these nodes and those that precede
them. States are reached as by PipeDream's ``optimizer_graph_hierarchical.py``: the first one is a root, and a state
is followed by those in which a node gives way to one of its successors. What passes a cut is the output of the state,
and of the nodes before it that have a successor which does not precede the same node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.planner.cut_points import CutPoints

MAX_EXPLORED_STATES = 400


@dataclass(frozen=True)
class Amounts:
    """What a node of a graph needs for a minibatch."""

    op: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the bits of a mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class _Graph:
    """Nodes by their position in topological order; sets of nodes are bit masks."""

    def __init__(self, order: Sequence[str], after: Mapping[str, Sequence[str]]) -> None:
        position = {name: number for number, name in enumerate(order)}
        self.count = len(order)
        self.successors = [[position[head] for head in after[name]] for name in order]
        self.before, self.behind = [0] * self.count, [0] * self.count  # without the node itself
        for node, heads in enumerate(self.successors):
            for head in heads:
                self.before[head] |= self.before[node] | 1 << node
        for node in reversed(range(self.count)):
            for head in self.successors[node]:
                self.behind[node] |= self.behind[head] | 1 << head
        self._children = [sum(1 << head for head in heads) for heads in self.successors]
        self._open: dict[int, int] = {}

    def main_root(self) -> int:
        roots = [node for node in range(self.count) if not self.before[node]]
        return max(roots, key=lambda root: self.behind[root].bit_count())

    def outputs(self, state: int) -> int:
        """Return the nodes whose output passes the cut after a state."""
        found = state
        for node in bits(state):
            if node not in self._open:
                inside = self.before[node] | 1 << node
                opened = (each for each in bits(self.before[node]) if self._children[each] & ~inside)
                self._open[node] = sum(1 << each for each in opened)
            found |= self._open[node]
        return found

    def next_states(self, state: int) -> Iterator[int]:
        outputs = self.outputs(state)
        for node in bits(outputs):
            for head in self.successors[node]:
                if not state >> head & 1 and not self.behind[head] & outputs:
                    moved = outputs & ~(1 << node) | 1 << head
                    yield sum(1 << each for each in bits(moved) if not self.behind[each] & moved)

    def part_before(self, state: int) -> int:
        """Return the nodes before the cut after a state."""
        found = state
        for node in bits(state):
            found |= self.before[node]
        return found


def antichain_states(
    nodes: Mapping[str, Amounts], order: Sequence[str], after: Mapping[str, Sequence[str]]
) -> CutPoints | None:
    """Return the states of a connected graph, or None if they are too many or do not end in one state.

    ``order`` is topological.
    """
    graph = _Graph(order, after)
    states = [1 << graph.main_root()]
    known, followers = set(states), dict[int, list[int]]()
    for state in states:  # grows while it is read
        followers[state] = []
        for following in graph.next_states(state):
            if following not in known:
                if len(states) == MAX_EXPLORED_STATES:
                    return None
                known.add(following)
                states.append(following)
            followers[state].append(following)
    inside = {state: graph.part_before(state) for state in states}
    # a state has more before it than those that it follows
    states.sort(key=lambda state: inside[state].bit_count())
    number = {state: position for position, state in enumerate(states)}
    before = np.zeros((len(states),) * 2, bool)
    for state in states:
        for following in followers[state]:
            earlier, later = number[state], number[following]
            if earlier >= later:
                return None
            before[:, later] |= before[:, earlier]
            before[earlier, later] = True
    if not before[:-1, -1].all():
        return None
    inside[states[-1]] = (1 << graph.count) - 1  # nodes on which no state depends
    amounts = np.array(
        [
            (
                nodes[name].forward_s + nodes[name].backward_s,
                nodes[name].activation_bytes,
                nodes[name].parameter_bytes,
            )
            for name in order
        ]
    )
    sums = np.array([amounts[list(bits(inside[state]))].sum(axis=0) for state in states])
    sent = np.array([amounts[list(bits(graph.outputs(state))), 1].sum() for state in states])
    return CutPoints(sums[:, 0], sums[:, 1], sums[:, 2], sent, before)
