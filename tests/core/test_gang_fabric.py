"""What a pool names for gangs on several nodes, against what nodes told: names, networks, patterns, addresses."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portal.domain.nodes.gang_fabric import (
    GangFabric,
    InterfaceAddress,
    allocatable_addresses,
    fabric_errors,
    format_endpoint,
    missing_requirements,
    node_address,
)

ETH = {
    "name": "eth0",
    "address": "192.0.2.7",
    "chosen": True,
    "addresses": ["192.0.2.7/24", "2001:db8::7/64"],
}
IB = {"name": "ib0", "address": "fd00:9::7", "chosen": False, "addresses": ["fd00:9::7/64"]}
OLD = {"name": "ib0", "address": "10.9.0.7", "chosen": False}  # as agents of before told it
SUBNET = {"subnet": "10.9.0.0/24", "range": ["10.9.0.32", "10.9.0.63"], "gateway": "10.9.0.1"}
HELLO = {
    "interfaces": [ETH, IB],
    "fabric_devices": ["/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"],
    "networks": {"podman": [{"name": "fabric0", "driver": "macvlan", "subnets": [SUBNET]}], "docker": None},
}


@pytest.mark.parametrize(
    ("chosen", "named", "there"),
    [
        ("", "", InterfaceAddress("eth0", "192.0.2.7")),
        ("", "ib0", InterfaceAddress("ib0", "fd00:9::7")),
        ("eth0", "ib0", InterfaceAddress("eth0", "192.0.2.7")),
        ("", "2001:db8::/32", InterfaceAddress("eth0", "2001:db8::7")),
        ("", "fd00:9::/64", InterfaceAddress("ib0", "fd00:9::7")),
        ("", "10.9.0.0/16", None),
        ("", "ib7", None),
        ("ib7", "eth0", None),
    ],
)
def test_the_interface_of_the_node_precedes_that_of_the_pool(chosen, named, there) -> None:
    assert node_address([ETH, IB], chosen, named) == there


def test_an_older_agent_reports_one_address() -> None:
    assert node_address([ETH, OLD], "", "10.9.0.0/16") == InterfaceAddress("ib0", "10.9.0.7")


@pytest.mark.parametrize(
    ("runtime", "fabric", "said"),
    [
        ("podman", GangFabric(), ""),
        ("podman", GangFabric("ib0", "", ("/dev/infiniband/uverbs*",), "mlx5_0"), ""),
        ("podman", GangFabric("ib7"), "It has no interface ib7."),
        ("podman", GangFabric("10.9.0.0/16"), "It has no address in 10.9.0.0/16."),
        ("podman", GangFabric("", "fabric0"), ""),
        ("podman", GangFabric("", "fabric7"), "Its podman has no network fabric7."),
        ("docker", GangFabric("", "fabric7"), ""),  # it does not say: the start will
        (
            "podman",
            GangFabric(devices=("/dev/infiniband/uverbs7",)),
            "It does not allow /dev/infiniband/uverbs7.",
        ),
        ("process", GangFabric("ib0"), ""),
        (
            "process",
            GangFabric("ib7", "", ("/dev/infiniband/*",)),
            "It has no interface ib7. It runs plain processes, which cannot use container networks or devices.",
        ),
    ],
)
def test_missing_interfaces_of_a_node_are_named(runtime: str, fabric: GangFabric, said: str) -> None:
    assert missing_requirements(HELLO, runtime, "", fabric) == said


def test_an_agent_without_report_lacks_nothing() -> None:
    assert missing_requirements({}, "podman", "", GangFabric("ib0", "", ("/dev/infiniband/*",))) == ""


@pytest.mark.parametrize(
    ("fabric", "field"),
    [
        (GangFabric("10.9.0.1/16"), "fabric_interface"),
        (GangFabric("ib0; rm"), "fabric_interface"),
        (GangFabric("ib0", "fabric0"), "fabric_interface"),
        (GangFabric(network="host"), "fabric_network"),
        (GangFabric(network="fw-lab-jother"), "fabric_network"),
        (GangFabric(network="container:x"), "fabric_network"),
        (GangFabric(devices=("/dev/../etc/passwd",)), "fabric_devices"),
        (GangFabric(devices=("/etc/passwd",)), "fabric_devices"),
        (GangFabric(devices=("/dev/a",) * 65), "fabric_devices"),
        (GangFabric(adapters="mlx5_0 x"), "fabric_adapters"),
    ],
)
def test_invalid_fabrics_are_refused_by_field(fabric: GangFabric, field: str) -> None:
    assert set(fabric_errors(fabric)) == {field}
    assert (
        fabric_errors(GangFabric("fd00:9::/64", "", ("/dev/infiniband/uverbs[0-3]",), "^mlx5_0:1,mlx5_1"))
        == {}
    )


@given(
    first=st.integers(0, 255),
    size=st.integers(0, 255),
    version=st.sampled_from(["10.9.0.0/24", "fd00:9::/64"]),
)
def test_addresses_are_unique_and_in_the_upper_half(first, size, version) -> None:
    subnet = ipaddress.ip_network(version)
    last = min(first + size, 255)
    ends = [str(subnet[first]), str(subnet[last])]
    reported = {"name": "n", "subnets": [{"subnet": version, "range": ends, "gateway": str(subnet[1])}]}
    found = [ipaddress.ip_address(each) for each in allocatable_addresses(reported)]
    assert len(found) == len(set(found)) <= 256
    assert all(subnet[first] <= each <= subnet[last] for each in found)
    assert not {subnet[0], subnet[1], subnet[-1]} & set(found)
    assert found == sorted(found, reverse=True)
    if last > first + 1 and subnet[last] not in (subnet[-1], subnet[1]):
        assert found[0] == subnet[last]


def test_ipv6_addresses_are_displayed_in_brackets() -> None:
    assert (format_endpoint("10.1.2.3", 29400), format_endpoint("fd00::1", 29400)) == (
        "10.1.2.3:29400",
        "[fd00::1]:29400",
    )
