"""Cells of alike GPUs: they hold what a floor holds, and get back what was taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.forecast.capacity_buckets import (
    BucketBuilder,
    BucketOccupancy,
    BucketRequest,
    CapacityBuckets,
)
from scheduler.core.model.snapshot import WHOLE_MILLI, Snapshot
from scheduler.core.session.gang import build_task_shape
from tests.core.cluster_builder import snapshots

MILLI = st.sampled_from([WHOLE_MILLI, WHOLE_MILLI, 500, 300, 250])
NEEDS = st.builds(
    BucketRequest, st.integers(1, 3), MILLI, st.sampled_from([(0,), (1,), (0, 1)]), st.integers(0, 2)
).map(lambda need: need._replace(tenant=0) if need.milli == WHOLE_MILLI else need)


@st.composite
def grounds(draw: st.DrawFn) -> CapacityBuckets:
    sorts = tuple(draw(st.lists(st.integers(0, 1), min_size=1, max_size=4)))
    whole = tuple(draw(st.integers(0, 4)) for _ in sorts)
    shared = {
        cell: {10 * cell + gpu: draw(st.sampled_from([0, 200, 500, 700])) for gpu in range(draw(st.integers(0, 2)))}
        for cell in range(len(sorts))
    }  # fmt: skip
    carrying = [gpu for gpus in shared.values() for gpu in gpus]
    tenants = {gpu: draw(st.sampled_from([-1, 1, 2])) for gpu in carrying if draw(st.booleans())}
    return CapacityBuckets((*sorts, 0, 1), (*whole, 0, 0), shared, 1_000, tenants)


def with_sizes(
    ground: CapacityBuckets, needs: Iterable[BucketRequest]
) -> tuple[BucketOccupancy, Callable[[BucketRequest], int]]:
    """The cells, and how many tasks surely find places there now."""
    sizes = list(dict.fromkeys(need.size for need in needs))
    cells = BucketOccupancy(ground, sizes)

    def room(need: BucketRequest) -> int:
        return int(cells.fit_counts[sizes.index(need.size), list(need.bucket_types)].sum())

    return cells, room


def milli_free(cells: BucketOccupancy) -> Counter[tuple[int, tuple[int, tuple[int, ...]], object]]:
    """How many cells of each sort have how much, and of this for each tenant alone."""
    return Counter(
        (
            sort,
            state,
            tuple((who, *sorted(of.values())) for who, of in sorted(cells._own.get(cell, {}).items())),
        )
        for sort, having in enumerate(cells._buckets_by_state)
        for state, mine in having.items()
        for cell in mine
    )


@given(grounds(), st.lists(NEEDS, max_size=12), st.randoms(use_true_random=False))
def test_released_capacity_returns_once(ground, needs, dice) -> None:
    cells, room = with_sizes(ground, needs)
    before, rooms = milli_free(cells), [room(need) for need in needs]
    taken = []
    for need in needs:
        fits = room(need) >= 1
        place = cells.allocate(need, need.bucket_types)
        assert (place is not None) is fits
        if place is not None:
            assert ground.type_of[place[0]] in need.bucket_types
            taken.append(place)
        for (_, (whole, shared), _), _ in milli_free(cells).items():
            assert whole >= 0 and all(0 <= milli < WHOLE_MILLI for milli in shared)
    dice.shuffle(taken)
    for place in taken:
        cells.release(place)
    assert milli_free(cells) == before
    assert [room(need) for need in needs] == rooms


@given(grounds(), NEEDS, st.integers(1, 6))
def test_a_gang_that_fits_finds_all_its_tasks(
    ground: CapacityBuckets, need: BucketRequest, count: int
) -> None:
    cells, room = with_sizes(ground, [need])
    if room(need) >= count:
        assert all(cells.allocate(need, need.bucket_types) is not None for _ in range(count))


@given(snapshots(), st.booleans())
def test_buckets_hold_one_task_where_a_floor_applies(snapshot: Snapshot, apart: bool) -> None:
    """Tasks of one GPU; CPU and memory, which a play does not follow, are left out."""
    for pool in snapshot.pools:
        nodes = [
            replace(row, cpu_used_milli=0, memory_used_mib=0) for row in snapshot.nodes if row.pool == pool.id
        ]
        rows = [row for row in snapshot.pending if row.request.gpus == 1]
        shapes = [
            build_task_shape(
                row.request,
                row.project,
                tuple(sorted(row.avoid_nodes)),
                row.node_affinity,
                1,
                same_gpus=False,
            )[0]
            for row in rows
        ]
        here = [row for row in snapshot.running if row.pool == pool] if apart else None
        survey = BucketBuilder(nodes, shapes, [row.nodes for row in snapshot.reservations], here)
        running = [survey.slots_of(row.tasks) for row in snapshot.running if row.pool == pool.id]
        needs = [survey.request_for(shape) for shape in shapes]
        _, room = with_sizes(survey.build(running), needs)
        floor = NodePlacer(nodes, "pack")
        floor.load_tenants(here)
        for shape, need in zip(shapes, needs, strict=True):
            assert (room(need) >= 1) is bool(floor.capacity(shape).sum() >= 1)
