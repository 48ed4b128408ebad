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

from agents.node.errors import AgentError
from agents.node.host import atomic_files
from agents.node.ledger import ledger as ledger_module
from agents.node.ledger.ledger import EXITED, LIVE_PHASES, RUNNING, Ledger, task_network
from agents.node.spec.task_spec import parse_spec

JOBS = ["ja", "jb", "jc"]
GPUS = ["G0", "G1"]


def spec(
    job: str,
    attempt: int,
    shares: dict[str, int],
    task: int = 0,
    digest: str = "d",
    runtime: str = "process",
) -> Any:
    return parse_spec(
        {
            "cluster": "t1",
            "job": job,
            "attempt": attempt,
            "task": task,
            "digest": digest,
            "runtime": runtime,
            "image": "i",
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
        self.left: set[tuple[str, int, int]] = set()
        self.made = 0
        self.job_of: dict[str, str] = {}

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
        wanted = spec(job, attempt, shares, task, runtime="podman")
        try:
            admission = self.ledgers[who].admit(epoch, wanted, needs_network=True)
            if runs and admission.record["phase"] in LIVE_PHASES:
                self.ledgers[who].mark_starting(wanted.name)
                self.ledgers[who].update_task(wanted.name, phase=RUNNING)
        except AgentError:
            return
        assert epoch >= self.highest_epoch
        assert (job, attempt) not in self.dead
        assert (job, attempt, task) not in self.left
        self.highest_epoch = epoch

    @rule(
        who=st.integers(0, 1), epoch=st.integers(0, 4), job=st.sampled_from(JOBS), attempt=st.integers(1, 3)
    )
    def stop(self, who: int, epoch: int, job: str, attempt: int) -> None:
        try:
            self.ledgers[who].tombstone(epoch, job, attempt)
        except AgentError as error:
            assert error.code == "stale_epoch" and epoch < self.highest_epoch
            return
        self.highest_epoch = max(self.highest_epoch, epoch)
        self.dead.add((job, attempt))

    @rule(
        who=st.integers(0, 1),
        epoch=st.integers(0, 4),
        job=st.sampled_from(JOBS),
        attempt=st.integers(1, 3),
        task=st.integers(0, 1),
    )
    def leave(self, who: int, epoch: int, job: str, attempt: int, task: int) -> None:
        """One task is asked to leave alone."""
        try:
            found = self.ledgers[who].tombstone_tasks(epoch, job, attempt, [task])
        except AgentError as error:
            assert error.code == "stale_epoch" and epoch < self.highest_epoch
            return
        self.highest_epoch = max(self.highest_epoch, epoch)
        assert all(
            (record["job"], record["attempt"], record["task"]) == (job, attempt, task)
            for record in found.values()
        )
        self.left.add((job, attempt, task))
        known = {(row["job"], row["attempt"]) for row in self.ledgers[who].tombstones()}
        assert known == self.dead  # the attempt itself goes on

    @rule(who=st.integers(0, 1), pick=st.integers(0, 20), forget=st.booleans())
    def end(self, who: int, pick: int, forget: bool) -> None:
        names = sorted(self.ledgers[who].tasks())
        if names:
            name = names[pick % len(names)]
            record = self.ledgers[who].update_task(name, phase=EXITED)
            if forget:
                self.ledgers[who].remove_tasks([name])
                self.dead.add((record["job"], record["attempt"]))

    @rule(who=st.integers(0, 1), fate=st.sampled_from(["promised", "ready", "dropped"]))
    def spare(self, who: int, fate: str) -> None:
        self.made += 1
        name = f"spare-{self.made}"
        if self.ledgers[who].reserve_pooled_network(name, "podman") is not None and fate != "promised":
            (
                self.ledgers[who].mark_pooled_network_ready
                if fate == "ready"
                else self.ledgers[who].remove_pooled_network
            )(name)

    @invariant()
    def no_network_is_shared_by_jobs_or_waits_for_two(self) -> None:
        pieces: dict[str, str] = {}
        for record in self.ledgers[0].tasks().values():
            network = str(task_network(record))
            assert self.job_of.setdefault(network, record["job"]) == record["job"]
            assert network not in self.ledgers[0].pooled_networks()
            assert pieces.setdefault(record["subnet"], record["job"]) == record["job"]
        for spare in self.ledgers[0].pooled_networks().values():
            assert spare["subnet"] not in pieces
            pieces[spare["subnet"]] = "a spare"

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


class MovingLedgerMachine(LedgerMachine):
    """The same, and each job is moved to the file of past jobs as soon as it has no task."""

    def __init__(self) -> None:
        super().__init__()
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(ledger_module, "_JOBS_KEPT", 0)
        self.patched.setattr(ledger_module, "_JOBS_MOVED", 1)

    def teardown(self) -> None:
        self.patched.undo()
        super().teardown()


TestLedgerMachine = LedgerMachine.TestCase
TestMovingLedgerMachine = MovingLedgerMachine.TestCase
TestLedgerMachine.settings = TestMovingLedgerMachine.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(str(tmp_path), uids=(3000, 10))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"digest": "other"}, "name_conflict"),
        ({"shares": {"G0": 1}, "job": "jb"}, "gpu_overcommitted"),
        ({"attempt": 1, "epoch": 4}, "stale_epoch"),
        ({"attempt": 0 + 1, "job": "jold"}, "tombstoned"),
    ],
)
def test_invalid_entries_are_refused(ledger: Ledger, change: dict[str, Any], code: str) -> None:
    ledger.admit(5, spec("ja", 1, {"G0": 1000}))
    ledger.tombstone(5, "jold", 1)
    wanted = {"job": "ja", "attempt": 1, "shares": {"G0": 1000}, "digest": "d", "epoch": 5} | change
    epoch = wanted.pop("epoch")
    with pytest.raises(AgentError) as caught:
        ledger.admit(epoch, spec(**wanted))
    assert caught.value.code == code
    assert ledger.live_milli() == {"G0": 1000}


