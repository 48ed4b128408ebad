"""Who uses more of a GPU than its share: judged over samples, and ended with the figures, with a real agent."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from agents.wire.messages import GpuProcess, GpuSample, NodeSample
from portal.domain.jobs.reasons import EndReason
from portal.live.collector import gpu_memory_overuse
from portal.live.collector.gpu_memory_overuse import TOLERANCE_MIB, OveruseTracker, find_overuse
from portal.models import Job
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, wait_for
from tests.live.test_collector import collecting

HOLDERS = {"g": [("half", 1, 500), ("rest", 1, 250)], "w": [("all", 2, 1000)]}
ROOM = {"g": 80_000, "w": 80_000}


def user(job: str, mib: int | None, attempt: int = 1) -> GpuProcess:
    return GpuProcess(1, mib, job, attempt, foreign=False)


def sample(*users: GpuProcess, uuid: str = "g") -> NodeSample:
    return NodeSample(0.0, 1.0, 1, 2, (GpuSample(uuid, 10.0, 100, 50.0, 40.0, "ok", users),), ())


def test_shares_are_of_the_usable_memory_and_all_processes_count() -> None:
    within = sample(user("half", 30_000), user("half", 10_000 + TOLERANCE_MIB), user("rest", None))
    assert find_overuse(within.gpus[0], HOLDERS["g"], ROOM["g"]) == []
    beyond = sample(user("half", 30_000), user("half", 10_001 + TOLERANCE_MIB), user("gone", 70_000))
    (found,) = find_overuse(beyond.gpus[0], HOLDERS["g"], ROOM["g"])
    assert (found.job, found.used_mib, found.share_mib) == ("half", 40_001 + TOLERANCE_MIB, 40_000)
    whole = sample(user("all", 90_000, 2), uuid="w")
    assert find_overuse(whole.gpus[0], HOLDERS["w"], ROOM["w"]) == [], "alone on it"


def test_only_lasting_overuse_ends_a_job() -> None:
    watch, much, little = OveruseTracker(), sample(user("half", 60_000)), sample(user("half", 1_000))
    reported = [watch.add(float(at), much if at % 10 else little, HOLDERS, ROOM) for at in range(200)]
    assert not any(reported)
    reported = [watch.add(200.0 + at, much, HOLDERS, ROOM) for at in range(20)]
    assert [bool(each) for each in reported].index(True) == 1, "it has been over since 191"


@pytest.mark.skipif(os.geteuid() != 0, reason="the runtime process gives each job a uid of its own")
@pytest.mark.django_db(transaction=True)
def test_a_job_above_its_memory_share_ends_with_the_figures(harness: EngineHarness, monkeypatch) -> None:
    monkeypatch.setattr(gpu_memory_overuse, "REPORT_AFTER_S", 2.0)
    node, engine, owner = (
        harness.mark_enrolled(harness.create_node(name="shared"), gpus=4),
        InProcessEngine(),
        factories.user("ada"),
    )
    fields = {"memory_mib": 64, "termination_grace_s": 1, "milli_per_gpu": 500, "command": ["sleep", "600"]}
    environment = factories.environment(runtime="process", tool=False)
    project = factories.project(member=owner)
    greedy, modest = (factories.job(owner, project, environment, **fields) for _ in range(2))

    def running(job: Job) -> bool:
        return job.attempts.filter(state="RUNNING").exists()

    assert engine.run_until(lambda: running(greedy) and running(modest), 30)
    shares = {job: job.attempts.get().task_rows.get().allocations.get().gpu for job in (greedy, modest)}
    assert len(set(shares.values())) == 1, "of one project"
    write_load(harness.folder / "shared", shares[greedy].uuid, {greedy: 60_000, modest: 30_000})

    def over() -> bool:
        greedy.refresh_from_db()
        return greedy.state == "FAILED"

    with collecting():
        wait_for("the stop", lambda: greedy.attempts.filter(stop_requested_at__isnull=False).exists())
        assert engine.run_until(over, 30)
    assert greedy.reason == EndReason.GPU_MEMORY_LIMIT_EXCEEDED
    assert "58.6 GiB" in greedy.message and "40 GiB" in greedy.message, greedy.message
    modest.refresh_from_db()
    assert modest.state == "RUNNING" and modest.attempts.filter(stop_requested_at__isnull=True).exists()
    assert node.name in greedy.message


def write_load(folder: Path, uuid: str, used: dict[Job, int]) -> None:
    """Pretends that the jobs' own processes use so much of a GPU."""
    path = folder / "gpus.json"
    content = json.loads(path.read_text())
    processes = []
    for job, mib in used.items():
        (facts,) = folder.glob(f"state/tasks/*{job.public_id}*/pid.json")
        processes.append({"pid": json.loads(facts.read_text())["pid"], "memory_mib": mib})
    for row in content["gpus"]:
        if row["uuid"] == uuid:
            row["load"] = {"processes": processes}
    fresh = path.with_suffix(f".{time.time_ns()}")
    fresh.write_text(json.dumps(content))
    fresh.replace(path)
