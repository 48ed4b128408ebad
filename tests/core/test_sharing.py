"""Shares of a GPU are for one project alone: what a waiting job is told of it, and the knob that lets anybody in."""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.cluster import GpuShare
from scheduler.core.decide import decide
from scheduler.core.policy import Policy
from tests.core.drawn import cluster, node, project, runs, waits


def test_who_waits_for_a_share_is_told_that_others_share_the_gpu() -> None:
    here = node("n1", 1)
    stands = runs("old", "theirs", ("n1", [0]), milli=400)
    new = waits("new", "ours", gpus_per_task=1, milli_per_gpu=500)
    photo = cluster(
        nodes=[here], projects=[project("ours"), project("theirs")], running=[stands], pending=[new]
    )
    (verdict,) = decide(photo, Policy()).verdicts
    assert "1 GPU with room is shared by other projects" in verdict.sentence
    assert verdict.numbers["gpus_shared_elsewhere"] == 1
    (start,) = decide(photo, Policy(share_gpus="anybody")).starts
    assert start.tasks[0].gpus == (GpuShare(here.gpus[0].uuid, 500),)
    mine = replace(photo, running=(replace(stands, project=new.project),))
    assert len(decide(mine, Policy()).starts) == 1
