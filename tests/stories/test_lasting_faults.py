"""Faults that last: ten minutes without network, and a job that prints 2 GiB. Figures are printed, not asserted."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from portal.selectors.logs.files import MAX_LOG_BYTES
from tests.rig.images import RigImage
from tests.rig.node import RigNode
from tests.rig.rig import Rig
from tests.stories.operator_client import COUNTER, REST, Operator, end_counter
from tests.stories.portal import StoryPortal
from tests.stories.users import eventually

pytestmark = [pytest.mark.rig, pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(1500)]

AWAY_S = 600.0
PRINTED_BYTES = 2 * 1024**3
ANSWER_LIMIT_S = 8.0
"""Of a page or request meanwhile; the portal itself answers within it or says why not."""


@pytest.fixture(scope="module")
def operator(tiny_image: RigImage) -> Iterator[tuple[Operator, RigNode, StoryPortal]]:
    with Rig(1, image_stores=[tiny_image.store]) as rig, StoryPortal("--no-local-node") as portal:
        made = Operator(portal)
        made.add_node(rig.nodes[0], "node1")
        made.add_environment(tiny_image.name)
        yield made, rig.nodes[0], portal


def test_a_job_survives_ten_minutes_without_network(
    operator: tuple[Operator, RigNode, StoryPortal], capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes on counting, what was submitted meanwhile waits, and all of the log arrives."""
    portal, machine, _ = operator
    counter = portal.submit("counter", COUNTER)
    portal.wait_running(counter)
    for chain in ("INPUT", "OUTPUT"):
        machine.execute("iptables", "-I", chain, "-j", "DROP")
    try:
        eventually(lambda: not portal.is_ready("node1"), 90, "the portal sees that the node is away")
        waiting = portal.submit("waits", "echo ran")
        began_s = time.monotonic()
        while time.monotonic() - began_s < AWAY_S:
            asked_s = time.monotonic()
            assert portal.job(counter)["state"] == "RUNNING"
            assert portal.job(waiting)["state"] in ("PENDING", "RUNNING")
            assert time.monotonic() - asked_s < ANSWER_LIMIT_S
            time.sleep(5)
    finally:
        for chain in ("INPUT", "OUTPUT"):
            machine.execute("iptables", "-D", chain, "-j", "DROP")
    back_s = time.monotonic()
    eventually(lambda: portal.is_ready("node1"), 120, "the node is back")
    took_s = time.monotonic() - back_s
    portal.wait(waiting, "COMPLETED", within_s=120)
    portal.check_counter(counter)
    end_counter(machine, counter)
    portal.wait(counter, "COMPLETED")
    portal.check_counter(counter, ended=True)
    portal.check_jobs()
    with capsys.disabled():
        print(f"\n{AWAY_S:.0f} s without network: the node was used again {took_s:.1f} s after its end")


def test_a_job_that_prints_2_gb_disturbs_nobody(
    operator: tuple[Operator, RigNode, StoryPortal], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log is kept up to the limit and says so; pages answer, and the log of another job arrives meanwhile."""
    portal, machine, started = operator
    counter = portal.submit("counts beside", COUNTER)
    portal.wait_running(counter)
    began_s, slowest_s = time.monotonic(), 0.0
    line = "0123456789" * 10
    loud = portal.submit("prints", f"yes {line} | head -c {PRINTED_BYTES}", memory_mib=256)
    while portal.job(loud)["state"] not in ("COMPLETED", "FAILED"):
        asked_s = time.monotonic()
        portal.lines(counter)
        portal.get(f"jobs/{loud}/logs/?tail=10")
        slowest_s = max(slowest_s, time.monotonic() - asked_s)
        assert time.monotonic() - began_s < 900, "it is still printing"
        time.sleep(1)
    took_s = time.monotonic() - began_s
    assert portal.job(loud)["state"] == "COMPLETED", portal.job(loud)
    assert slowest_s < ANSWER_LIMIT_S
    folder = started.data / "logs" / loud
    kept = lambda: sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())  # noqa: E731
    eventually(lambda: kept() == MAX_LOG_BYTES, 300, f"the kept part arrives, {kept()} bytes so far")
    with portal.api.stream("GET", f"{REST}jobs/{loud}/logs/?tail=3") as answer:
        assert answer.status_code == 200 and line in answer.read().decode()
    portal.check_counter(counter)
    end_counter(machine, counter)
    portal.wait(counter, "COMPLETED")
    portal.check_jobs()
    with capsys.disabled():
        print(
            f"\n{PRINTED_BYTES / 2**30:.0f} GiB printed in {took_s:.0f} s, {kept() / 2**20:.0f} MiB kept;",
            end=" ",
        )
        print(f"slowest answer {slowest_s:.2f} s")
