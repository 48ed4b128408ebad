"""What a process keeps from cycle to cycle changes no plan, and a refused snapshot leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.decide import decide
from scheduler.core.model.apply_plan import apply_plan
from scheduler.core.model.plan import Plan
from scheduler.core.model.policy import Policy
from scheduler.core.model.serialization import plan_to_json, snapshot_from_json, snapshot_to_json
from scheduler.core.model.snapshot import PendingRow, Snapshot
from scheduler.core.model.validation import SnapshotError
from scheduler.core.session.cache import DecisionCache
from scheduler.incremental import IncrementalDecider
from tests.core.cluster_builder import cluster, node, project, quota, release_stopping_jobs, waits


def dataset() -> Snapshot:
    return cluster(
        nodes=[node("a"), node("b")],
        projects=[project("p"), project("q")],
        quotas=[quota("p", 4), quota("q", 4)],
        pending=[*(waits(f"p{i}", "p", 2) for i in range(6)), *(waits(f"q{i}", "q", 1) for i in range(3))],
    )


def read_anew(snapshot: Snapshot) -> Snapshot:
    """The same in other objects, as each cycle reads it from the record."""
    return snapshot_from_json(snapshot_to_json(snapshot))


def test_each_plan_is_the_one_made_without() -> None:
    recall, snapshot = IncrementalDecider(), dataset()
    for _ in range(4):
        plan = recall.decide(read_anew(snapshot), Policy())
        assert plan_to_json(plan) == plan_to_json(decide(snapshot, Policy()))
        snapshot = replace(release_stopping_jobs(apply_plan(snapshot, plan)), now_s=snapshot.now_s + 60)
        snapshot = replace(snapshot, pending=(*snapshot.pending, waits(f"late{snapshot.now_s}", "q", 1)))


def test_unchanged_rows_are_the_same_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Snapshot] = []

    def watched(snapshot: Snapshot, policy: Policy, memory: DecisionCache) -> Plan:
        seen.append(snapshot)
        return decide(snapshot, policy, memory)

    monkeypatch.setattr("scheduler.incremental.decide", watched)
    recall, first = IncrementalDecider(), dataset()
    recall.decide(first, Policy())
    changed = replace(first.pending[0], priority=75)
    recall.decide(read_anew(replace(first, pending=(changed, *first.pending[1:]))), Policy())
    assert all(one is other for one, other in zip(seen[0].nodes, seen[1].nodes, strict=True))
    same = [one is other for one, other in zip(seen[0].pending, seen[1].pending, strict=True)]
    assert same == [False] + [True] * (len(first.pending) - 1)
    assert seen[1].pending[0] == changed


def test_a_long_queue_gets_its_verdicts_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.incremental.EXPLAIN_ALL_LIMIT", 3)
    monkeypatch.setattr("scheduler.incremental.EXPLAIN_BATCH_SIZE", 2)
    recall, found = IncrementalDecider(), dataset()
    more = tuple(waits(f"more{n}", "q", n) for n in range(1, 7))
    snapshot = replace(found, pending=(*found.pending, *more))
    whole = decide(snapshot, Policy())
    plan = recall.decide(snapshot, Policy())
    assert (plan.starts, plan.evictions, plan.nominations) == (
        whole.starts,
        whole.evictions,
        whole.nominations,
    )
    assert (plan.explained, plan.verdicts) == (False, ())
    reported = []
    while recall.has_unexplained:
        reported.append(recall.explain_next())
    assert len(reported) > 2 and max(map(len, reported)) <= 2
    assert sorted((each for piece in reported for each in piece), key=lambda each: each.job) == list(
        whole.verdicts
    )
    assert recall.explain_next() == ()
    few = replace(snapshot, pending=snapshot.pending[:3])
    assert recall.decide(few, Policy()).explained and not recall.has_unexplained


def test_jobs_without_a_verdict_come_first_then_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler.incremental.EXPLAIN_ALL_LIMIT", 0)
    monkeypatch.setattr("scheduler.incremental.EXPLAIN_BATCH_SIZE", 2)
    recall = IncrementalDecider()
    jobs = [waits(f"j{n}", "q", 64) for n in range(5)]
    snapshot = replace(dataset(), pending=tuple(jobs))

    def next_two(*more: PendingRow) -> set[str]:
        recall.decide(replace(snapshot, pending=(*jobs, *more)), Policy())
        return {verdict.job for verdict in recall.explain_next()}

    reported = [next_two(), next_two()]
    new = waits("new", "q", 64)
    third = next_two(new)
    assert "new" in third and set().union(*reported, third) == {*(row.job for row in jobs), "new"}
    assert next_two(new) == reported[0]


def test_a_refused_snapshot_is_refused_for_its_fault_and_forgotten() -> None:
    recall, sound = IncrementalDecider(), dataset()
    recall.decide(sound, Policy())
    doubled = replace(sound, pending=(*sound.pending, sound.pending[0]))
    with pytest.raises(SnapshotError, match="is listed 2 times"):
        recall.decide(read_anew(doubled), Policy())
    assert plan_to_json(recall.decide(sound, Policy())) == plan_to_json(decide(sound, Policy()))
