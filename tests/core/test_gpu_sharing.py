"""Shares of a GPU belong to one project: the verdict of a waiting job, and the setting that allows several."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.decide import decide
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import GpuShare, ProjectId, TaskRequest, TaskShape
from tests.core.cluster_builder import cluster, node, project, runs, waits


def test_a_job_waiting_for_a_share_is_told_that_the_gpu_is_shared() -> None:
    here = node("n1", 1)
    stands = runs("old", "theirs", ("n1", [0]), milli=400)
    new = waits("new", "ours", gpus_per_task=1, milli_per_gpu=500)
    photo = cluster(
        nodes=[here], projects=[project("ours"), project("theirs")], running=[stands], pending=[new]
    )
    (verdict,) = decide(photo, Policy()).verdicts
    assert "1 GPU with free capacity is shared by other projects" in verdict.message
    assert verdict.details["gpus_shared_elsewhere"] == 1
    (start,) = decide(photo, Policy(gpu_sharing_scope="any")).starts
    assert start.tasks[0].gpus == (GpuShare(here.gpus[0].uuid, 500),)
    mine = replace(photo, running=(replace(stands, project=new.project),))
    assert len(decide(mine, Policy()).starts) == 1


SHAPES = [
    TaskShape(TaskRequest(1, milli, cpu_milli, 0, share_mib=share_mib), tenant=ProjectId(tenant))
    for milli, share_mib in ((300, None), (500, None), (1000, 20_480))
    for cpu_milli in (0, 3_000)
    for tenant in ("ours", "theirs", "others")
]


@given(
    steps=st.lists(st.tuples(st.integers(0, len(SHAPES)), st.integers(0, 9)), max_size=25), looks=st.randoms()
)
@settings(max_examples=100)
def test_capacity_for_shares_is_the_sum_over_nodes(
    steps: list[tuple[int, int]], looks: random.Random
) -> None:
    """Also where a node's processors bound it, whatever was taken and given back since somebody last looked."""
    floor = NodePlacer(
        [node("n1", 2, cpu_milli=8_000), node("n2", 1), node("n3", 2, cpu_milli=5_000)], "pack"
    )
    floor.load_tenants(())
    other, taken = floor, []
    for which, turn in steps:
        if which < len(SHAPES):
            taken += floor.place_gang(SHAPES[which], 1) or []
        elif taken:
            floor.release([taken.pop(turn % len(taken))])
            if turn == 0:
                other = floor.copy()
            elif turn == 1:
                floor.set_to_min_of(floor.copy(), other, [0, 2])
        for shape in looks.sample(SHAPES, 3):
            assert floor.fit_count(shape) == floor.capacity(shape).sum()
    for shape in SHAPES:
        assert floor.fit_count(shape) == floor.capacity(shape).sum()
