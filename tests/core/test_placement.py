"""What the floor remembers is what it would find out anew, whichever strategy places."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portal.domain.scheduling.throughput import Layout, LayoutSpeed
from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    GpuRow,
    GpuUuid,
    HeldSlots,
    NodeId,
    NodeRow,
    PoolId,
    ProjectId,
    TaskRequest,
    TaskShape,
)

STRATEGIES = ("pack", "spread", "fragmentation")


def node(
    name: str, gpus: int = 4, model: str = "A100", cpu_milli: int = 32_000, memory_mib: int = 40_960
) -> NodeRow:
    rows = tuple(GpuRow(GpuUuid(f"{name}-{i}"), i, model, memory_mib) for i in range(gpus))
    return NodeRow(NodeId(name), name, PoolId("p"), True, True, cpu_milli, 0, 65_536, 0, rows)


def shape(
    gpus: int = 1, milli: int = WHOLE_MILLI, cpu_milli: int = 4_000, tenant: str | None = None, **more: object
) -> TaskShape:
    request = TaskRequest(gpus, milli, cpu_milli, 1_024).change(more)
    return TaskShape(request, tenant=None if tenant is None else ProjectId(tenant))


NODES = [
    node("a", 8, cpu_milli=64_000), node("b", 4), node("c", 2, "T4", memory_mib=16_384),
    node("d", 8, cpu_milli=24_000), node("e", 0), node("f", 1, "T4", 128_000),
]  # fmt: skip
SHAPES = (
    shape(), shape(milli=470), shape(milli=810), shape(milli=300, cpu_milli=12_000), shape(2), shape(4),
    shape(8), shape(0), shape(share_mib=10_000), shape(2, share_mib=20_480),
    shape(2, 400), shape(gpu_model="T4"), shape(milli=250, gpu_model="A100|T4"),
)  # fmt: skip
ASKED = Counter({s.request: 9 - i % 4 for i, s in enumerate(SHAPES)})
SPEEDS = (
    LayoutSpeed(Layout("T4", 1, 1, 0), 100),
    LayoutSpeed(Layout("A100", 2, 2, 0), 60),
    LayoutSpeed(Layout("A100", 1, 1, 0), 50),
)
moves = st.lists(
    st.tuples(
        st.integers(0, len(SHAPES) - 1),
        st.sampled_from((1, 1, 2, 3)),
        st.booleans(),
        st.sampled_from([(), SPEEDS, SPEEDS[1:]]),
    ),
    max_size=40,
)


def floor(strategy: str, nodes: list[NodeRow] = NODES) -> NodePlacer:
    return NodePlacer(nodes, strategy, demand=ASKED)


def looked_at_anew(old: NodePlacer, strategy: str) -> NodePlacer:
    new = floor(strategy)
    new.set_to_min_of(old, old, range(len(NODES)))
    return new


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(moves=moves)
def test_cached_and_fresh_placements_agree(strategy: str, moves) -> None:
    """After any takes and returns, the next place is the one that a floor without memory would give."""
    lived, taken = floor(strategy), []
    for which, tasks, back, speeds in moves:
        fresh = looked_at_anew(lived, strategy)
        asked = SHAPES[which], tasks, None, speeds
        assert lived.capacity(SHAPES[which]).tolist() == fresh.capacity(SHAPES[which]).tolist()
        assert lived.copy().place_gang(*asked) == fresh.copy().place_gang(*asked)
        held = lived.place_gang(*asked)
        assert held == fresh.place_gang(*asked)
        if held is None:
            continue
        if back:
            lived.release(held)
        else:
            taken.append(held)
        assert (lived.free_milli >= 0).all() and (lived.free_milli <= WHOLE_MILLI).all()
        assert (lived.cpu_free >= 0).all() and (lived.memory_free >= 0).all()
    for held in taken:
        lived.release(held)
    assert (lived.free_milli == floor(strategy).free_milli).all()
    assert (lived.cpu_free == floor(strategy).cpu_free).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(moves=moves, random=st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(strategy: str, moves, random) -> None:
    shuffled = NODES.copy()
    random.shuffle(shuffled)
    one, other = floor(strategy), floor(strategy, shuffled)
    for which, tasks, _, speeds in moves:
        asked = SHAPES[which], tasks, None, speeds
        assert one.place_gang(*asked) == other.place_gang(*asked)


def test_without_known_requests_fragmentation_packs() -> None:
    packed, unknown = NodePlacer(NODES, "pack"), NodePlacer(NODES, "fragmentation")
    for one in SHAPES * 3:
        assert packed.place_gang(one, 1) == unknown.place_gang(one, 1)


def test_a_share_joins_the_gpu_that_it_fills() -> None:
    here = floor("fragmentation")
    here.place_gang(shape(milli=470), 1)
    first = here.place_gang(shape(milli=470), 1)
    assert first is not None
    assert np.count_nonzero(here.free_milli[first[0].node] == 60) == 1


def test_fragmentation_also_places_a_gang_on_few_nodes() -> None:
    here = floor("fragmentation")
    held = here.place_gang(shape(1), 8)
    assert held is not None
    assert {one.node for one in held} == {0}


def test_gpus_of_a_node_with_few_cpus_go_to_jobs_that_need_few() -> None:
    """Two nodes with equal GPUs: the task that asks for much CPU goes where its CPU is no loss."""
    asked = {TaskRequest(1, WHOLE_MILLI, 4_000, 0): 1}
    rich, poor = node("rich", 2, cpu_milli=64_000), node("poor", 2, cpu_milli=16_000)
    held = NodePlacer([poor, rich], "fragmentation", demand=asked).place_gang(shape(0, cpu_milli=14_000), 1)
    assert held is not None
    assert held[0].node == 1  # by name: poor, rich


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overcommitted_node_takes_nothing(strategy: str) -> None:
    """While others leave, places may be kept twice over for a moment; such a node is simply full."""
    here = NodePlacer([node("a", 1)], strategy, demand=ASKED)
    for _ in range(2):
        here.adjust(HeldSlots(0, (0,), 900, 30_000, 60_000), -1)
    assert all(here.place_gang(one, 1) is None for one in SHAPES)


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(deadline=None, max_examples=30)
@given(share_mib=st.integers(2_000, 90_000), gpus=st.sampled_from((1, 1, 2, 4)))
def test_shares_by_memory_fill_a_gpu_and_never_pass_its_memory(
    strategy: str, share_mib: int, gpus: int
) -> None:
    sizes = {"small": 16_384, "large": 81_920}
    here = NodePlacer([node(name, 4, memory_mib=mib) for name, mib in sizes.items()], strategy, demand=ASKED)
    asked = shape(gpus, cpu_milli=0, memory_mib=0, share_mib=share_mib)
    promised = here.capacity(asked).tolist()
    placed = Counter[tuple[str, int]]()
    while found := here.place_gang(asked, 1):
        placed.update((here.nodes[found[0].node].name, slot) for slot in found[0].slots)
    for i, one in enumerate(here.nodes):
        on = [placed[one.name, slot] for slot in range(4)]
        assert max(on) * share_mib <= sizes[one.name]
        assert sum(on) == gpus * promised[i]
        if gpus == 1:
            assert (max(on) + 1) * -(-share_mib * WHOLE_MILLI // sizes[one.name]) > WHOLE_MILLI


def test_a_node_of_several_kinds_counts_a_share_by_its_smallest_gpu() -> None:
    mixed = node("mixed", 1)
    mixed = replace(mixed, gpus=(*mixed.gpus, GpuRow(GpuUuid("big"), 1, "H100", 81_920)))
    here = NodePlacer([mixed], "pack")
    found = here.place_gang(shape(2, share_mib=20_480), 1)
    assert found is not None
    assert found[0].milli == 500


def test_shares_of_a_gpu_are_of_one_project() -> None:
    """Until the last of them has gone; a share that is undone leaves the GPU to whom it was shared with before."""
    ours, theirs = shape(milli=400, tenant="ours"), shape(milli=400, tenant="theirs")
    floor = NodePlacer([node("n1", 1)], "pack")
    floor.load_tenants(())
    assert (floor.fit_count(ours), floor.fit_count(theirs)) == (2, 2)
    mine = floor.place_gang(ours, 1)
    assert (floor.fit_count(ours), floor.fit_count(theirs)) == (1, 0)
    assert floor.place_gang(theirs, 1) is None
    other = floor.copy()
    other.release(mine)
    guest = other.place_gang(theirs, 1)
    assert (other.fit_count(ours), floor.fit_count(ours)) == (0, 1)
    both = floor.copy()
    both.set_to_min_of(floor, other, [0])
    assert (both.fit_count(ours), both.fit_count(theirs)) == (0, 0), "each stands there at another time"
    other.release(guest)
    other.adjust(mine[0], -1)
    assert (other.fit_count(ours), other.fit_count(theirs)) == (1, 0)
    floor.load_tenants(None)
    assert floor.fit_count(theirs) == 1, "any"


def test_a_gang_that_does_not_fit_beside_fractions_does_not_start() -> None:
    placer = floor("spread")
    for which, tasks in [(0, 2), (3, 3), (7, 3), (12, 3), (0, 2), (9, 1), (1, 2), (0, 1), (0, 1)]:
        assert placer.place_gang(SHAPES[which], tasks) is not None
    free = placer.cpu_free.tolist(), placer.free_milli.tolist()
    assert placer.place_gang(SHAPES[9], 2) is None
    assert (placer.cpu_free.tolist(), placer.free_milli.tolist()) == free
