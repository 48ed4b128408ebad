"""When a program that is no job's counts as one that works on a GPU, and when it is gone."""

from __future__ import annotations

from agents.wire.messages import GpuProcess, GpuSample, NodeSample
from portal.live.collector.foreign_processes import (
    FORGET_AFTER_S,
    MIN_MEMORY_MIB,
    REPORT_AFTER_S,
    ForeignProcessTracker,
    largest_foreign_process,
)

OURS = GpuProcess(11, 9_000, "abc", 1, foreign=False)
THEIRS = GpuProcess(12, 700, None, None, foreign=True, account="ann", command="python")
SMALL = GpuProcess(13, MIN_MEMORY_MIB - 1, None, None, foreign=True, account="root", command="dcgm")
UNTOLD = GpuProcess(14, None, None, None, foreign=True)


def sample(*users: GpuProcess) -> NodeSample:
    gpu = GpuSample("g", 10.0, 100, 50.0, 40.0, "ok", tuple(users))
    return NodeSample(0.0, 1.0, 1, 2, (gpu,), ())


def test_which_processes_are_foreign():
    assert largest_foreign_process(sample(OURS, SMALL).gpus[0]) == ""
    assert (
        largest_foreign_process(sample(OURS, SMALL, THEIRS, UNTOLD).gpus[0]) == "python (process 12) of ann"
    )
    assert largest_foreign_process(sample(UNTOLD).gpus[0]) == "process 14"


def test_a_foreign_process_is_reported_when_stable_and_when_gone():
    watch, reported = ForeignProcessTracker(), {}
    seen = [(at, (THEIRS,)) for at in range(100, 200)] + [(at, (OURS,)) for at in range(200, 300)]
    for at, users in seen:
        if news := watch.add(float(at), sample(*users)):
            reported[at] = news
    assert reported == {
        100 + REPORT_AFTER_S: {"g": "python (process 12) of ann"},
        200 + FORGET_AFTER_S: {"g": ""},
    }


def test_short_appearances_and_gaps_are_not_reported():
    watch = ForeignProcessTracker()
    reported = [watch.add(float(at), sample(*([THEIRS] if at % 15 < 5 else []))) for at in range(300)]
    assert not any(reported)
    watch = ForeignProcessTracker()
    reported = [watch.add(float(at), sample(*([THEIRS] if at % 15 else []))) for at in range(300)]
    assert [each for each in reported if each] == [{"g": "python (process 12) of ann"}]


def test_a_new_collector_reports_that_there_is_none():
    watch = ForeignProcessTracker()
    reported = [watch.add(float(at), sample(OURS)) for at in range(100)]
    assert [each for each in reported if each] == [{"g": ""}]
