"""Of places that are equal otherwise a job takes the one on the layout where work like it ran faster."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portal.domain.scheduling.throughput import Layout, LayoutSpeed, levels_crossed
from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.capacity.topology import TopologyIndex
from scheduler.core.decide import decide
from scheduler.core.model.plan import Plan
from scheduler.core.model.policy import Policy
from scheduler.core.model.serialization import snapshot_from_json, snapshot_to_json
from scheduler.core.model.snapshot import GpuRow, NodeRow, TaskRequest, TaskShape, TopologyRow
from tests.core import cluster_builder
from tests.core.cluster_builder import FABRIC, LABELS, cluster, places, project, runs, waits

ONE_H = Layout("H200", 1, 1, 0)
ONE_A = Layout("A100", 1, 1, 0)
TWO_H = Layout("H200", 2, 2, 0)
TWO_A = Layout("A100", 2, 2, 0)
PLACEMENTS = ("pack", "fragmentation", "spread")


def node(name: str, model: str = "A100", islands: tuple[int | None, ...] = (None,) * 4) -> NodeRow:
    """A node with a GPU for each of the islands; of all models the memory is alike, so that scores are equal."""
    row = cluster_builder.node(name, len(islands), model=model)
    gpus = tuple(replace(gpu, nvlink_island=island) for gpu, island in zip(row.gpus, islands, strict=True))
    return replace(row, gpus=gpus)


def faster(*layouts: Layout) -> tuple[LayoutSpeed, ...]:
    """The first is fastest."""
    return tuple(LayoutSpeed(layout, 100 - 10 * i) for i, layout in enumerate(layouts))


def decided(nodes: list[NodeRow], *pending, placement: str = "pack", running=(), topologies=()) -> Plan:
    snapshot = cluster(nodes, [project("p")], pending=pending, running=running)
    return decide(replace(snapshot, topologies=topologies), replace(Policy(), placement=placement))


def where(plan: Plan, job: str = "j") -> list[str]:
    return [name for name, _ in places(plan, job)]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_of_equal_nodes_the_faster_model_is_chosen(placement: str, count: int) -> None:
    nodes = [node("a"), node("b", "H200"), node("c")]
    plain, known = waits("j", "p", count), waits("j", "p", count, layout_speeds=faster(ONE_H, ONE_A))
    assert where(decided(nodes, plain, placement=placement)) == ["a"]
    assert where(decided(nodes, known, placement=placement)) == ["b"]
    slower = replace(known, layout_speeds=faster(ONE_A, ONE_H))
    assert where(decided(nodes, slower, placement=placement)) == ["a"]


@pytest.mark.parametrize(
    "speeds", [(), faster(ONE_H), faster(TWO_H, TWO_A), (LayoutSpeed(ONE_H, 90), LayoutSpeed(ONE_A, 90))]
)
def test_without_known_differences_the_name_decides(speeds: tuple[LayoutSpeed, ...]) -> None:
    nodes = [node("a"), node("b", "H200")]
    assert where(decided(nodes, waits("j", "p", 2, layout_speeds=speeds))) == ["a"]


def test_unknown_throughput_counts_as_the_slowest_known() -> None:
    nodes = [node("a", "L4"), node("b"), node("c", "H200")]
    assert where(decided(nodes, waits("j", "p", 2, layout_speeds=faster(ONE_H, ONE_A)))) == ["c"]
    assert where(decided(nodes[:2], waits("j", "p", 2, layout_speeds=faster(ONE_H, ONE_A)))) == ["a"]
    assert where(decided(nodes[:2], waits("j", "p", 2, layout_speeds=faster(ONE_A, ONE_H)))) == ["b"]


def test_the_score_comes_first() -> None:
    """The fuller node is taken, though the other one is faster."""
    nodes, held = [node("a"), node("b", "H200")], runs("r", "p", ("a", (0,)))
    known = waits("j", "p", 2, layout_speeds=faster(ONE_H, ONE_A))
    assert where(decided(nodes, known, running=[held])) == ["a"]
    assert where(decided(nodes, known, running=[held], placement="spread")) == ["b"]


def test_gpus_of_one_nvlink_island_are_chosen_where_known_to_be_faster() -> None:
    """On both nodes two GPUs are free: on a, of two islands; on b, of one."""
    nodes = [node("a", islands=(0, 0, 1, 1)), node("b", islands=(0, 0, 1, 1))]
    held = [runs("r", "p", ("a", (0, 2))), runs("s", "p", ("b", (0, 1)))]
    plain = waits("j", "p", 2)
    apart = Layout("A100", 1, 2, 0)
    assert where(decided(nodes, plain, running=held)) == ["a"]
    assert where(decided(nodes, replace(plain, layout_speeds=faster(ONE_A, apart)), running=held)) == ["b"]
    assert where(decided(nodes, replace(plain, layout_speeds=faster(apart, ONE_A)), running=held)) == ["a"]


def test_a_gang_on_several_nodes_is_judged_as_a_whole() -> None:
    nodes = [node("a"), node("b"), node("c", "H200"), node("d", "H200")]
    gang = waits("j", "p", 4, tasks=2)
    assert where(decided(nodes, gang)) == ["a", "b"]
    assert where(decided(nodes, replace(gang, layout_speeds=faster(TWO_H, TWO_A)))) == ["c", "d"]
    assert where(decided(nodes, replace(gang, layout_speeds=faster(ONE_H, ONE_A)))) == ["a", "b"]
    mixed = Layout("A100 + H200", 2, 2, 0)
    assert where(decided(nodes, replace(gang, layout_speeds=faster(TWO_A, mixed)))) == ["a", "b"]


def test_the_levels_that_a_gang_crosses_belong_to_its_layout() -> None:
    """Within one rack the rack decides, so the layouts that count are those that cross nothing."""
    racks = [(("block", "x"), ("rack", "1")), (("block", "x"), ("rack", "1"))]
    rows = [node("a"), node("b"), node("c", "H200")]
    nodes = [replace(row, labels=labels) for row, labels in zip(rows, [*racks, racks[0]], strict=True)]
    gang = waits("j", "p", 4, tasks=2, allow_mixed_gpus=True)
    mixed, far = Layout("A100 + H200", 2, 2, 0), Layout("A100 + H200", 2, 2, 2)

    def chosen(*speeds: Layout) -> list[str]:
        return where(decided(nodes, replace(gang, layout_speeds=faster(*speeds)), topologies=(FABRIC,)))

    assert chosen(mixed, TWO_A) == ["a", "c"]
    assert chosen(far, TWO_A) == ["a", "b"]


def test_a_job_on_its_faster_node_leaves_the_other_to_the_next() -> None:
    nodes = [node("a"), node("b", "H200")]
    plan = decided(nodes, waits("j", "p", 4, age_s=9, layout_speeds=faster(ONE_H, ONE_A)), waits("k", "p", 4))
    assert (where(plan), where(plan, "k")) == (["b"], ["a"])


def test_a_saved_snapshot_contains_throughputs() -> None:
    snapshot = cluster(
        [node("a"), node("b", "H200")],
        [project("p")],
        pending=[waits("j", "p", 2, layout_speeds=faster(ONE_H, ONE_A))],
    )
    again = snapshot_from_json(snapshot_to_json(snapshot))
    assert again == snapshot
    assert where(decide(again, Policy())) == ["b"]


MODELS = st.sampled_from(["A100", "H200"])
ISLANDS = st.sampled_from([(None,) * 4, (0, 0, 1, 1), (0, 1, 2, 3), (0,) * 4])
FLOORS = st.lists(st.tuples(MODELS, ISLANDS), min_size=1, max_size=6)
LAYOUTS = st.builds(
    Layout,
    st.sampled_from(["A100", "H200", "A100 + H200"]),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 1),
)
KNOWN = st.dictionaries(LAYOUTS, st.sampled_from(range(5, 105, 5)), max_size=8).map(
    lambda known: tuple(LayoutSpeed(*each) for each in known.items())
)


def filled(floor: NodePlacer) -> Counter[tuple[int, int]]:
    """How many nodes have so many whole GPUs free, and so much in all."""
    return Counter((int((row == 1000).sum()), int(row.sum())) for row in floor.free_milli)


@pytest.mark.parametrize("strategy", ["pack", "spread"])
@settings(deadline=None, max_examples=60)
@given(
    FLOORS,
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), KNOWN), max_size=6),
)
def test_speeds_choose_among_equals_and_cost_no_room(strategy: str, rows, gangs) -> None:
    """Whatever is known, the floor is filled as it would be without; only which of the equal nodes changes."""
    nodes = [node(f"n{i}", model, islands) for i, (model, islands) in enumerate(rows)]
    plain, known = NodePlacer(nodes, strategy), NodePlacer(nodes, strategy)
    for count, tasks, speeds in gangs:
        shape = TaskShape(TaskRequest(count, 1000, 0, 0))
        one, other = plain.place_gang(shape, tasks), known.place_gang(shape, tasks, speeds=speeds)
        assert (one is None) == (other is None)
        assert filled(plain) == filled(known)


@settings(deadline=None, max_examples=60)
@given(FLOORS, st.integers(1, 4), KNOWN.filter(len))
def test_on_one_node_the_fastest_of_equal_places_is_chosen(rows, count: int, speeds) -> None:
    nodes = [node(f"n{i}", model, islands) for i, (model, islands) in enumerate(rows)]
    floor = NodePlacer(nodes, "pack")
    held = floor.place_gang(TaskShape(TaskRequest(count, 1000, 0, 0)), 1, speeds=speeds)
    assert held is not None
    percents = dict(speeds)

    def percent(row: NodeRow, gpus: list[GpuRow]) -> int:
        lies = Layout(row.gpus[0].model, 1, len({gpu.nvlink_island for gpu in gpus}), 0)
        return percents.get(lies, min(percents.values()))

    took = percent(nodes[held[0].node], [floor.gpus[held[0].node][slot] for slot in held[0].slots])
    alone = []
    for row in nodes:  # all are empty, so all are equal
        here = NodePlacer([row], "pack")
        (found,) = here.place_gang(TaskShape(TaskRequest(count, 1000, 0, 0)), 1) or ()
        alone.append(percent(row, [here.gpus[0][slot] for slot in found.slots]))
    assert took == max(alone)
    assert held[0].node == alone.index(max(alone))  # and the first of those


@given(
    st.lists(st.sampled_from(LABELS), min_size=1, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5)
)
def test_the_floor_and_the_database_count_levels_alike(labels, chosen) -> None:
    nodes = [cluster_builder.node(f"n{i}", labels=each) for i, each in enumerate(labels)]
    fabric = TopologyIndex(TopologyRow("fabric", FABRIC.levels), nodes)
    mask = fabric.known_nodes.copy()
    mask[:] = chosen[: len(nodes)]
    paths = [_path(dict(row.labels)) for row, taken in zip(nodes, mask, strict=True) if taken]
    if len(paths) > 1:
        assert fabric.levels_crossed(mask) == levels_crossed(paths, len(FABRIC.levels))


def _path(labels: dict[str, str]) -> list[str]:
    return [labels[level] for level in FABRIC.levels if level in labels]
