"""The network policy of a project, and the addresses that no container may reach."""

from __future__ import annotations

import pytest

from portal.domain.states import NodeState
from portal.errors import Forbidden, InvalidRequest
from portal.models import AuditEntry, Node, Project
from portal.selectors.nodes.network_policy import (
    container_policy,
    denied_addresses,
    egress_allow_list,
    restricted_pools,
)
from portal.services.nodes import nodes
from portal.services.projects.projects import do_change_project
from tests import factories

pytestmark = pytest.mark.django_db


@pytest.fixture
def dataset():
    admin, manager = factories.user("root", admin=True), factories.user("dean")
    above = factories.project("faculty", manager=manager)
    return {
        "admin": admin,
        "manager": manager,
        "above": above,
        "below": factories.project("lab", parent=above),
        "pool": factories.pool(),
    }


def hold(project: Project, mode: str) -> None:
    Project.objects.filter(pk=project.pk).update(policy={"egress": mode})


def test_a_project_has_the_strictest_policy_of_its_pool_and_its_parents(dataset) -> None:
    pool, above, below = dataset["pool"], dataset["above"], dataset["below"]
    assert container_policy(pool, below).network == {"mode": "open", "allow": []}
    assert restricted_pools({}) == set()
    hold(above, "listed")
    do_change_project(dataset["admin"], above, egress_allow=["10.1.0.0/16 443", "dns"])
    below = Project.objects.get(pk=below.pk)
    assert container_policy(pool, below).network == {"mode": "listed", "allow": ["10.1.0.0/16 443", "dns"]}
    hold(below, "open")  # it cannot be less strict than the one above
    assert container_policy(pool, below).network["mode"] == "listed"
    hold(below, "none")
    assert container_policy(pool, below).network == {"mode": "none", "allow": []}
    assert container_policy(pool, above).network["mode"] == "listed"
    assert restricted_pools({}) == {(pool.public_id, above.public_id), (pool.public_id, below.public_id)}
    Project.objects.update(policy={})
    pool.policy = {"egress": "none"}
    pool.save()
    assert container_policy(pool, factories.project("other")).network["mode"] == "none"


def test_user_namespaces_are_refused_unless_the_pool_allows_them(dataset) -> None:
    pool, above, below = dataset["pool"], dataset["above"], dataset["below"]

    def allowed() -> list[bool]:
        return [container_policy(pool, project).user_namespaces for project in (above, below)]

    assert allowed() == [False, False]
    Project.objects.filter(pk=above.pk).update(policy={"user_namespaces": "allow"})
    assert allowed() == [False, False], "a project cannot be less strict than its pool"
    pool.policy = {"user_namespaces": "allow"}
    pool.save()
    assert allowed() == [True, True]
    Project.objects.filter(pk=below.pk).update(policy={"user_namespaces": "refuse"})
    assert allowed() == [True, False]


def test_the_nearest_list_counts(dataset) -> None:
    above, below = dataset["above"], dataset["below"]
    do_change_project(dataset["admin"], above, egress_allow=["10.1.0.0/16"])
    assert egress_allow_list(Project.objects.get(pk=below.pk)) == ("10.1.0.0/16",)
    do_change_project(dataset["admin"], below, egress_allow=[" 10.2.0.1   443 ", "10.2.0.1 443", ""])
    assert egress_allow_list(Project.objects.get(pk=below.pk)) == ("10.2.0.1 443",)
    assert AuditEntry.objects.filter(action="project.change").latest("id").after["egress_allow"] == [
        "10.2.0.1 443"
    ]


def test_only_administrators_change_a_list_and_only_to_destinations(dataset) -> None:
    with pytest.raises(Forbidden):
        do_change_project(dataset["manager"], dataset["above"], egress_allow=["0.0.0.0/0"])
    for entry in ("example.org", "10.0.0.0/8:443", "-j ACCEPT", "::/0"):
        with pytest.raises(InvalidRequest) as refused:
            do_change_project(dataset["admin"], dataset["above"], egress_allow=[entry])
        assert list(refused.value.fields) == ["egress_allow"]
    with pytest.raises(InvalidRequest):
        do_change_project(
            dataset["admin"], dataset["above"], egress_allow=[f"10.0.0.{n % 256} {n + 1}" for n in range(201)]
        )


def test_the_portal_and_every_node_are_denied(dataset, settings) -> None:
    settings.PORTAL_URL, settings.APPS_DOMAIN = "https://192.0.2.7:8443", "192.0.2.8.localhost:8000"
    settings.ALLOWED_HOSTS, settings.EGRESS_DENY = ["192.0.2.9", ".example.org", "*"], ["198.51.100.0/24"]
    factories.node(dataset["pool"], host="203.0.113.4", addresses=["203.0.113.5", "2001:db8::5", "127.0.0.1"])
    factories.node(dataset["pool"], host="203.0.113.6", name="gone")
    Node.objects.filter(name="gone").update(state="retired")
    found = denied_addresses()
    assert {
        "192.0.2.7/32", "192.0.2.9/32", "198.51.100.0/24", "203.0.113.4/32", "203.0.113.5/32", "2001:db8::5/128",
    } <= set(found)  # fmt: skip
    assert not {"203.0.113.6/32", "127.0.0.1/32"} & set(found)


def test_an_address_with_a_zone_is_sent_to_no_other_node(dataset) -> None:
    """Agents on Python 3.8 refuse the whole list for one, and their nodes could not connect."""
    stored = ["fe80::5%eth0", "fe80::6%x y"]
    factories.node(dataset["pool"], host="fe80::7%eth1", addresses=stored)
    found = denied_addresses()
    assert {"fe80::5/128", "fe80::6/128", "fe80::7/128"} <= set(found)
    assert not [each for each in found if "%" in each]
    reported = {"interfaces": [{"addresses": ["fe80::8%eth0/64", "10.0.0.7/24"]}]}
    assert nodes.reported_addresses(reported) == ["10.0.0.7", "fe80::8"]


def test_a_node_cannot_close_an_address_on_others_by_reporting_it(dataset) -> None:
    """What it reports counts when it is enrolled, and when an administrator takes it into service."""
    from tests.services.test_nodes import hello

    node = factories.node(dataset["pool"], boot_id="one", host="203.0.113.4")

    def reports(address: str) -> None:
        row = {"name": "eth0", "address": address, "prefix": 24, "addresses": [f"{address}/24", "nonsense"]}
        reported = hello({"node": node}) | {"interfaces": [row | {"speed_mbit": None, "chosen": True}]}
        nodes.record_hello(node.pk, reported, received_s=100.0)

    reports("203.0.113.5")
    reports("198.51.100.99")
    node.refresh_from_db()
    assert node.addresses == ["203.0.113.5"]
    assert "198.51.100.99/32" not in denied_addresses()
    nodes.do_set_node_state(dataset["admin"], node, NodeState.CORDONED)
    nodes.do_set_node_state(dataset["admin"], node, NodeState.READY)
    node.refresh_from_db()
    assert node.addresses == ["198.51.100.99"]
