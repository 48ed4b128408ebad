"""A job starts on its preferred nodes if they can take all tasks; otherwise on others, near each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.decide import decide
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import NodeId, NodeRow, ReservationRow, TopologyConstraint
from tests.core.cluster_builder import FABRIC, NOW_S, cluster, node, project, runs, waits

RACKS = {"a": "1", "b": "2", "c": "1", "d": "2"}


def nodes(gpus: int = 4) -> list[NodeRow]:
    return [
        replace(node(name, gpus), labels=(("block", "x"), ("rack", rack))) for name, rack in RACKS.items()
    ]


def node_of_rank(pending, *, running=(), placement: str = "pack", reservations=(), rows=None) -> list[str]:
    snapshot = replace(
        cluster(rows or nodes(), [project("p")], pending=[pending], running=running),
        topologies=(FABRIC,), reservations=reservations,
    )  # fmt: skip
    plan = decide(snapshot, replace(Policy(), placement=placement))
    return [str(task.node) for start in plan.starts for task in sorted(start.tasks, key=lambda one: one.rank)]


@pytest.mark.parametrize("placement", ["pack", "fragmentation", "spread"])
@pytest.mark.parametrize("preferred", [("d", "a"), ("b", "c"), ("c", "c"), ("d", "b")])
def test_each_rank_starts_on_its_preferred_node(placement: str, preferred: tuple[str, ...]) -> None:
    gang = waits("j", "p", 2, tasks=2, preferred_nodes=preferred)
    assert node_of_rank(gang, placement=placement) == list(preferred)


@pytest.mark.parametrize("taken", ["d", "a"])
def test_when_a_preferred_node_is_not_free_all_ranks_start_in_one_rack(taken: str) -> None:
    held = runs("r", "p", (taken, (0, 1, 2)))
    gang = waits("j", "p", 2, tasks=2, preferred_nodes=("d", "a"))
    found = node_of_rank(gang, running=[held])
    assert len({RACKS[name] for name in found}) == 1 and taken not in found, found


def test_without_preferred_nodes_neighbouring_ranks_are_in_the_same_rack() -> None:
    gang = waits("j", "p", 4, tasks=4, preferred_nodes=("a", "b", "c", "gone"))
    assert node_of_rank(gang) == ["a", "c", "b", "d"]


def test_a_preferred_node_too_small_for_two_tasks_is_not_filled_twice() -> None:
    gang = waits("j", "p", 3, tasks=2, preferred_nodes=("a", "a"))
    assert sorted(node_of_rank(gang)) != ["a", "a"]


def test_required_levels_and_exclusions_precede_preferences() -> None:
    together = TopologyConstraint("fabric", required="rack")
    gang = waits("j", "p", 4, tasks=2, preferred_nodes=("a", "b"), topology_constraint=together)
    assert len({RACKS[name] for name in node_of_rank(gang)}) == 1
    assert node_of_rank(replace(gang, preferred_nodes=("c", "a"))) == ["c", "a"]
    avoids = replace(gang, topology_constraint=None, avoid_nodes=(NodeId("b"),))
    assert "b" not in node_of_rank(avoids) and len(node_of_rank(avoids)) == 2
    closed = ReservationRow("m", "maintenance", (NodeId("b"),), (), NOW_S - 1, NOW_S + 3600)
    assert "b" not in node_of_rank(replace(gang, topology_constraint=None), reservations=(closed,))


def test_a_preference_never_blocks_a_start() -> None:
    busy = [runs(f"r{name}", "p", (name, (0, 1, 2))) for name in ("a", "b")]
    gang = waits("j", "p", 4, tasks=2, preferred_nodes=("a", "b"))
    assert sorted(node_of_rank(gang, running=busy)) == ["c", "d"]
