"""When a program that is no job's counts as one that works on a GPU, and when it is gone."""

from __future__ import annotations

from agents.samples import GpuSample, GpuUser, NodeSample
from portal.live.foreign import GONE_S, LEAST_MIB, SEEN_S, ForeignWatch, foreign_user

OURS = GpuUser(11, 9_000, "abc", 1, foreign=False)
THEIRS = GpuUser(12, 700, None, None, foreign=True, account="ann", command="python")
SMALL = GpuUser(13, LEAST_MIB - 1, None, None, foreign=True, account="root", command="dcgm")
UNTOLD = GpuUser(14, None, None, None, foreign=True)


def sample(*users: GpuUser) -> NodeSample:
    gpu = GpuSample("g", 10.0, 100, 50.0, 40.0, "ok", tuple(users))
    return NodeSample(0.0, 1.0, 1, 2, (gpu,), ())


def test_who_counts():
    assert foreign_user(sample(OURS, SMALL).gpus[0]) == ""
    assert foreign_user(sample(OURS, SMALL, THEIRS, UNTOLD).gpus[0]) == "python (process 12) of ann"
    assert foreign_user(sample(UNTOLD).gpus[0]) == "process 14"


def test_it_is_told_once_it_is_settled_and_once_it_is_gone():
    watch, told = ForeignWatch(), {}
    seen = [(at, (THEIRS,)) for at in range(100, 200)] + [(at, (OURS,)) for at in range(200, 300)]
    for at, users in seen:
        if news := watch.add(float(at), sample(*users)):
            told[at] = news
    assert told == {100 + SEEN_S: {"g": "python (process 12) of ann"}, 200 + GONE_S: {"g": ""}}


def test_what_comes_for_a_moment_or_goes_for_one_is_not_told():
    watch = ForeignWatch()
    told = [watch.add(float(at), sample(*([THEIRS] if at % 15 < 5 else []))) for at in range(300)]
    assert not any(told)
    watch = ForeignWatch()
    told = [watch.add(float(at), sample(*([THEIRS] if at % 15 else []))) for at in range(300)]
    assert [each for each in told if each] == [{"g": "python (process 12) of ann"}]


def test_a_new_watch_tells_that_nobody_is_there():
    watch = ForeignWatch()
    told = [watch.add(float(at), sample(OURS)) for at in range(100)]
    assert [each for each in told if each] == [{"g": ""}]
