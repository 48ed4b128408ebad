"""Gangs on two nodes with real agents and processes: all start or none does, they meet, and they end as one."""

from __future__ import annotations

import json
import os
import signal
import socket
import zlib

import pytest

from agents.verbs import CHECK_RENDEZVOUS, PREPARE
from portal.domain.states import JobState
from portal.models import Allocation, Job, Node, NodeIncident, NodeLink, NodePool, Rendezvous
from portal.selectors.jobs.logs.lines import log_file, read_lines
from tests.engine_harness import held_milli, wait_for
from tests.two_local_nodes import TwoLocalNodes, agents_without

pytestmark = pytest.mark.django_db(transaction=True)

MEETS = """exec python3 -c '
import json, os, socket, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
         "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "FAIRWAY_ATTEMPT")
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    door = socket.create_server(("", place[1]))
    there = [door.accept()[0] for _ in range(size - 1)]
    heard = sorted(int(each.recv(9)) for each in there)
else:
    for turn in range(600):
        try:
            there = [socket.create_connection(place, 5)]
            break
        except OSError:
            time.sleep(0.05)
    there[0].sendall(str(rank).encode())
    heard = []
told = {name: os.environ.get(name) for name in names} | {"heard": heard, "pid": os.getpid()}
path = "{folder}/met-%s-%s" % (os.environ["FAIRWAY_ATTEMPT"], rank)
open(path + ".new", "w").write(json.dumps(told))
os.rename(path + ".new", path)
print("rank", rank, "of", size, flush=True)
while not os.path.exists("{folder}/end"):
    time.sleep(0.05)
'"""
BEGINS = 'touch "{folder}/begun-$FAIRWAY_ATTEMPT-$RANK"; exec sleep 600'


@pytest.fixture
def testbed(harness, request, monkeypatch):
    monkeypatch.setattr("scheduler.snapshot.pending.backoff_s", lambda *given: 0.0)
    testbed = TwoLocalNodes(harness, f"g{abs(hash(request.node.name)) % 10**8}", MEETS)
    NodePool.objects.filter(pk=testbed.pool.pk).update(allow_host_network=True)
    meet_at(testbed)
    return testbed


def meet_at(testbed: TwoLocalNodes, ports: int = 20) -> int:
    """Gives both nodes ports of their own to meet at, for they are one machine with others; the first of them."""
    first = 10_000 + 20 * (zlib.crc32(testbed.names[0].encode()) % 450) + os.getpid() % 20
    for node in testbed.nodes:
        Node.objects.filter(pk=node.pk).update(
            settings=node.settings | {"rendezvous_ports": [first, first + ports - 1]}
        )
    return first


def met(testbed: TwoLocalNodes, attempt: int) -> dict[int, dict[str, object]]:
    """What each rank of an attempt wrote down once it had met the others."""
    paths = testbed.folder.glob(f"met-{attempt}-?")
    return {int(path.name[-1]): json.loads(path.read_text()) for path in paths}


def begun(testbed: TwoLocalNodes) -> list[str]:
    return sorted(path.name for path in testbed.folder.glob("begun-*"))


def log_of(job: Job, attempt: int, rank: int) -> str:
    return "".join(f"{line.text}\n" for line in read_lines(log_file(job.public_id, attempt, rank)).lines)


