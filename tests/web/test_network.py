"""The page and list of measured links between nodes."""

from __future__ import annotations

import pytest

from portal.services.nodes.network_links import record_link
from tests import factories

pytestmark = pytest.mark.django_db


def test_links_of_a_pool_are_a_matrix_with_slow_ones_marked(client) -> None:
    pool = factories.pool()
    one, two, three = (factories.node(pool) for _ in range(3))
    record_link(one, two, mib_per_s=1180.4, connect_ms=0.2)
    record_link(one, three, mib_per_s=95.0, connect_ms=0.3)
    client.force_login(factories.user("ada"))
    page = client.get("/cluster/network/").content.decode()
    assert f"Pool {pool.name}" in page and "median 638" in page and "slow below 319" in page
    assert page.count(">1,180<") + page.count(">1180<") == 2
    assert page.count('data-u="slow"') == 2 and page.count("not measured") == 2
    row = page[page.index(f'href="/nodes/{three.public_id}/"') :]
    assert "slow</span>" in row[: row.index("</th>")]
    found = client.get("/api/v1/node-links/").json()["items"]
    assert [(each["node_a"], each["node_b"], each["mib_per_s"]) for each in found] == [
        (one.name, three.name, 95.0),
        (one.name, two.name, 1180.4),
    ]


def test_without_measurements_the_page_explains_when_they_are_made(client) -> None:
    client.force_login(factories.user("ada"))
    assert "Nothing measured yet" in client.get("/cluster/network/").content.decode()
