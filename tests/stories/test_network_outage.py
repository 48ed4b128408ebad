"""A fault that lasts: ten minutes without network. The time until the node is used again is printed, not asserted."""

from __future__ import annotations

import time

import pytest

from tests.rig.node import RigNode
from tests.stories.operator_client import COUNTER, Operator, end_counter
from tests.stories.users import eventually

pytestmark = [pytest.mark.rig, pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(1500)]

AWAY_S = 600.0
ANSWER_LIMIT_S = 8.0
"""Of a page or request meanwhile; the portal itself answers within it or says why not."""


def test_a_job_survives_ten_minutes_without_network(
    operator: tuple[Operator, RigNode], capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes on counting, what was submitted meanwhile waits, and all of the log arrives."""
    portal, machine = operator
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