def test_ranks_meet_on_two_nodes_and_one_that_is_killed_restarts_them_all(testbed) -> None:
    job = testbed.submit(tasks=2, retry_on=["command_failure"])
    testbed.reach(job, lambda: len(met(testbed, 1)) == 2)
    first, interface = met(testbed, 1), Rendezvous.objects.get().interfaces
    row = Rendezvous.objects.get(attempt__job=job)
    assert row.node_network and set(interface) == {node.public_id for node in testbed.nodes}
    for rank, reported in first.items():
        assert (reported["RANK"], reported["WORLD_SIZE"], reported["NODE_RANK"]) == (
            str(rank),
            "2",
            str(rank),
        )
        assert (reported["LOCAL_RANK"], reported["LOCAL_WORLD_SIZE"]) == ("0", "1")
        assert (reported["MASTER_ADDR"], reported["MASTER_PORT"]) == (row.address, str(row.port))
        assert (
            reported["GLOO_SOCKET_IFNAME"] == reported["NCCL_SOCKET_IFNAME"] == next(iter(interface.values()))
        )
    assert first[0]["heard"] == [1] and row.address != "127.0.0.1"
    testbed.reach(job, lambda: set(testbed.run(job)) == {0, 1})

    os.kill(int(str(first[1]["pid"])), signal.SIGKILL)
    testbed.reach(job, lambda: len(met(testbed, 2)) == 2)
    old = job.attempts.get(number=1)
    assert (old.state, old.stop_reason) == ("FAILED", "exit_code")
    assert set(old.task_rows.values_list("container_removed", flat=True)) == {True}
    assert set(Allocation.objects.filter(task__attempt=old).values_list("proof", flat=True)) == {"gone"}
    again = Rendezvous.objects.get(attempt__number=2)
    assert again.live and not Rendezvous.objects.get(attempt__number=1).live and again.port != row.port
    (testbed.folder / "end").touch()
    testbed.reach(job, testbed.ended(job))
    assert job.attempts.count() == 2 and held_milli() == 0 and testbed.alive() == []
    assert not Rendezvous.objects.filter(live=True).exists()
    rows = job.attempts.get(number=2).task_rows
    testbed.engine.run_until(lambda: not rows.filter(log_complete=False).exists(), 20)
    assert [log_of(job, 2, rank) for rank in (0, 1)] == ["rank 0 of 2\n", "rank 1 of 2\n"]


def test_a_refusal_of_one_node_undoes_the_whole_gang(testbed) -> None:
    testbed.command = BEGINS.replace("{folder}", str(testbed.folder))
    port = meet_at(testbed, ports=1)
    with socket.create_server(("", port)):
        job = testbed.submit(tasks=2, max_attempts=1)
        testbed.reach(job, testbed.ended(job, JobState.FAILED))
    attempt = job.attempts.get()
    assert (attempt.stop_reason, attempt.all_prepared_at) == ("start_refused", None)
    assert f"Another process listens on port {port} of this node." in attempt.message
    assert begun(testbed) == [] and testbed.alive() == [] and held_milli() == 0
    proofs = set(Allocation.objects.filter(task__attempt=attempt).values_list("proof", flat=True))
    assert proofs <= {"gone", "never_started"} and "" not in proofs
    # the port is free now, and so is everything else
    again = testbed.submit(tasks=2)
    testbed.reach(again, lambda: set(testbed.run(again)) == {0, 1})
    wait_for("both began", lambda: begun(testbed) == ["begun-1-0", "begun-1-1"])


def test_the_network_of_two_nodes_is_measured_before_their_ranks_start(testbed) -> None:
    job = testbed.submit(tasks=2)
    testbed.reach(job, lambda: len(met(testbed, 1)) == 2)
    link = NodeLink.objects.get()
    assert {link.node_a_id, link.node_b_id} == {node.pk for node in testbed.nodes}
    assert link.mib_per_s > 1 and link.connect_ms is not None


def test_a_gang_does_not_start_over_a_network_below_the_minimum_of_its_pool(testbed) -> None:
    testbed.command = BEGINS.replace("{folder}", str(testbed.folder))
    NodePool.objects.filter(pk=testbed.pool.pk).update(policy={"gang_min_bandwidth_mib_s": 1_000_000.0})
    job = testbed.submit(tasks=2, max_attempts=1)
    testbed.reach(job, lambda: job.attempts.filter(state="NODE_FAIL").exists())
    attempt = job.attempts.order_by("number").first()
    assert attempt.stop_reason == "rendezvous_unreachable" and attempt.all_prepared_at is None
    assert f"{testbed.names[1]} has a slow network to {testbed.names[0]} (" in attempt.message
    assert "and the pool requires 1000000 MiB/s" in attempt.message
    assert begun(testbed) == []


