"""The checker of the fault campaign finds what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.engine_harness import wait_for
from tests.faults.campaign.checker import Ledgers, lines, make_journal, script, wrong_in_journals

HALF, WHOLE = 500, 1000


def job(journal: Path, milli: int, name: str, attempt: int = 1) -> subprocess.Popen[bytes]:
    """A job on the GPU ``g`` as a node would start it."""
    reported = {"FAIRWAY_JOB": name, "FAIRWAY_ATTEMPT": str(attempt), "FAIRWAY_TASK": "0"}
    return subprocess.Popen(
        script(journal, milli, 30.0), env=os.environ | reported | {"NVIDIA_VISIBLE_DEVICES": "g"}
    )


@pytest.mark.parametrize(
    ("first", "second", "third", "meets"),
    [(WHOLE, HALF, HALF, ["b", "c"]), (HALF, HALF, HALF, ["c"]), (HALF, WHOLE, HALF, ["b", "c"])],
)
def test_the_checker_finds_jobs_that_meet_on_a_gpu(tmp_path: Path, first, second, third, meets) -> None:
    make_journal(tmp_path, ["g"])
    running = []
    try:
        for name, milli in zip("abc", (first, second, third), strict=True):
            running.append(job(tmp_path, milli, name))
            wait_for("begun", lambda: len(lines([tmp_path], "starts")) == len(running), 5)
            time.sleep(0.2)
        assert [line[0] for line in lines([tmp_path], "clashes")] == meets
        assert len(wrong_in_journals([tmp_path])) == len(meets)
    finally:
        for each in running:
            each.kill()
            each.wait()
    running.append(job(tmp_path, WHOLE, "d"))
    wait_for("begun", lambda: len(lines([tmp_path], "starts")) == 4, 5)
    time.sleep(0.2)
    running[-1].kill()
    running[-1].wait()
    assert len(lines([tmp_path], "clashes")) == len(meets), "who has died lets go"


def test_the_checker_finds_a_start_with_two_effects_and_a_ledger_above_1000(tmp_path: Path) -> None:
    make_journal(tmp_path, ["g"])
    for count in (1, 2):
        one = job(tmp_path, WHOLE, "a")
        wait_for("begun", lambda count=count: len(lines([tmp_path], "starts")) == count, 5)
        one.kill()
        one.wait()
    assert wrong_in_journals([tmp_path]) == ["started twice: a 1 0"]
    path = tmp_path / "ledger.json"
    with Ledgers({"n": path}) as watched:
        for number, held in enumerate((WHOLE, WHOLE + HALF, 0)):
            task = {"phase": "running", "gpus": [{"uuid": "g", "milli": held}]}
            (tmp_path / "new").write_text(json.dumps({"tasks": {"x": task}}))
            (tmp_path / "new").replace(path)
            wait_for("seen", lambda number=number: watched.versions > number, 5)
    assert watched.wrong == ["n: 1500 milli on g"]