def test_an_older_attempt_never_starts_after_a_newer_one(ledger: Ledger) -> None:
    ledger.admit(1, spec("ja", 2, {}))
    with pytest.raises(AgentError, match="older than attempt 2"):
        ledger.admit(1, spec("ja", 1, {}))


def test_a_stop_before_the_start_wins(ledger: Ledger) -> None:
    wanted = spec("ja", 1, {"G0": 500})
    ledger.admit(1, wanted)
    ledger.tombstone(1, "ja", 1)
    with pytest.raises(AgentError, match="stopped before it ran"):
        ledger.mark_starting(wanted.name)


def test_an_evicted_task_never_starts_and_the_others_do(ledger: Ledger) -> None:
    first, second = spec("ja", 1, {"G0": 500}), spec("ja", 1, {"G1": 500})._replace(task=1)
    ledger.admit(1, first)
    ledger.admit(1, second)
    assert list(ledger.tombstone_tasks(1, "ja", 1, [1, 2], grace_s=5)) == [second.name]
    with pytest.raises(AgentError, match="stopped before it ran"):
        ledger.mark_starting(second.name)
    assert ledger.mark_starting(first.name)["phase"] == "starting"
    for late, code in ((2, "tombstoned"), (3, "")):
        wanted = spec("ja", 1, {})._replace(task=late)
        if not code:
            assert not ledger.admit(1, wanted).is_repeat
            continue
        with pytest.raises(AgentError) as caught:
            ledger.admit(1, wanted)
        assert caught.value.code == code
    assert not ledger.is_tombstoned("ja", 1)
    ledger.admit(1, spec("ja", 2, {})._replace(task=2))  # another attempt has numbers of its own


def test_a_full_disk_refuses_the_start_and_changes_nothing(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.admit(1, spec("ja", 1, {"G0": 500}))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_files.os, "fsync", full)
    with pytest.raises(AgentError) as caught:
        ledger.admit(1, spec("jb", 1, {"G0": 500}))
    monkeypatch.undo()
    assert caught.value.code == "disk_full"
    assert ledger.live_milli() == {"G0": 500}
    assert sorted(ledger.read()["jobs"]) == ["ja"]


def test_tasks_get_numbers_of_their_own_and_a_shared_home_one_owner(ledger: Ledger) -> None:
    first = ledger.admit(1, spec("ja", 1, {}), needs_uid=True).record["task_uid"]
    second = ledger.admit(1, spec("jb", 1, {}), needs_uid=True).record["task_uid"]
    assert first != second
    assert {first, second} <= set(range(3000, 3010))


def admit(ledger: Ledger, job: str, runtime: str = "podman", **more: Any) -> dict[str, Any]:
    return dict(ledger.admit(1, spec(job, 1, {}, runtime=runtime, **more), needs_network=True).record)


def test_a_prewarmed_container_is_used_once_by_a_job_of_its_runtime_when_ready(ledger: Ledger) -> None:
    subnet = ledger.reserve_pooled_network("spare-1", "podman")
    assert admit(ledger, "ja")["network"] == "fw-t1-ja"  # it is only promised yet
    ledger.mark_pooled_network_ready("spare-1")
    assert admit(ledger, "jb", runtime="docker")["network"] == "fw-t1-jb"
    taken = admit(ledger, "jc")
    assert (taken["network"], taken["subnet"], taken["from_pool"]) == ("spare-1", subnet, True)
    assert admit(ledger, "jc", task=1)["network"] == "spare-1"  # of the same job
    assert admit(ledger, "jd")["network"] == "fw-t1-jd"
    assert ledger.pooled_networks() == {}
    assert ledger.networks() == {"fw-t1-ja", "fw-t1-jb", "spare-1", "fw-t1-jd"}


