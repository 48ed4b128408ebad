"""The ledger under any order of commands: milli never above 1000, tombstones win, epochs never fall."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agents.node import durable
from agents.node.ledger import EXITED, HOLDING, RUNNING, Ledger
from agents.node.refusals import Refusal
from agents.node.spec import parse_spec

JOBS = ["ja", "jb", "jc"]
GPUS = ["G0", "G1"]


def spec(job: str, attempt: int, shares: dict[str, int], task: int = 0, digest: str = "d") -> Any:
    return parse_spec(
        {
            "cluster": "t1",
            "job": job,
            "attempt": attempt,
            "task": task,
            "digest": digest,
            "runtime": "process",
            "command": ["true"],
            "uid": 1001,
            "gid": 1001,
            "user": "ada",
            "gpus": [{"uuid": uuid, "milli": milli} for uuid, milli in shares.items()],
        }
    )


class LedgerMachine(RuleBasedStateMachine):
    """Every command in any order, some from a second process; a model beside it knows what must be."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="fwl")
        self.ledgers = [Ledger(self.folder), Ledger(self.folder)]
        self.highest_epoch = 0
        self.dead: set[tuple[str, int]] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(
        who=st.integers(0, 1),
        epoch=st.integers(0, 4),
        job=st.sampled_from(JOBS),
        attempt=st.integers(1, 3),
        task=st.integers(0, 1),
        shares=st.dictionaries(st.sampled_from(GPUS), st.sampled_from([250, 400, 500, 1000]), max_size=2),
        runs=st.booleans(),
    )
    def start(
        self, who: int, epoch: int, job: str, attempt: int, task: int, shares: dict[str, int], runs: bool
    ) -> None:
        wanted = spec(job, attempt, shares, task)
        try:
            admission = self.ledgers[who].admit(epoch, wanted)
            if runs and admission.record["phase"] in HOLDING:
                self.ledgers[who].begin(wanted.name)
                self.ledgers[who].note(wanted.name, phase=RUNNING)
        except Refusal:
            return
        assert epoch >= self.highest_epoch
        assert (job, attempt) not in self.dead
        self.highest_epoch = epoch

    @rule(
        who=st.integers(0, 1), epoch=st.integers(0, 4), job=st.sampled_from(JOBS), attempt=st.integers(1, 3)
    )
    def stop(self, who: int, epoch: int, job: str, attempt: int) -> None:
        try:
            self.ledgers[who].tombstone(epoch, job, attempt)
        except Refusal as refusal:
            assert refusal.code == "stale_epoch" and epoch < self.highest_epoch
            return
        self.highest_epoch = max(self.highest_epoch, epoch)
        self.dead.add((job, attempt))

    @rule(who=st.integers(0, 1), pick=st.integers(0, 20), forget=st.booleans())
    def end(self, who: int, pick: int, forget: bool) -> None:
        names = sorted(self.ledgers[who].tasks())
        if names:
            name = names[pick % len(names)]
            record = self.ledgers[who].note(name, phase=EXITED)
            if forget:
                self.ledgers[who].forget([name])
                self.dead.add((record["job"], record["attempt"]))

    @invariant()
    def no_gpu_is_given_twice(self) -> None:
        for ledger in self.ledgers:
            assert all(0 < milli <= 1000 for milli in ledger.live_milli().values())

    @invariant()
    def both_see_the_same(self) -> None:
        assert self.ledgers[0].read() == self.ledgers[1].read()

    @invariant()
    def epochs_never_fall_and_tombstones_stay(self) -> None:
        assert self.ledgers[0].epoch() >= self.highest_epoch
        known = {(row["job"], row["attempt"]) for row in self.ledgers[0].tombstones()}
        assert self.dead <= known


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(str(tmp_path), uids=(3000, 10))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"digest": "other"}, "name_conflict"),
        ({"shares": {"G0": 1}, "job": "jb"}, "over_milli"),
        ({"attempt": 1, "epoch": 4}, "stale_epoch"),
        ({"attempt": 0 + 1, "job": "jold"}, "tombstoned"),
    ],
)
def test_refuses_what_cannot_be(ledger: Ledger, change: dict[str, Any], code: str) -> None:
    ledger.admit(5, spec("ja", 1, {"G0": 1000}))
    ledger.tombstone(5, "jold", 1)
    wanted = {"job": "ja", "attempt": 1, "shares": {"G0": 1000}, "digest": "d", "epoch": 5} | change
    epoch = wanted.pop("epoch")
    with pytest.raises(Refusal) as caught:
        ledger.admit(epoch, spec(**wanted))
    assert caught.value.code == code
    assert ledger.live_milli() == {"G0": 1000}


def test_an_older_attempt_never_starts_after_a_newer_one(ledger: Ledger) -> None:
    ledger.admit(1, spec("ja", 2, {}))
    with pytest.raises(Refusal, match="older than attempt 2"):
        ledger.admit(1, spec("ja", 1, {}))


def test_a_stop_that_comes_first_wins(ledger: Ledger) -> None:
    wanted = spec("ja", 1, {"G0": 500})
    ledger.admit(1, wanted)
    ledger.tombstone(1, "ja", 1)
    with pytest.raises(Refusal, match="stopped before it ran"):
        ledger.begin(wanted.name)


def test_a_full_disk_refuses_and_changes_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.admit(1, spec("ja", 1, {"G0": 500}))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable.os, "fsync", full)
    with pytest.raises(Refusal) as caught:
        ledger.admit(1, spec("jb", 1, {"G0": 500}))
    monkeypatch.undo()
    assert caught.value.code == "disk_full"
    assert ledger.live_milli() == {"G0": 500}
    assert sorted(ledger.read()["jobs"]) == ["ja"]


def test_tasks_get_numbers_of_their_own_and_a_shared_home_one_owner(ledger: Ledger) -> None:
    first = ledger.admit(1, spec("ja", 1, {}), needs_uid=True).record["own_uid"]
    second = ledger.admit(1, spec("jb", 1, {}), needs_uid=True).record["own_uid"]
    assert first != second
    assert {first, second} <= set(range(3000, 3010))


def test_ports_are_not_given_twice(ledger: Ledger) -> None:
    for job in JOBS:
        ledger.admit(1, spec(job, 1, {}))
    given = [ledger.assign_ports(spec(job, 1, {}).name, [8888], lambda _: True, (100, 103)) for job in JOBS]
    assert {row[8888] for row in given} == {100, 101, 102}
    assert ledger.assign_ports(spec("ja", 1, {}).name, [8888], lambda _: True, (100, 103)) == given[0]


def test_jobs_unheard_of_for_a_month_are_forgotten(ledger: Ledger) -> None:
    ledger.tombstone(1, "ja", 1)
    ledger.admit(1, spec("jb", 1, {}))
    assert ledger.forget_old_jobs(now_s=4e9) == 1
    assert sorted(ledger.read()["jobs"]) == ["jb"]
