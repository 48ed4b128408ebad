"""A job that prints 2 GiB: its log is kept up to the node's limit and says so. Figures are printed, not asserted."""

from __future__ import annotations

import time

import pytest

from agents.node.settings import Settings
from agents.node.task_log import log_cut_message
from tests.rig.node import RigNode
from tests.stories.operator_client import COUNTER, Operator, end_counter
from tests.stories.users import eventually

pytestmark = [pytest.mark.rig, pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(1800)]

PRINT_2_GIB = (
    "import sys; lines = ('0123456789' * 6 + '123\\n') * 2**14\n"
    "for _ in range(2**11): sys.stdout.write(lines)"
)
"""2,048 times 16,384 lines of 64 bytes."""
ANSWER_LIMIT_S = 8.0
"""Of a request meanwhile; the portal itself answers within it or says why not."""
PRINT_LIMIT_S, COPY_LIMIT_S = 600.0, 600.0


def test_a_job_that_prints_2_gib_disturbs_nobody(
    operator: tuple[Operator, RigNode], capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests are answered and the log of another job arrives meanwhile; the end of the kept part says why."""
    portal, machine = operator
    counter = portal.submit("counts beside", COUNTER)
    portal.wait_running(counter)
    slowest_s = 0.0

    def ask(path: str) -> str:
        nonlocal slowest_s
        asked_s = time.monotonic()
        answer = portal.get(path)
        slowest_s = max(slowest_s, time.monotonic() - asked_s)
        return str(answer.get("text") or answer.get("state"))

    began_s = time.monotonic()
    loud = portal.submit("prints", f'python3 -c "{PRINT_2_GIB}"', memory_mib=256)
    while ask(f"jobs/{loud}/") not in ("COMPLETED", "FAILED"):
        ask(f"jobs/{counter}/logs/")
        ask(f"jobs/{loud}/logs/?tail=10")
        assert time.monotonic() - began_s < PRINT_LIMIT_S, "it is still printing"
        time.sleep(1)
    took_s = time.monotonic() - began_s
    assert portal.job(loud)["state"] == "COMPLETED", portal.job(loud)
    cut = log_cut_message(Settings._field_defaults["max_log_mib"])
    eventually(lambda: cut in ask(f"jobs/{loud}/logs/?tail=3"), COPY_LIMIT_S, "the end of the kept part")
    copied_s = time.monotonic() - began_s - took_s
    assert slowest_s < ANSWER_LIMIT_S
    portal.check_counter(counter)
    end_counter(machine, counter)
    portal.wait(counter, "COMPLETED")
    portal.check_jobs()
    with capsys.disabled():
        print(
            f"\n2 GiB printed in {took_s:.0f} s, the kept part complete {copied_s:.0f} s after the end;",
            end=" ",
        )
        print(f"slowest answer {slowest_s:.2f} s")