def test_a_used_prewarmed_container_is_not_reused_by_the_next_attempt(ledger: Ledger) -> None:
    ledger.reserve_pooled_network("spare-1", "podman")
    ledger.mark_pooled_network_ready("spare-1")
    name = spec("ja", 1, {}, runtime="podman").name
    assert admit(ledger, "ja")["network"] == "spare-1"
    ledger.update_task(name, phase=EXITED)
    second = ledger.admit(1, spec("ja", 2, {}, runtime="podman"), needs_network=True).record
    assert (second["network"], second["from_pool"]) == ("fw-t1-ja", False)


def test_prepared_networks_never_take_the_last_subnets(tmp_path: Path) -> None:
    small = Ledger(str(tmp_path), subnets="10.1.0.0/24")
    given = [small.reserve_pooled_network(f"spare-{number}", "podman") for number in range(4)]
    assert set(given) == {"10.1.0.128/26", "10.1.0.192/26", None}
    assert [admit(small, job)["subnet"] for job in ("ja", "jb")] == ["10.1.0.0/26", "10.1.0.64/26"]
    with pytest.raises(AgentError, match="Every job network"):
        admit(small, "jc")
    small.mark_pooled_network_ready("spare-0")
    assert admit(small, "jc")["network"] == "spare-0"


def test_a_record_of_the_version_before_has_the_network_of_its_job(ledger: Ledger) -> None:
    name = spec("ja", 1, {}, runtime="podman").name
    admit(ledger, "ja")
    with ledger.transaction() as state:
        for key in ("network", "from_pool"):
            del state["tasks"][name][key]
        del state["network_pool"]
    assert task_network(ledger.tasks()[name]) == "fw-t1-ja"
    assert ledger.networks() == {"fw-t1-ja"}
    assert admit(ledger, "ja", task=1)["network"] == "fw-t1-ja"


def test_ports_are_not_given_twice(ledger: Ledger) -> None:
    for job in JOBS:
        ledger.admit(1, spec(job, 1, {}))
    given = [ledger.assign_ports(spec(job, 1, {}).name, [8888], lambda _: True, (100, 103)) for job in JOBS]
    assert {row[8888] for row in given} == {100, 101, 102}
    assert ledger.assign_ports(spec("ja", 1, {}).name, [8888], lambda _: True, (100, 103)) == given[0]


def test_jobs_not_mentioned_for_a_month_are_forgotten(ledger: Ledger) -> None:
    ledger.tombstone(1, "ja", 1)
    ledger.admit(1, spec("jb", 1, {}))
    assert ledger.remove_old_jobs(now_s=4e9) == 1
    assert sorted(ledger.read()["jobs"]) == ["jb"]


def test_the_ledger_stays_small_and_remembers_a_thousand_jobs(ledger: Ledger, tmp_path: Path) -> None:
    for number in range(1000):
        ledger.tombstone(1, f"j{number:04}", 2)
    assert len(ledger.read()["jobs"]) < 200
    assert len(ledger.tombstones()) == 1000
    assert [row["job"] for row in ledger.tombstones(newest=2)] == ["j0999", "j0998"]
    for attempt, words in ((2, "was stopped"), (1, "older than attempt 2")):
        with pytest.raises(AgentError, match=words):
            Ledger(str(tmp_path)).admit(1, spec("j0000", attempt, {}))
    assert ledger.is_tombstoned("j0001", 2)
    ledger.admit(1, spec("j0001", 3, {}))
    ledger.remove_tasks([spec("j0001", 3, {}).name])
    assert [row for row in ledger.tombstones() if row["job"] == "j0001"] == [{"job": "j0001", "attempt": 2}]
    with pytest.raises(AgentError, match="older than attempt 3"):
        Ledger(str(tmp_path)).admit(1, spec("j0001", 1, {}))
    assert ledger.remove_old_jobs(now_s=4e9) == 1000
    assert ledger.tombstones() == []


def test_a_full_disk_while_jobs_are_moved_loses_none(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [f"j{number:03}" for number in range(149)]
    for job in jobs:
        ledger.tombstone(1, job, 1)
    sync, left = os.fsync, [2]  # of the file of past jobs and of its folder

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(atomic_files.os, "fsync", full)
    with pytest.raises(AgentError, match="full"):
        ledger.tombstone(1, "j149", 1)
    monkeypatch.undo()
    assert {row["job"] for row in ledger.tombstones()} == set(jobs)
    ledger.tombstone(1, "j149", 1)
    assert {row["job"] for row in ledger.tombstones()} == {*jobs, "j149"}
    assert len(ledger.read()["jobs"]) == 50
