"""A job that must stand near together: where it may stand, and what it is told when it cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.decide import decide, preview_request
from scheduler.core.model.apply_plan import apply_plan
from scheduler.core.model.plan import AlternativeKind
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import NodeRow, Snapshot, TopologyConstraint
from scheduler.core.session.cache import DecisionCache
from tests.core.cluster_builder import FABRIC, cluster, node, places, project, runs, waits

POLICY = Policy()
ONE_RACK = TopologyConstraint("fabric", "rack")


def racked(name: str, rack: str) -> NodeRow:
    return node(name, 4, labels=(("block", "a"), ("rack", rack)))


def hall(*running, pending=(), nodes=("n0", "n1", "n2", "n3")) -> Snapshot:
    """Two racks of two nodes with four GPUs each."""
    rows = [racked(name, str(int(name[1:]) // 2)) for name in nodes]
    drawn = cluster(rows, [project("p"), project("q")], running=running, pending=pending)
    return replace(drawn, topologies=(FABRIC,))


def test_a_gang_is_placed_in_the_one_rack_with_capacity() -> None:
    gang = waits("j", "p", 4, tasks=2, topology_constraint=ONE_RACK)
    plan = decide(hall(runs("r", "q", ("n0", [0])), pending=[gang]), POLICY)
    assert {place for place, _ in places(plan, "j")} == {"n2", "n3"}


def test_a_gang_that_fits_no_rack_now_waits_with_that_reason() -> None:
    gang = waits("j", "p", 4, tasks=2, topology_constraint=ONE_RACK)
    fixed = {"preemptible": False}
    snapshot = hall(
        runs("r", "q", ("n0", [0]), **fixed), runs("s", "q", ("n2", [0]), **fixed), pending=[gang]
    )
    plan = decide(snapshot, POLICY)
    (verdict,) = plan.verdicts
    assert verdict.code is VerdictCode.INSUFFICIENT_RESOURCES
    assert verdict.message == (
        "Needs 2 × 4 GPUs in one rack; the rack with the most free capacity fits 1 of its 2 tasks now."
    )
    assert verdict.details["tasks_together"] == 1
    farther = preview_request(snapshot, POLICY, gang).alternatives
    assert farther[0].kind is AlternativeKind.RELAX_TOPOLOGY
    assert farther[0].fields == {"topology_constraint": None}
    assert decide(hall(*snapshot.running, pending=[replace(gang, topology_constraint=None)]), POLICY).starts


@pytest.mark.parametrize(
    ("topology_constraint", "tasks", "message"),
    [
        (
            ONE_RACK,
            3,
            "Needs 3 × 4 GPUs in one rack; the largest rack of this cluster can hold 2 of its 3 tasks.",
        ),
        (
            TopologyConstraint("elsewhere", "rack"),
            1,
            "Needs 4 GPUs in one rack; no node of this cluster has the level rack of the topology elsewhere.",
        ),
        (
            TopologyConstraint("fabric", "hall"),
            1,
            "Needs 4 GPUs in one hall; no node of this cluster has the level hall of the topology fabric.",
        ),
    ],
)
def test_a_gang_that_no_rack_can_ever_hold_never_starts(
    topology_constraint: TopologyConstraint, tasks: int, message: str
) -> None:
    gang = waits("j", "p", 4, tasks=tasks, topology_constraint=topology_constraint)
    plan = decide(hall(pending=[gang]), POLICY)
    (verdict,) = plan.verdicts
    assert (verdict.code, verdict.message) == (VerdictCode.UNSATISFIABLE, message)


def test_a_preferred_level_delays_no_job() -> None:
    gang = waits("j", "p", 4, tasks=5, topology_constraint=TopologyConstraint("fabric", None, "rack"))
    labelled = hall(pending=[gang])
    bare = replace(labelled, nodes=(*labelled.nodes, node("n9", 4)))
    assert len(places(decide(bare, POLICY), "j")) == 5
    unlabelled = replace(bare, nodes=tuple(replace(row, labels=()) for row in bare.nodes))
    assert len(places(decide(unlabelled, POLICY), "j")) == 5


def test_a_waiting_gang_reserves_within_one_rack() -> None:
    gang = waits("j", "p", 4, tasks=2, age_s=1e6, topology_constraint=ONE_RACK)
    short, long = (
        {"time_limit_s": 3_600, "preemptible": False},
        {"time_limit_s": 36_000, "preemptible": False},
    )
    running = [
        runs("a", "q", ("n0", [0]), **short),
        runs("b", "q", ("n1", [0]), **long),
        runs("c", "q", ("n2", [0]), **short),
    ]
    verdict = decide(hall(*running, pending=[gang]), POLICY).verdicts[0]
    assert verdict.details["reserved_from_s"] == 1_000_000.0 - 600 + 3_600  # of n2 and n3, not of n0 and n2


def test_a_running_job_keeps_its_topology_constraint() -> None:
    snapshot = hall(pending=[waits("j", "p", 4, tasks=2, topology_constraint=ONE_RACK)])
    (row,) = apply_plan(snapshot, decide(snapshot, POLICY)).running
    assert row.topology_constraint == ONE_RACK


def test_an_incremental_decision_sees_changed_labels_and_topologies() -> None:
    memory = DecisionCache()
    gang = waits("j", "p", 4, tasks=2, topology_constraint=ONE_RACK)
    apart = hall(pending=[gang], nodes=("n0", "n2"))
    assert decide(apart, POLICY, memory).verdicts[0].code is VerdictCode.UNSATISFIABLE
    moved = replace(apart, nodes=(apart.nodes[0], replace(apart.nodes[1], labels=apart.nodes[0].labels)))
    assert decide(moved, POLICY, memory).starts
    assert decide(replace(moved, topologies=()), POLICY, memory).verdicts[0].code is VerdictCode.UNSATISFIABLE