def test_a_gang_does_not_start_on_nodes_whose_clocks_differ(testbed) -> None:
    testbed.command = BEGINS.replace("{folder}", str(testbed.folder))
    NodePool.objects.filter(pk=testbed.pool.pk).update(policy={"gang_max_clock_skew_s": 30.0})
    job = testbed.submit(tasks=2, max_attempts=1)

    def ended_with_skewed_clock() -> bool:
        Node.objects.filter(pk=testbed.nodes[1].pk).update(clock_skew_s=60.0)
        return job.attempts.filter(state="NODE_FAIL").exists()

    testbed.reach(job, ended_with_skewed_clock)
    attempt = job.attempts.order_by("number").first()
    assert attempt.stop_reason == "clock_skew" and attempt.all_prepared_at is None
    assert "differ by" in attempt.message and "the 30 s that the pool allows" in attempt.message
    assert begun(testbed) == []


@pytest.mark.long
def test_while_nodes_are_disconnected_no_rank_starts_and_no_attempt_is_counted(testbed) -> None:
    testbed.command = BEGINS.replace("{folder}", str(testbed.folder))
    nodes = Node.objects.filter(name__in=testbed.names).order_by("name")
    assert testbed.engine.run_until(lambda: all("interfaces" in node.agent_info for node in nodes.all()), 20)
    first, second = nodes
    reported = first.agent_info["interfaces"]
    wrong = [each | {"address": "255.255.255.255", "addresses": ["255.255.255.255/24"]} for each in reported]
    Node.objects.filter(pk=first.pk).update(agent_info=first.agent_info | {"interfaces": wrong})
    job = testbed.submit(tasks=2, max_attempts=1)
    testbed.reach(job, lambda: job.attempts.filter(state="NODE_FAIL").exists())
    attempt = job.attempts.order_by("number").first()
    where = f"255.255.255.255:{Rendezvous.objects.get(attempt=attempt).port}"
    assert (attempt.stop_reason, attempt.all_prepared_at) == ("rendezvous_unreachable", None)
    assert attempt.message.startswith(f"{second.name} cannot reach {first.name} ({where}): ")
    told_of = attempt.task_rows.get(rank=1).status_message
    assert told_of and told_of in attempt.message
    pairs = NodeIncident.objects.filter(job=job).values_list("node", "peer", "kind")
    assert {(first.pk, second.pk, "peer_unreachable"), (second.pk, first.pk, "peer_unreachable")} == set(
        pairs
    )
    assert begun(testbed) == []
    Node.objects.filter(pk=first.pk).update(agent_info=first.agent_info)
    testbed.reach(job, lambda: set(testbed.run(job)) == {0, 1})
    assert job.attempts.filter(stop_reason="rendezvous_unreachable").count() == job.attempts.count() - 1
    row = Rendezvous.objects.get(attempt__job=job, live=True)
    assert row.connectivity_check and not row.recheck_requested
    wait_for("both began", lambda: len(begun(testbed)) == 2)


def test_an_older_agent_does_both_steps_in_one(testbed, monkeypatch) -> None:
    agents_without(monkeypatch, PREPARE)
    unsaid = CHECK_RENDEZVOUS._replace(capability="a word that such an agent does not say")
    monkeypatch.setattr("portal.services.lifecycle.rendezvous.CHECK_RENDEZVOUS", unsaid)
    job = testbed.submit(tasks=2)
    testbed.reach(job, lambda: len(met(testbed, 1)) == 2)


def test_ranks_on_one_node_use_it_and_without_permission_have_no_address(testbed) -> None:
    half = testbed.submit(tasks=2, gpus_per_task=1, milli_per_gpu=500)
    testbed.reach(half, lambda: len(met(testbed, 1)) == 2)
    assert {reported["MASTER_ADDR"] for reported in met(testbed, 1).values()} == {"127.0.0.1"}
    assert not Rendezvous.objects.get(attempt__job=half).node_network
    (testbed.folder / "end").touch()
    testbed.reach(half, testbed.ended(half))
    NodePool.objects.filter(pk=testbed.pool.pk).update(allow_host_network=False)
    script = 'echo "$RANK of $WORLD_SIZE at ${MASTER_ADDR:-nowhere}"'
    job = testbed.submit(command=script, tasks=2)
    testbed.reach(job, testbed.ended(job))
    rows = job.attempts.get().task_rows
    testbed.engine.run_until(lambda: not rows.filter(log_complete=False).exists(), 20)
    assert {log_of(job, 1, rank) for rank in (0, 1)} == {"0 of 2 at nowhere\n", "1 of 2 at nowhere\n"}
