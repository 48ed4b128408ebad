"""Gangs keep together: racks drawn by hand, and the islands of a node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.capacity.topology import NO_DOMAIN, TopologyIndex, default_topology, pick_slots_by_island
from scheduler.core.decide import decide
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import NodeRow, TaskRequest, TaskShape, TopologyRow
from tests.core.cluster_builder import cluster, node, places, project, waits

LEVELS = ("block", "rack")
FABRIC = TopologyRow("fabric", LEVELS)


def racked(name: str, block: str, rack: str | None, count: int = 4, **changes: object) -> NodeRow:
    labels = (("block", block), *((("rack", rack),) if rack else ()))
    return node(name, count, labels=labels, **changes)


#        block a                 block b
#   rack 1    rack 2      rack 1        (no rack)
HALL = [
    racked("n0", "a", "1"), racked("n1", "a", "1"), racked("n2", "a", "2"), racked("n3", "a", "2"),
    racked("n4", "a", "2"), racked("n5", "b", "1"), racked("n6", "b", "1"), racked("n7", "b", None), node("n8"),
]  # fmt: skip


def chosen(capacity: list[int], tasks: int) -> list[int] | None:
    found = TopologyIndex(FABRIC, HALL).smallest_domain(np.array(capacity), tasks)
    return None if found is None else np.flatnonzero(found).tolist()


def test_domains_are_distinguished_by_their_whole_path() -> None:
    blocks, racks = TopologyIndex(FABRIC, HALL).domain_index.tolist()
    assert blocks == [0, 0, 0, 0, 0, 1, 1, 1, NO_DOMAIN]
    assert racks == [0, 0, 1, 1, 1, 2, 2, NO_DOMAIN, NO_DOMAIN]


@pytest.mark.parametrize(
    ("why", "capacity", "tasks", "nodes"),
    [
        ("the rack with the least room that holds all", [4, 4, 4, 4, 4, 4, 3, 4, 4], 7, [5, 6]),
        ("equal racks: the first", [4, 4, 4, 4, 0, 4, 4, 4, 4], 8, [0, 1]),
        ("only the large rack holds it", [4, 4, 4, 4, 4, 4, 4, 4, 4], 9, [2, 3, 4]),
        ("no rack holds it, a block does", [4, 4, 4, 4, 4, 4, 4, 4, 4], 13, [0, 1, 2, 3, 4]),
        ("the tighter block", [8, 8, 4, 4, 4, 4, 4, 9, 4], 17, [5, 6, 7]),
        ("no block holds it", [4, 4, 4, 4, 4, 4, 4, 4, 4], 21, None),
        ("an overfull node counts as full", [4, -9, 4, 0, 0, 0, 0, 0, 0], 4, [0, 1]),
    ],
)
def test_the_nearest_nodes(why: str, capacity: list[int], tasks: int, nodes: list[int] | None) -> None:
    assert chosen(capacity, tasks) == nodes, why


def test_the_first_topology_that_labels_a_node_counts() -> None:
    other = TopologyRow("cables", ("switch",))
    assert default_topology([other], HALL) is None
    fabric = default_topology([FABRIC, other], HALL)
    assert fabric is not None
    assert fabric.levels == LEVELS


def test_a_gang_crosses_as_few_levels_as_it_can() -> None:
    """Three whole nodes: only rack a/2 has three, though n0 and n1 sort before them."""
    photo = replace(
        cluster(HALL, [project("vision")], pending=[waits("j", "vision", 4, tasks=3)]), topologies=(FABRIC,)
    )
    assert {name for name, _ in places(decide(photo, Policy()), "j")} == {"n2", "n3", "n4"}


@pytest.mark.parametrize("strategy", ["pack", "fragmentation"])
@given(free=st.lists(st.integers(0, 4), min_size=9, max_size=9), tasks=st.integers(2, 30))
def test_a_topology_preference_never_blocks_a_gang(strategy: str, free: list[int], tasks: int) -> None:
    nodes = [replace(row, gpus=row.gpus[:count]) for row, count in zip(HALL, free, strict=True)]
    asked = TaskShape(TaskRequest(1, 1000, 0, 0))
    near, far = NodePlacer(nodes, strategy, topologies=[FABRIC]), NodePlacer(nodes, strategy)
    found, anyhow = near.place_gang(asked, tasks), far.place_gang(asked, tasks)
    assert (found is None) == (anyhow is None) == (sum(free) < tasks)
    if found is not None:
        racks = TopologyIndex(FABRIC, HALL).domain_index[1]
        crossed = {int(racks[one.node]) for one in found}
        room = {r: sum(f for f, rack in zip(free, racks, strict=True) if rack == r) for r in (0, 1, 2)}
        if tasks > max(free) and max(room.values()) >= tasks:
            assert len(crossed) == 1 and NO_DOMAIN not in crossed


@pytest.mark.parametrize(
    ("free", "count", "slots"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 4, [0, 1, 2, 3]),
        ([0, 1, 2, 3, 6, 7], 2, [6, 7]),  # the smaller island, the larger stays whole
        ([0, 1, 2, 3, 6, 7], 1, [6]),
        ([0, 1, 2, 6, 7], 3, [0, 1, 2]),
        ([1, 2, 3, 6, 7], 4, [1, 2, 3, 6]),  # no island holds four: the largest and one more
        ([0, 1, 2, 3, 4, 5, 6], 5, [0, 1, 2, 3, 4]),
    ],
)
def test_slots_on_few_islands(free: list[int], count: int, slots: list[int]) -> None:
    assert pick_slots_by_island(free, [0, 0, 0, 0, 1, 1, 1, 1], count) == slots


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.data())
def test_slots_are_free_and_as_many_as_requested(island_of: list[int], data: st.DataObject) -> None:
    free = data.draw(st.lists(st.sampled_from(range(len(island_of))), unique=True, min_size=1))
    count = data.draw(st.integers(1, len(free)))
    taken = pick_slots_by_island(free, island_of, count)
    assert len(taken) == len(set(taken)) == count
    assert set(taken) <= set(free)


def test_a_task_of_several_gpus_uses_one_island() -> None:
    row = node("n", 8)
    joined = replace(row, gpus=tuple(replace(gpu, nvlink_island=gpu.index // 4) for gpu in row.gpus))
    here = NodePlacer([joined], "pack")
    first, second, third = (here.place_gang(TaskShape(TaskRequest(n, 1000, 0, 0)), 1) for n in (1, 4, 2))
    assert first and second and third
    assert [set(one[0].slots) for one in (first, second, third)] == [{0}, {4, 5, 6, 7}, {1, 2}]
