"""Invalid rows are isolated: everything else is decided, and nothing is placed where a number cannot be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.decide import decide
from scheduler.core.model.invalid_rows import isolate_faults
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import (
    GpuShare,
    GpuUuid,
    NodeId,
    PoolId,
    PoolRow,
    ReservationRow,
    Snapshot,
    TopologyConstraint,
    TopologyRow,
    UsageRow,
    UserId,
)
from scheduler.core.model.validation import RowKind, SnapshotError, check_snapshot, find_faults
from tests.core.cluster_builder import NOW_S, cluster, node, project, quota, runs, snapshots, started, waits
from tests.core.plan_rules import check_plan

POLICY = Policy()
OTHER = PoolId("other")
HELD = [runs("held", "vision", ("bad", [0]))]


def build(**changes: Any) -> Snapshot:
    """Two pools with a node and a project each; ``unrelated`` can start on the node ``good`` alone."""
    snapshot = cluster(
        [node("bad"), node("good", pool=OTHER)],
        [project("vision"), project("sub", "vision"), project("nlp")],
        [quota("vision", 2), quota("nlp", 2, pool=OTHER)],
        running=HELD,
        pending=[
            waits("related", "vision"),
            waits("below", "sub"),
            waits("unrelated", "nlp", pools=(OTHER,)),
        ],
        usage=[UsageRow(project("vision").id, PoolId("main"), UserId("ada"), 60.0)],
        pools=[PoolRow(PoolId("main"), "main"), PoolRow(OTHER, "other")],
    )
    reserved = ReservationRow("r", "course", (NodeId("bad"),), (), NOW_S + 1e6, NOW_S + 2e6)
    snapshot = replace(snapshot, reservations=(reserved,), topologies=(TopologyRow("fabric", ("rack",)),))
    return replace(snapshot, **changes)


SOUND = build()
BAD, GOOD = SOUND.nodes
GPU = BAD.gpus[0]
RUNNING = SOUND.running[0]
TASK = RUNNING.tasks[0]
QUOTA = SOUND.quotas[0]


def with_gpu(**changes: Any) -> Snapshot:
    return build(nodes=(replace(BAD, gpus=(replace(GPU, **changes), *BAD.gpus[1:])), GOOD))


def with_task(**changes: Any) -> Snapshot:
    return build(running=(replace(RUNNING, tasks=(replace(TASK, **changes),)),))


def with_pending(**changes: Any) -> Snapshot:
    return build(pending=(SOUND.pending[0].change(changes), *SOUND.pending[1:]))


CORRUPTED: list[tuple[str, RowKind, str, Snapshot]] = [
    ("pool placement", RowKind.POOL, "main", build(pools=(replace(SOUND.pools[0], placement="x"), SOUND.pools[1]))),
    ("pool twice", RowKind.POOL, "main", build(pools=(SOUND.pools[0], *SOUND.pools))),
    ("node cpu", RowKind.NODE, "bad", build(nodes=(replace(BAD, cpu_milli=-1), GOOD))),
    ("node labels", RowKind.NODE, "bad", build(nodes=(replace(BAD, labels=(("rack", []),)), GOOD))),
    ("node twice", RowKind.NODE, "bad", build(nodes=(BAD, BAD, GOOD))),
    ("node pool", RowKind.NODE, "bad", build(nodes=(replace(BAD, pool=PoolId("gone")), GOOD))),
    ("gpu overfull", RowKind.NODE, "bad", with_gpu(used_milli=1500)),
    ("gpu negative", RowKind.NODE, "bad", with_gpu(used_milli=-1)),
    ("gpu free though held", RowKind.NODE, "bad", with_gpu(used_milli=0, exclusive=False)),
    ("gpu whole in part", RowKind.NODE, "bad", with_gpu(used_milli=500)),
    ("gpu capability", RowKind.NODE, "bad", with_gpu(compute_capability=math.nan)),
    ("gpu twice", RowKind.NODE, "bad", build(nodes=(replace(BAD, gpus=(*BAD.gpus, GPU)), GOOD))),
    ("task on an unknown node", RowKind.RUNNING, "held", with_task(node=NodeId("gone"))),
    ("task with milli 0", RowKind.RUNNING, "held", with_task(gpus=(GpuShare(GPU.uuid, 0),))),
    ("task with an unknown gpu", RowKind.RUNNING, "held", with_task(gpus=(GpuShare(GpuUuid("x"), 1000),))),
    ("task negative cpu", RowKind.RUNNING, "held", with_task(cpu_milli=-5)),
    ("running start", RowKind.RUNNING, "held", build(running=(replace(RUNNING, started_s=math.inf),))),
    ("running twice", RowKind.RUNNING, "held", build(running=(RUNNING, RUNNING))),
    ("gpu held twice", RowKind.NODE, "bad", build(running=(RUNNING, replace(RUNNING, job="held2")))),
    ("running and pending", RowKind.PENDING, "held", build(pending=(*SOUND.pending, waits("held", "vision")))),
    ("pending twice", RowKind.PENDING, "related", build(pending=(SOUND.pending[0], *SOUND.pending))),
    ("pending tasks", RowKind.PENDING, "related", with_pending(tasks=0)),
    ("pending task count", RowKind.PENDING, "related", with_pending(tasks=2**31 - 1)),
    ("pending gpu count", RowKind.PENDING, "related", with_pending(gpus_per_task=2**31 - 1)),
    ("pending minimum", RowKind.PENDING, "related", with_pending(tasks=2, min_tasks=3)),
    ("pending milli", RowKind.PENDING, "related", with_pending(milli_per_gpu=0)),
    ("pending submit time", RowKind.PENDING, "related", with_pending(submitted_s=math.inf)),
    ("project circle", RowKind.PROJECT, "vision",
     build(projects=(project("vision", "sub"), project("sub", "vision"), project("nlp")))),
    ("project parent", RowKind.PROJECT, "vision",
     build(projects=(project("vision", "gone"), *SOUND.projects[1:]))),
    ("project time", RowKind.PROJECT, "vision",
     build(projects=(replace(SOUND.projects[0], created_s=math.inf), *SOUND.projects[1:]))),
    ("project slash", RowKind.PROJECT, "a/own", build(projects=(*SOUND.projects, project("a/own")))),
    ("quota weight", RowKind.QUOTA, "vision,main", build(quotas=(replace(QUOTA, weight=math.nan), SOUND.quotas[1]))),
    ("quota guarantee", RowKind.QUOTA, "vision,main",
     build(quotas=(replace(QUOTA, guaranteed_milli=-1), SOUND.quotas[1]))),
    ("quota limit", RowKind.QUOTA, "vision,main", build(quotas=(replace(QUOTA, limit_milli=-1), SOUND.quotas[1]))),
    ("quota twice", RowKind.QUOTA, "vision,main", build(quotas=(QUOTA, *SOUND.quotas))),
    ("quota of an unknown pool", RowKind.QUOTA, "vision,gone",
     build(quotas=(replace(QUOTA, pool=PoolId("gone")), SOUND.quotas[1]))),
    ("usage", RowKind.USAGE, "vision,main,ada",
     build(usage=(replace(SOUND.usage[0], gpu_seconds=-math.inf),))),
    ("reservation end", RowKind.RESERVATION, "r",
     build(reservations=(replace(SOUND.reservations[0], end_s=math.inf),))),
    ("reservation node", RowKind.RESERVATION, "r",
     build(reservations=(replace(SOUND.reservations[0], nodes=(NodeId("gone"), NodeId("bad"))),))),
    ("topology", RowKind.TOPOLOGY, "fabric", build(topologies=(TopologyRow("fabric", ("rack", "rack")),))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "row", "snapshot"), [each[1:] for each in CORRUPTED], ids=[e[0] for e in CORRUPTED]
)
def test_unrelated_job_starts_and_invalid_row_is_named(kind: RowKind, row: str, snapshot: Snapshot) -> None:
    with pytest.raises(SnapshotError):
        check_snapshot(snapshot)
    found = isolate_faults(snapshot)
    assert (kind, row) in {(fault.kind, fault.row) for fault in found.faults}
    plan = decide(found.snapshot, POLICY)
    check_plan(found.snapshot, plan)
    assert "unrelated" in started(plan)
    assert not plan.evictions
    reported = [verdict.job for verdict in (*plan.verdicts, *found.verdicts)] + [
        start.job for start in plan.starts
    ]
    assert sorted(reported) == sorted({job.job for job in snapshot.pending})  # one verdict each
    if kind in (RowKind.NODE, RowKind.RUNNING, RowKind.POOL, RowKind.RESERVATION):
        assert {task.node for start in plan.starts for task in start.tasks} == {"good"}


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("quota weight", {"related", "below"}),
        ("quota limit", {"related", "below"}),
        ("project parent", {"related", "below"}),
        ("project circle", {"related", "below"}),
        ("pending tasks", {"related"}),
        ("pool placement", {"related", "below"}),
        ("usage", set()),
        ("topology", set()),
        ("gpu overfull", set()),
    ],
)
def test_only_jobs_that_depend_on_the_row_are_left_out(name: str, left_out: set[str]) -> None:
    snapshot = next(each[3] for each in CORRUPTED if each[0] == name)
    found = isolate_faults(snapshot)
    assert {verdict.job for verdict in found.verdicts} == left_out
    for verdict in found.verdicts:
        assert verdict.code is VerdictCode.INVALID_DATA
        assert "dministrator" in verdict.message and len(verdict.message) > 40


def test_job_for_another_pool_starts_there_though_the_quota_of_one_pool_is_invalid() -> None:
    either = waits("either", "vision", pools=(PoolId("main"), OTHER))
    snapshot = build(quotas=(replace(QUOTA, weight=math.nan),), pending=(either,))
    found = isolate_faults(snapshot)
    assert not found.verdicts
    assert {task.node for start in decide(found.snapshot, POLICY).starts for task in start.tasks} == {"good"}


def test_job_with_an_invalid_topology_waits_and_names_it() -> None:
    snapshot = build(
        topologies=(TopologyRow("fabric", ("rack", "rack")),),
        pending=(waits("near", "vision", topology_constraint=TopologyConstraint("fabric", "rack")),),
    )
    (verdict,) = isolate_faults(snapshot).verdicts
    assert verdict.job == "near" and "fabric" in verdict.message


def test_running_job_of_a_project_with_an_invalid_quota_is_not_reclaimed() -> None:
    full = [runs("held", "vision", ("n0", range(4)))]
    snapshot = cluster(
        [node("n0")], [project("vision"), project("nlp")],
        [quota("vision", 4, weight=math.nan), quota("nlp", 4)], running=full, pending=[waits("j", "nlp", 4)],
    )  # fmt: skip
    plan = decide(isolate_faults(snapshot).snapshot, POLICY)
    assert not plan.evictions and not plan.starts


def test_usage_of_an_invalid_running_job_stays_counted() -> None:
    """A second task on an unknown node does not free what the first one holds."""
    broken = replace(RUNNING, tasks=(TASK, replace(TASK, node=NodeId("gone"))))
    found = isolate_faults(build(running=(broken,)))
    (row,) = found.snapshot.running
    assert row.tasks == (TASK,) and not row.preemptible
    (bad,) = [each for each in found.snapshot.nodes if each.id == "bad"]
    assert not bad.schedulable and all(gpu.used_milli == 1000 for gpu in bad.gpus)


def test_a_reader_error_is_isolated_although_the_row_is_valid() -> None:
    (fault,) = find_faults(build(nodes=(replace(BAD, cpu_milli=-1), GOOD)))
    found = isolate_faults(SOUND, [fault])
    assert not next(each for each in found.snapshot.nodes if each.id == "bad").schedulable


Corruption = Callable[[Any], dict[str, Any]]
NUMBERS = (-1, -(10**9), math.nan, math.inf)


@st.composite
def corrupted(draw: st.DrawFn) -> Snapshot:
    """A drawn cluster of which one or two rows are changed into something that cannot be true."""
    snapshot = draw(snapshots())
    for _ in range(draw(st.integers(1, 2))):
        table = draw(st.sampled_from(["pools", "nodes", "projects", "quotas", "usage", "running", "pending",
                                      "reservations", "topologies"]))  # fmt: skip
        rows = list(getattr(snapshot, table))
        if not rows:
            continue
        i = draw(st.integers(0, len(rows) - 1))
        if draw(st.integers(0, 4)) == 0:
            rows.append(rows[i])
        else:
            rows[i] = _corrupt(draw, table, rows[i], snapshot)
        snapshot = replace(snapshot, **{table: tuple(rows)})
    return snapshot


def _corrupt(draw: st.DrawFn, table: str, row: Any, snapshot: Snapshot) -> Any:
    number = draw(st.sampled_from(NUMBERS))
    match table:
        case "pools":
            return replace(row, placement="nowhere")
        case "nodes":
            if row.gpus and draw(st.booleans()):
                gpu = row.gpus[0]
                changes = draw(st.sampled_from([{"used_milli": 1700}, {"used_milli": 0, "exclusive": True},
                                                {"memory_mib": number}, {"uuid": GpuUuid("n0-gpu0")}]))  # fmt: skip
                return replace(row, gpus=(replace(gpu, **changes), *row.gpus[1:]))
            return replace(
                row, **{draw(st.sampled_from(["cpu_milli", "memory_mib", "cpu_used_milli"])): number}
            )
        case "projects":
            return replace(row, **draw(st.sampled_from([
                {"parent": snapshot.projects[-1].id}, {"parent": "gone"}, {"created_s": number}])))  # fmt: skip
        case "quotas":
            return replace(
                row, **{draw(st.sampled_from(["weight", "guaranteed_milli", "limit_milli"])): number}
            )
        case "usage":
            return replace(row, gpu_seconds=number)
        case "running":
            task = row.tasks[0]
            tasks = draw(st.sampled_from([
                replace(task, node=NodeId("gone")), replace(task, gpus=(GpuShare(GpuUuid("gone"), 1000),)),
                replace(task, gpus=tuple(GpuShare(gpu.uuid, 1700) for gpu in task.gpus))]))  # fmt: skip
            return replace(row, **draw(st.sampled_from([
                {"tasks": (tasks,)}, {"started_s": math.inf}, {"project": "gone"}, {"pool": "gone"}])))  # fmt: skip
        case "pending":
            return row.change(draw(st.sampled_from([
                {"tasks": 0}, {"cpu_milli": number}, {"project": "gone"}, {"pools": ("gone",)},
                {"not_before_s": math.inf}, {"milli_per_gpu": 4_000}])))  # fmt: skip
        case "reservations":
            return replace(row, **draw(st.sampled_from([
                {"end_s": row.start_s}, {"nodes": (*row.nodes, "gone")}, {"start_s": number}])))  # fmt: skip
    return replace(row, levels=("rack", "rack"))


@given(corrupted())
def test_any_corrupted_snapshot_is_decided_without_the_invalid_rows(snapshot: Snapshot) -> None:
    faults = find_faults(snapshot)
    found = isolate_faults(snapshot)
    check_snapshot(found.snapshot)
    plan = decide(found.snapshot, POLICY)
    check_plan(found.snapshot, plan)
    reported = [verdict.job for verdict in (*plan.verdicts, *found.verdicts)] + [
        start.job for start in plan.starts
    ]
    assert sorted(reported) == sorted({job.job for job in snapshot.pending})
    closed = {fault.row for fault in faults if fault.kind is RowKind.NODE}
    wrong = {fault.row for fault in faults if fault.kind is RowKind.RUNNING}
    closed |= {task.node for row in snapshot.running if row.job in wrong for task in row.tasks}
    assert not closed & {task.node for start in plan.starts for task in start.tasks}
    assert not wrong & {eviction.job for eviction in plan.evictions}
    for each in snapshot.nodes:  # what was held stays held
        now = next((row for row in found.snapshot.nodes if row.id == each.id), None)
        for gpu in each.gpus:
            same = next((one for one in now.gpus if one.uuid == gpu.uuid), None) if now else None
            assert same is None or same.used_milli >= min(gpu.used_milli, 1000)
