"""The first of two steps, for real: a task is created and waits, holds what it needs, and a stop undoes it."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agents.link import AgentError, Link
from tests.agents.node.conftest import GPUS, LoneNode, log_of, wait_for
from tests.agents.ranks import MEETS
from tests.engine_harness import wait_for as eventually

SAYS = ("sh", "-c", "echo begun")


def prepare(link: Link, spec: dict[str, Any], verb: str = "prepare") -> dict[str, Any]:
    return link.request(verb, timeout_s=30, epoch=1, spec=spec)


def state_of(link: Link, job: str) -> str | None:
    rows = link.request("list", timeout_s=20)["containers"]
    return next((row["state"] for row in rows if row["job"] == job), None)


def codes_of(link: Link, job: str) -> list[int | None]:
    rows = link.request("list", timeout_s=20)["containers"]
    return [row["exit_code"] for row in rows if row["job"] == job]


def free_port() -> int:
    with socket.create_server(("", 0)) as taken:
        return int(taken.getsockname()[1])


def test_a_prepared_task_waits_for_its_start_with_gpu_and_port(node: LoneNode) -> None:
    link, port = node.open(), free_port()
    assert "prepare" in link.hello.capabilities and link.hello.rendezvous_ports == (32_000, 32_700)
    spec = node.spec("jone", *SAYS, gpus=[{"uuid": GPUS[0], "milli": 1000}], rendezvous_port=port)
    assert prepare(link, spec)["state"] == "created"
    assert prepare(link, spec)["already"] is True
    other = node.open()  # also for another agent process, after its control session has healed
    assert state_of(other, "jone") == "created"
    with pytest.raises(AgentError, match="thousandths"):
        prepare(other, node.spec("jtwo", *SAYS, gpus=[{"uuid": GPUS[0], "milli": 1}]))
    with pytest.raises(AgentError, match="is the rendezvous port of jone") as taken:
        prepare(other, node.spec("jtwo", *SAYS, rendezvous_port=port))
    assert taken.value.code == "rendezvous_port_in_use"
    assert prepare(other, spec, "start")["state"] == "running"
    wait_for(other, "exited", job="jone", exit_code=0)
    assert log_of(other, "jone") == "begun\n"


def test_a_stop_undoes_a_prepared_task_and_it_never_starts(node: LoneNode) -> None:
    link = node.open()
    spec = node.spec("jone", *SAYS, gpus=[{"uuid": GPUS[0], "milli": 1000}])
    prepare(link, spec)
    stopped = link.request("stop", timeout_s=20, epoch=1, job="jone", attempt=1, grace_s=1)
    assert stopped["gone"] and [each["exit_code"] for each in stopped["tasks"]] == [None]
    for verb in ("prepare", "start"):
        with pytest.raises(AgentError) as refused:
            prepare(link, spec, verb)
        assert refused.value.code == "tombstoned"
    assert prepare(link, node.spec("jtwo", *SAYS, gpus=[{"uuid": GPUS[0], "milli": 1000}]))


def test_a_port_in_use_is_refused_at_both_steps_and_nothing_is_held(
    node: LoneNode,
) -> None:
    link = node.open()
    with socket.create_server(("", 0)) as outsider:
        port = outsider.getsockname()[1]
        with pytest.raises(AgentError, match=str(port)):
            prepare(link, node.spec("jone", *SAYS, rendezvous_port=port))
        assert state_of(link, "jone") is None
    spec = node.spec("jone", *SAYS, rendezvous_port=port, gpus=[{"uuid": GPUS[0], "milli": 1000}])
    assert prepare(link, spec)["state"] == "created"
    with socket.create_server(("", port)), pytest.raises(AgentError, match=str(port)):
        prepare(link, spec, "start")
    assert state_of(link, "jone") is None
    assert prepare(link, spec, "start")["state"] == "running"


def test_devices_that_the_node_does_not_lend_are_refused(node: LoneNode) -> None:
    link = node.open()
    with pytest.raises(AgentError, match="is not one of the fabric devices"):
        prepare(link, node.spec("jone", *SAYS, devices=["/dev/sda"]))
    with pytest.raises(AgentError, match="has no"):
        prepare(link, node.spec("jone", *SAYS, devices=["/dev/infiniband/uverbs77"]))
    with pytest.raises(AgentError, match="form"):
        prepare(link, node.spec("jone", *SAYS, devices=["/dev/infiniband/../sda"]))
    with pytest.raises(AgentError, match="is not one of the fabric devices"):
        prepare(link, node.spec("jone", *SAYS, devices=["/dev/nul?"]))
    node.configure(fabric_devices=["/dev/null", "/dev/shm"])
    lends = node.open()
    assert lends.hello.fabric_devices and "/dev/null" in lends.hello.fabric_devices
    with pytest.raises(AgentError, match="Plain processes"):
        prepare(lends, node.spec("jone", *SAYS, devices=["/dev/nul?"]))
    with pytest.raises(AgentError, match="not a character device"):
        prepare(lends, node.spec("jone", *SAYS, devices=["/dev/shm"]))


def place(port: int, job: str = "jone") -> dict[str, Any]:
    return {"address": "127.0.0.1", "port": port, "job": job, "attempt": 1, "within_s": 0.3}


def test_until_rank_zero_starts_its_agent_answers_at_its_port(
    node: LoneNode,
) -> None:
    link, other, port = node.open(), node.open(), free_port()

    def why(job: str = "jone") -> object:
        return other.request("check_rendezvous", timeout_s=5, **place(port, job))["reason"]

    spec = node.spec("jone", "sleep", "600", rendezvous_port=port, hold_rendezvous_port=True)
    assert why() == "connection refused"
    assert prepare(link, spec)["state"] == "created"
    assert why() is None and why("jtwo") == "another service responds there"
    assert prepare(link, spec)["already"] is True and why() is None
    assert prepare(other, spec)["already"] is True and why() is None  # the link to the first was lost, say
    assert prepare(link, spec, "start")["state"] == "running"
    assert why() == "connection refused"  # it is the task's now
    again = node.spec("jtwo", *SAYS, rendezvous_port=port, hold_rendezvous_port=True)
    link.request("stop", timeout_s=20, epoch=1, job="jone", attempt=1, grace_s=0)
    assert prepare(link, again)["state"] == "created" and why("jtwo") is None
    link.request("stop", timeout_s=20, epoch=1, job="jtwo", attempt=1, grace_s=0)
    assert why("jtwo") == "connection refused"


def test_bandwidth_is_measured_for_one_client_at_a_time(node: LoneNode) -> None:
    port = free_port()
    prepare(node.open(), node.spec("jone", "true", rendezvous_port=port, hold_rendezvous_port=True))
    measure = place(port) | {"within_s": 5, "measure_s": 0.3}
    links = [node.open() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        begun_s = time.monotonic()
        results = list(
            pool.map(lambda link: link.request("check_rendezvous", timeout_s=20, **measure), links)
        )
    assert time.monotonic() - begun_s >= 3 * 0.3
    assert all(row["reason"] is None and row["mib_per_s"] > 1 for row in results), results
    plain = links[0].request("check_rendezvous", timeout_s=5, **place(port))
    assert plain["mib_per_s"] is None and plain["reason"] is None


def test_a_client_that_disconnects_does_not_block_the_next_measurement(node: LoneNode) -> None:
    link, port = node.open(), free_port()
    prepare(link, node.spec("jone", "true", rendezvous_port=port, hold_rendezvous_port=True))
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        stranger.recv(512)
        stranger.sendall(b"measure\n")
        assert stranger.recv(8) == b"go\n"
    row = link.request("check_rendezvous", timeout_s=20, **place(port) | {"within_s": 5, "measure_s": 0.1})
    assert row["mib_per_s"] > 1


def test_no_answer_and_a_closed_connection_are_distinguished(node: LoneNode) -> None:
    link = node.open()
    with socket.create_server(("127.0.0.1", 0), backlog=8) as silent:  # it takes connections and says nothing
        port = silent.getsockname()[1]
        reported = link.request("check_rendezvous", timeout_s=5, **place(port))
        assert reported["reason"] == "no response in 0.3 s" and 0.25 < reported["seconds"] < 3
    with pytest.raises(AgentError, match="address"):
        link.request("check_rendezvous", timeout_s=5, **place(port) | {"address": "node-a"})


def test_a_check_reports_what_the_node_lacks_for_its_pool(node: LoneNode) -> None:
    node.configure(fabric_devices=["/dev/null"])
    link = node.open()
    here = next(each for each in link.hello.interfaces if each.chosen)

    def check(**named: Any) -> dict[str, Any]:
        fabric = {"runtime": "process", "interface": "", "network": "", "devices": []} | named
        rows = link.request("preflight", timeout_s=30, fabric=fabric)["checks"]
        return next(row for row in rows if row["name"] == "fabric")

    assert (
        check(interface=here.name)["ok"]
        and check(interface=here.addresses[0].rpartition("/")[0] + "/32")["ok"]
    )
    wrong = check(interface="192.0.2.128/32", network="fabric0", devices=["/dev/null", "/dev/fabric7"])
    assert not wrong["ok"] and "no interface 192.0.2.128/32" in wrong["message"]
    assert "Plain processes" in wrong["message"] and "/dev/fabric7" in wrong["message"]


@pytest.mark.rig
@pytest.mark.parametrize("where", ["in the network of their job", "on the network of the node"])
def test_ranks_of_containers_meet(podman_node: LoneNode, where: str) -> None:
    node, port = podman_node, free_port()
    node.configure(fabric_devices=["/dev/null"])
    link = node.open()
    on_node = where == "on the network of the node"
    address = (
        next((each.address for each in link.hello.interfaces if each.chosen), "")
        if on_node
        else "{rank0_address}"
    )
    specs = []
    for rank in (0, 1):
        env = {"RANK": str(rank), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        reported: dict[str, Any] = {"host_network": True} if on_node else {"local_rendezvous": True}
        reported |= {"rendezvous_port": port} if on_node and rank == 0 else {}
        more = {"runtime": "podman", "image": node.image, "env": env, "task": rank, **reported}  # type: ignore[attr-defined]
        specs.append(node.spec("jgang", "python3", "-c", MEETS, **more))
    for spec in specs:
        assert prepare(link, spec)["state"] == "created"
    for spec in specs:
        prepare(link, spec, "start")
    eventually("both have ended", lambda: codes_of(link, "jgang") == [0, 0])
    assert "heard one" in log_of(link, "jgang")
    if on_node:  # it is only created: not everywhere may we raise the bound that it asks for
        fabric = {"job": "jfabric", "task": 0, "devices": ["/dev/nul?"], "rendezvous_port": None, "env": {}}
        made = prepare(link, specs[0] | fabric)["container"]
        reported = node.podman("inspect", "--format", "{{.HostConfig.Devices}} {{.HostConfig.Ulimits}}", made)  # type: ignore[attr-defined]
        assert "/dev/null" in reported.stdout and "MEMLOCK -1 -1" in reported.stdout, reported
