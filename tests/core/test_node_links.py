"""Which links and nodes of a pool are slow, and that gangs prefer the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from portal.domain.nodes.node_links import LinkBandwidth, slow_below_mib_per_s, slow_nodes
from scheduler.core.decide import decide
from scheduler.core.model.policy import Policy
from tests.core.cluster_builder import cluster, node, places, project, waits

#       1 ---- 2       3 reaches each of them at a tenth of their speed
FAST, SLOW = 1000.0, 100.0


@pytest.mark.parametrize(
    ("case", "links", "slow"),
    [
        ("one link tells nothing", [(1, 2, SLOW)], set()),
        ("one of three nodes", [(1, 2, FAST), (1, 3, SLOW), (2, 3, SLOW), (1, 4, FAST), (2, 4, FAST)], {3}),
        ("two links to one node", [(1, 2, FAST), (1, 3, SLOW)], {3}),
        ("just above half of the median", [(1, 2, 100.0), (1, 3, 100.0), (2, 3, 51.0)], set()),
        ("one cable of two good nodes", [(1, 2, SLOW), (1, 3, FAST), (2, 3, FAST)], set()),
        ("a pair apart from the others", [(1, 2, SLOW), (3, 4, FAST), (4, 5, FAST)], set()),
    ],
)
def test_slow_nodes(case: str, links: list[tuple[int, int, float]], slow: set[int]) -> None:
    assert slow_nodes(LinkBandwidth(*link) for link in links) == slow, case


def test_the_threshold_is_half_of_the_median() -> None:
    links = [LinkBandwidth(1, other, speed) for other, speed in ((2, 100.0), (3, 80.0), (4, 10.0))]
    assert slow_below_mib_per_s(links) == 40.0
    assert slow_below_mib_per_s(links[:1]) == 0.0


def test_a_gang_prefers_nodes_whose_network_is_not_slow() -> None:
    nodes = [replace(node("n0"), slow_network=True), node("n1"), node("n2")]
    two = waits("j", "vision", 4, tasks=2)
    assert _nodes_of(nodes, two) == {"n1", "n2"}
    assert _nodes_of([replace(each, slow_network=False) for each in nodes], two) == {"n0", "n1"}


def test_a_slow_network_does_not_block_a_gang() -> None:
    nodes = [replace(node("n0"), slow_network=True), node("n1")]
    assert _nodes_of(nodes, waits("j", "vision", 4, tasks=2)) == {"n0", "n1"}


def test_a_single_task_may_use_a_node_with_a_slow_network() -> None:
    nodes = [replace(node("n0"), slow_network=True), node("n1")]
    assert _nodes_of(nodes, waits("j", "vision", 4)) == {"n0"}


def _nodes_of(nodes, job) -> set[str]:
    plan = decide(cluster(nodes, [project("vision")], pending=[job]), Policy())
    return {name for name, _ in places(plan, "j")}
