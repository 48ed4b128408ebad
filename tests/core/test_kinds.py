"""Kinds of GPU: MIG slices for those who ask for them and nobody else, and GPUs that are new enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.decide import decide
from scheduler.core.model.apply_plan import apply_plan
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import GpuRow, GpuUuid, NodeRow
from scheduler.core.session.cache import DecisionCache
from tests.core.cluster_builder import PLACEMENTS, cluster, node, project, started, waits
from tests.core.plan_rules import PlanError, check_plan

POLICY = Policy()
SLICE = "1g.10gb"


def sliced(name: str, slices: int, whole: int = 0, profile: str = SLICE, capability: float = 8.0) -> NodeRow:
    """A node with slices of 10 GiB before its whole GPUs of 80."""
    gpus = [
        GpuRow(GpuUuid(f"{name}-{i}"), i, "A100", 10_240 if i < slices else 81_920,
               mig_profile=profile if i < slices else None, compute_capability=capability)
        for i in range(slices + whole)
    ]  # fmt: skip
    return node(name, 0, gpus=tuple(gpus))


def one(*nodes: NodeRow, **asks):
    """The plan for one job on these nodes."""
    snapshot = cluster(nodes, [project("p")], pending=[waits("j", "p", asks.pop("gpus", 1), **asks)])
    plan = decide(snapshot, POLICY)
    check_plan(snapshot, plan)
    return plan


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_mig_slices_and_whole_gpus_are_not_interchangeable(placement) -> None:
    nodes = [sliced("n0", 2, 1), sliced("n1", 2, profile="2g.20gb")]
    jobs = [waits("whole", "p"), waits("more", "p"), waits("half", "p", milli_per_gpu=500)]
    jobs += [waits(f"small{i}", "p", mig_profile=SLICE) for i in range(3)]
    snapshot = cluster(nodes, [project("p")], pending=jobs)
    snapshot = replace(snapshot, pools=tuple(replace(pool, placement=placement) for pool in snapshot.pools))
    plan = decide(snapshot, POLICY)
    check_plan(snapshot, plan)
    assert len(started(plan) & {"whole", "more", "half"}) == 1
    assert len(started(plan) & {"small0", "small1", "small2"}) == 2


def test_a_plan_that_mixes_slices_and_gpus_is_invalid() -> None:
    asked = cluster([sliced("n0", 1)], [project("p")], pending=[waits("j", "p", mig_profile=SLICE)])
    plan = decide(asked, POLICY)
    with pytest.raises(PlanError, match="whole GPUs"):
        check_plan(replace(asked, pending=(waits("j", "p"),)), plan)
    newer = asked.pending[0].change({"min_compute_capability": 9.0})
    with pytest.raises(PlanError, match="higher capability"):
        check_plan(replace(asked, pending=(newer,)), plan)


@pytest.mark.parametrize(
    ("asks", "message"),
    [
        ({"mig_profile": "3g.40gb"}, "Needs 1 3g.40gb slice; there is no suitable 3g.40gb slice in this cluster."),
        (
            {"mig_profile": SLICE, "gpus": 3},
            "Needs 3 1g.10gb slices on one node; the largest node of this cluster has 2.",
        ),
        ({"gpus": 2}, "Needs 2 GPUs on one node; the largest node of this cluster has 1."),
        (
            {"min_compute_capability": 9.0},
            "Needs 1 GPU of compute capability 9.0 or more; there is no suitable GPU in this cluster.",
        ),
    ],
)  # fmt: skip
def test_an_unmatched_gpu_request_can_never_start(asks, message) -> None:
    (verdict,) = one(sliced("n0", 2, 1), **asks).verdicts
    assert (verdict.code, verdict.message) == (VerdictCode.UNSATISFIABLE, message)


def test_an_unknown_compute_capability_is_not_enough() -> None:
    assert not one(node("n0", 1), min_compute_capability=8.0).starts
    assert one(sliced("n0", 0, 1, capability=8.6), min_compute_capability=8.6).starts


def test_a_slice_counts_as_one_gpu_and_is_carried_along() -> None:
    snapshot = cluster([sliced("n0", 2)], [project("p")], pending=[waits("j", "p", mig_profile=SLICE)])
    plan = decide(snapshot, POLICY)
    assert [share.milli for start in plan.starts for task in start.tasks for share in task.gpus] == [1000]
    (row,) = apply_plan(snapshot, plan).running
    assert row.constraints.mig_profile == SLICE


def test_an_incremental_decision_sees_a_changed_layout() -> None:
    memory = DecisionCache()
    snapshot = cluster([sliced("n0", 2)], [project("p")], pending=[waits("j", "p", 2)])
    assert decide(snapshot, POLICY, memory).verdicts[0].code is VerdictCode.UNSATISFIABLE
    merged = tuple(replace(gpu, mig_profile=None) for gpu in snapshot.nodes[0].gpus)
    whole = replace(snapshot, nodes=(replace(snapshot.nodes[0], gpus=merged),))
    assert decide(whole, POLICY, memory).starts
