"""F counted by tables is F as the formula says it, and the score heals or breaks up as told."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from portal.domain.jobs.feasibility import GpuConstraints, GpuKind, milli_by_memory
from scheduler.core.capacity.fragmentation import (
    GROUP_WEIGHT,
    MAX_LEVELS,
    WEIGHT_TOTAL,
    Fragmentation,
    typical_mix,
)
from scheduler.core.model.snapshot import WHOLE_MILLI, TaskRequest

SLICE = "1g.10gb"
KINDS = (
    GpuKind("A100", 40_960),
    GpuKind("H100", 81_920, "", 9.0),
    GpuKind("T4", 16_384),
    GpuKind("A100", 9_728, SLICE, 8.0),
)
WIDTH = 4

asks = st.builds(
    TaskRequest,
    gpus=st.sampled_from((0, 1, 1, 1, 2, 4)),
    milli=st.just(WHOLE_MILLI),
    cpu_milli=st.sampled_from((0, 1_000, 4_000, 12_000)),
    memory_mib=st.sampled_from((0, 1_024, 8_192)),
    constraints=st.builds(
        GpuConstraints,
        gpu_model=st.sampled_from((None, "A100", "A100|T4", "B200")),
        min_gpu_memory_mib=st.sampled_from((None, 40_000)),
        mig_profile=st.sampled_from((None, None, SLICE)),
        min_compute_capability=st.sampled_from((None, None, 8.0)),
    ),
    share_mib=st.none(),
).flatmap(
    lambda ask: st.sampled_from(
        (ask, ask._replace(milli=470), ask._replace(milli=810), ask._replace(share_mib=10_000))
        if ask.gpus == 1
        else (ask,)
    )
)
mixes = st.dictionaries(asks, st.integers(1, 50), min_size=1, max_size=12)
nodes = st.tuples(
    st.lists(st.sampled_from((0, 190, 350, 530, 1000)), min_size=WIDTH, max_size=WIDTH),
    st.sampled_from(range(len(KINDS))),
    st.integers(0, 50_000),
    st.integers(0, 40_000),
)


def by_the_formula(mix: dict[TaskRequest, int], free: list[int], kind: GpuKind, cpu: int, memory: int) -> int:
    """F of one node, request by request, in PARTS x requests x milli."""
    free = sorted(free, reverse=True)
    lost = 0
    for ask, count in mix.items():
        if not ask.gpus:
            lost += (WEIGHT_TOTAL - GROUP_WEIGHT) * count * sum(free)
            continue
        milli = ask.milli if ask.share_mib is None else milli_by_memory(ask.share_mib, kind.memory_mib)
        at_once = min(
            cpu // ask.cpu_milli if ask.cpu_milli else WIDTH,
            memory // ask.memory_mib if ask.memory_mib else WIDTH,
        )
        able = [one for one in free if one >= milli] if milli <= WHOLE_MILLI else []
        if not ask.constraints.accepts(kind):
            able = []
        groups = min(len(able) // ask.gpus, at_once)
        alone = sum(able) if groups else 0
        together = sum(able[: groups * ask.gpus])
        lost += count * (
            WEIGHT_TOTAL * sum(free) - (WEIGHT_TOTAL - GROUP_WEIGHT) * alone - GROUP_WEIGHT * together
        )
    return lost


def lost(fragmentation: Fragmentation, free: list[int], kind: int, cpu: int, memory: int) -> int:
    emptiest_first = np.array([sorted(free, reverse=True)])
    return int(
        fragmentation.unusable(emptiest_first, np.array([kind]), np.array([cpu]), np.array([memory]))[0]
    )


@given(mixes, nodes)
def test_tables_and_formula_agree(mix, node) -> None:
    free, kind, cpu, memory = node
    counted = lost(Fragmentation(KINDS, mix), free, kind, cpu, memory)
    assert counted == by_the_formula(mix, free, KINDS[kind], cpu, memory)


@given(mixes, st.lists(nodes, min_size=1, max_size=6), st.randoms())
def test_the_order_of_requests_and_nodes_does_not_matter(mix, many, random) -> None:
    shuffled = list(mix.items())
    random.shuffle(shuffled)
    one, other = Fragmentation(KINDS, mix), Fragmentation(KINDS, dict(shuffled))
    free = -np.sort([[-f for f in node[0]] for node in many], axis=1)
    rest = [np.array([node[i] for node in many]) for i in (1, 2, 3)]
    order = list(range(len(many)))
    random.shuffle(order)
    assert (
        other.unusable(free[order], *(r[order] for r in rest)).tolist()
        == one.unusable(free, *rest)[order].tolist()
    )


@given(st.lists(st.integers(1, 100_000), min_size=MAX_LEVELS + 1, max_size=90, unique=True), nodes)
def test_more_amounts_than_levels_are_rounded_up_never_down(amounts, node) -> None:
    mix = {TaskRequest(1, WHOLE_MILLI, cpu, 0): 1 for cpu in amounts}
    free, kind, cpu, _ = node
    counted = lost(Fragmentation(KINDS, mix), free, kind, cpu, 0)
    assert by_the_formula(mix, free, KINDS[kind], cpu, 0) <= counted
    assert counted <= WEIGHT_TOTAL * len(mix) * sum(free)


def test_a_full_gpu_that_others_need_whole_is_worth_more_than_a_half_one() -> None:
    mix = {TaskRequest(1, WHOLE_MILLI, 0, 0): 90, TaskRequest(1, 500, 0, 0): 10}
    fragmentation = Fragmentation(KINDS, mix)
    half, whole = [500, 1000, 0, 0], [1000, 1000, 0, 0]
    fills = lost(fragmentation, half, 0, 0, 0) - lost(fragmentation, [0, 1000, 0, 0], 0, 0, 0)
    breaks = lost(fragmentation, whole, 0, 0, 0) - lost(fragmentation, [500, 1000, 0, 0], 0, 0, 0)
    points = fragmentation.score(np.array([0, fills, breaks]), np.array([0, 0, 0]))
    assert points[0] == 50
    assert points[1] > 50 > points[2]


def test_gpus_that_the_cpu_cannot_feed_count_as_lost_in_part() -> None:
    fragmentation = Fragmentation(KINDS, {TaskRequest(1, WHOLE_MILLI, 10_000, 0): 1})
    fed = lost(fragmentation, [1000] * 4, 0, 40_000, 0)
    one_fed = lost(fragmentation, [1000] * 4, 0, 10_000, 0)
    none_fed = lost(fragmentation, [1000] * 4, 0, 9_999, 0)
    assert (fed, one_fed, none_fed) == (0, GROUP_WEIGHT * 3_000, WEIGHT_TOTAL * 4_000)


def test_the_usual_mix_is_the_most_frequent_part() -> None:
    often, seldom, rare = TaskRequest(1, 1000, 1, 1), TaskRequest(1, 500, 1, 1), TaskRequest(8, 1000, 1, 1)
    assert typical_mix({rare: 1, often: 90, seldom: 9}) == {often: 90, seldom: 9}


def test_a_share_by_memory_is_rounded_up() -> None:
    assert milli_by_memory(10_000, 81_920) == 123
    assert milli_by_memory(81_920, 81_920) == 1000
    assert milli_by_memory(81_921, 81_920) > 1000
    assert milli_by_memory(1, 0) > 1000
