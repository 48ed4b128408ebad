"""Measured links: one row for each pair of nodes, and marks of slow nodes that expire."""

from __future__ import annotations

import datetime as dt

import pytest

from portal.models import Node, NodeLink
from portal.services.nodes.network_links import record_link, update_slow_nodes
from tests import factories

pytestmark = pytest.mark.django_db


@pytest.fixture
def nodes() -> list[Node]:
    pool = factories.pool()
    return [factories.node(pool) for _ in range(3)]


def slow() -> set[int]:
    return set(Node.objects.filter(slow_network=True).values_list("pk", flat=True))


def test_the_newest_measurement_replaces_the_one_before_in_either_direction(nodes) -> None:
    record_link(nodes[0], nodes[1], mib_per_s=100.0, connect_ms=0.5)
    record_link(nodes[1], nodes[0], mib_per_s=120.0, connect_ms=None)
    link = NodeLink.objects.get()
    assert (link.node_a_id, link.node_b_id) == tuple(sorted((nodes[0].pk, nodes[1].pk)))
    assert (link.mib_per_s, link.connect_ms) == (120.0, None)


def test_a_slow_node_is_marked_until_it_is_measured_again(nodes) -> None:
    first, second, third = nodes
    record_link(first, second, mib_per_s=1000.0, connect_ms=0.1)
    record_link(first, third, mib_per_s=50.0, connect_ms=0.1)
    assert slow() == {third.pk}
    record_link(third, first, mib_per_s=900.0, connect_ms=0.1)
    assert slow() == set()


def test_the_mark_expires_with_its_measurement(nodes) -> None:
    first, second, third = nodes
    record_link(first, second, mib_per_s=1000.0, connect_ms=0.1)
    record_link(first, third, mib_per_s=50.0, connect_ms=0.1)
    link = NodeLink.objects.get(mib_per_s=50.0)
    NodeLink.objects.filter(pk=link.pk).update(measured_at=link.measured_at - dt.timedelta(hours=25))
    update_slow_nodes()
    assert slow() == set()


def test_pools_are_compared_only_with_themselves(nodes) -> None:
    other_pool = factories.pool()
    others = [factories.node(other_pool) for _ in range(3)]
    for peer in nodes[1:]:
        record_link(nodes[0], peer, mib_per_s=1000.0, connect_ms=0.1)
    for peer in others[1:]:
        record_link(others[0], peer, mib_per_s=50.0, connect_ms=0.1)
    assert slow() == set()
