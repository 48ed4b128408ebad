"""Gangs use GPUs of one model on one fabric unless they allow others."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.decide import decide, preview_request
from scheduler.core.forecast.durations import DurationHistory
from scheduler.core.forecast.start_times import QueueForecast
from scheduler.core.model.apply_plan import apply_plan
from scheduler.core.model.plan import AlternativeKind, Plan
from scheduler.core.model.policy import Policy, SchedulingSemantics
from scheduler.core.model.snapshot import (
    JobId,
    NodeRow,
    PendingRow,
    RunningRow,
    Snapshot,
    TaskRequest,
    TopologyRow,
)
from tests.core.cluster_builder import MAIN, NOW_S, cluster, node, places, project, quota, runs, waits
from tests.core.plan_rules import PlanError, check_plan

ONLY_ALLOCATE = Policy(semantics=SchedulingSemantics(actions=("allocate",)))
A100 = node("a1")
H100S = [node("h1", model="H100"), node("h2", model="H100")]


def decided(snapshot: Snapshot, policy: Policy | None = None) -> Plan:
    plan = decide(snapshot, policy or Policy())
    check_plan(snapshot, plan)
    return plan


def where(plan: Plan, job: str = "j") -> list[str]:
    return [name for name, _ in places(plan, job)]


def on_fabric(name: str, fabric: str, **changes: Any) -> NodeRow:
    return node(name, labels=(("site/fabric", fabric),), **changes)


@pytest.mark.parametrize("placement", ["pack", "spread", "fragmentation"])
def test_a_gang_starts_on_one_model_although_the_other_node_is_fuller(placement: str) -> None:
    snapshot = cluster([A100, *H100S], [project("p")], pending=[waits("j", "p", 4, tasks=2)])
    snapshot = replace(snapshot, pools=tuple(replace(pool, placement=placement) for pool in snapshot.pools))
    assert where(decided(snapshot)) == ["h1", "h2"]


def test_a_gang_that_fits_on_no_single_model_waits_and_says_what_each_has() -> None:
    nodes = [node("a1"), node("a2"), *H100S]
    held = [runs("r1", "p", ("a2", range(4))), runs("r2", "p", ("h2", range(4)))]
    snapshot = cluster(nodes, [project("p")], running=held, pending=[waits("j", "p", 4, tasks=2)])
    (verdict,) = decided(snapshot).verdicts
    assert verdict.code is VerdictCode.INSUFFICIENT_RESOURCES
    assert "no single GPU model has 8 free GPUs: 4 of A100, 4 of H100" in verdict.message
    change = verdict.suggestion
    assert change is not None and (change.kind, change.fields) == (
        AlternativeKind.MIXED_GPUS, {"allow_mixed_gpus": True},
    )  # fmt: skip
    mixed = replace(snapshot, pending=(replace(snapshot.pending[0], allow_mixed_gpus=True),))
    plan = decided(mixed)
    assert where(plan) == ["a1", "h1"]
    with pytest.raises(PlanError, match="different models"):
        check_plan(snapshot, plan)
    alternatives = preview_request(snapshot, Policy(), snapshot.pending[0]).alternatives
    assert AlternativeKind.MIXED_GPUS in [each.kind for each in alternatives]


def test_free_gpus_of_one_model_on_too_many_nodes_are_counted_in_tasks() -> None:
    nodes = [node("a1", 3), node("a2", 3), node("h1", 4, model="H100")]
    snapshot = cluster(nodes, [project("p")], pending=[waits("j", "p", 2, tasks=3)])
    (verdict,) = decided(snapshot).verdicts
    assert verdict.code is VerdictCode.UNSATISFIABLE
    assert "no single GPU model fits its 3 tasks: 2 on A100, 2 on H100" in verdict.message


def test_a_gang_starts_on_one_fabric_where_nodes_name_fabrics() -> None:
    nodes = [on_fabric("n1", "blue"), on_fabric("n2", "red"), on_fabric("n3", "red"), node("n4")]
    snapshot = cluster(nodes, [project("p")], pending=[waits("j", "p", 4, tasks=2)])
    snapshot = replace(snapshot, topologies=(TopologyRow("site", ("site/fabric",)),))
    assert where(decided(snapshot)) == ["n2", "n3"]
    (verdict,) = decided(replace(snapshot, nodes=(*snapshot.nodes[:2], snapshot.nodes[3]))).verdicts
    assert "no single fabric has 8 GPUs: 4 of no named fabric, 4 of blue, 4 of red" in verdict.message


def test_roles_share_one_model_and_tasks_without_gpus_go_anywhere() -> None:
    asks = (TaskRequest(0, 1000, 64_000, 1_024), *[TaskRequest(4, 1000, 1_000, 1_024)] * 2)
    job = waits("j", "p", 4, tasks=3, task_requests=asks)
    assert where(decided(cluster([A100, *H100S], [project("p")], pending=[job]))) == ["a1", "h1", "h2"]


def elastic(name: str, ranks: dict[int, tuple[str, int]]) -> RunningRow:
    row = runs(name, "p", *[(where, [index]) for where, index in ranks.values()], min_tasks=1)
    return replace(row, tasks=tuple(replace(t, rank=rank) for rank, t in zip(ranks, row.tasks, strict=True)))


def test_an_elastic_gang_grows_on_its_own_model_only() -> None:
    nodes = [node("a1", 2), node("h1", 4, model="H100")]
    growth = waits("j", "p", tasks=3, ranks=(1, 2, 3), min_tasks=1)
    snapshot = cluster(nodes, [project("p")], running=[elastic("j", {0: ("a1", 0)})], pending=[growth])
    plan = decided(snapshot)
    assert places(plan, "j") == [("a1", 1)]
    after = apply_plan(snapshot, plan)
    (verdict,) = decided(after).verdicts
    assert verdict.code is VerdictCode.INSUFFICIENT_RESOURCES and "none is free now" in verdict.message
    assert verdict.suggestion is None
    new = waits("e", "p", tasks=4, min_tasks=1)
    assert len(set(where(decided(cluster(nodes, [project("p")], pending=[new])), "e"))) == 1


def test_a_mixed_gang_that_runs_keeps_growing() -> None:
    growth = waits("j", "p", tasks=1, ranks=(2,), min_tasks=1)
    held = elastic("j", {0: ("a1", 0), 1: ("h1", 0)})
    snapshot = cluster([A100, *H100S], [project("p")], running=[held], pending=[growth])
    assert len(where(decided(snapshot))) == 1


def test_a_reclaim_frees_one_model_the_one_that_misses_fewest() -> None:
    nodes = [node("a1"), node("a2"), *H100S]
    held = [runs(f"r{name}", "greedy", (name, range(4))) for name in ("a1", "a2", "h1")]
    snapshot = cluster(
        nodes, [project("greedy"), project("owed")], [quota("owed", 8)],
        running=held, pending=[waits("j", "owed", 4, tasks=2)],
    )  # fmt: skip
    plan = decided(snapshot)
    assert [eviction.job for eviction in plan.evictions] == ["rh1"]
    (start,) = plan.nominations
    assert {task.node for task in start.tasks} == {"h1", "h2"}


def test_a_reservation_waits_for_one_model() -> None:
    """The jobs on a2 and h2 end at the same time; h1 is taken until later, so the A100 nodes are reserved."""
    nodes = [node("a1"), node("a2"), *H100S]
    limits = {"a2": 1_000.0, "h1": 9_000.0, "h2": 700.0}
    held = [runs(f"r{name}", "p", (name, range(4)), time_limit_s=limit) for name, limit in limits.items()]
    late = waits("j", "p", 4, tasks=2, age_s=9_999.0)
    short, long = (waits(f"{s:g}", "p", 4, time_limit_s=s) for s in (300.0, 3_000.0))
    snapshot = cluster(nodes, [project("p")], running=held, pending=[late, long])
    assert decided(snapshot, ONLY_ALLOCATE).starts == ()
    assert where(decided(replace(snapshot, pending=(late, short)), ONLY_ALLOCATE), "300") == ["a1"]


# -- against a search by hand ------------------------------------------------------------------------------


def fits(nodes: list[NodeRow], busy: set[str], job: PendingRow) -> bool:
    """Return True if the tasks of ``job`` fit on one model and fabric, counted node by node."""
    found: Counter[tuple[str, ...]] = Counter()
    for row in nodes:
        free = Counter(gpu.model for gpu in row.gpus if gpu.uuid not in busy)
        for model, count in free.items():
            found[model, dict(row.labels).get("fabric", "")] += count // job.request.gpus
        found["any",] += free.total() // job.request.gpus
    if not job.allow_mixed_gpus:
        del found["any",]
    return max(found.values(), default=0) >= job.tasks


@st.composite
def mixed_clusters(draw: st.DrawFn) -> tuple[Snapshot, dict[JobId, float]]:
    nodes = []
    for i in range(draw(st.integers(1, 5))):
        models = draw(st.lists(st.sampled_from("AAH"), min_size=1, max_size=4))
        row = node(f"n{i}", labels=draw(st.sampled_from([(), (("fabric", "red"),), (("fabric", "blue"),)])))
        cards = (replace(row.gpus[g], model=model) for g, model in enumerate(models))
        nodes.append(replace(row, gpus=tuple(cards)))
    running, ends_s = [], {}
    for row in nodes:
        if taken := range(draw(st.integers(0, len(row.gpus)))):
            running.append(runs(f"r{row.id}", "p", (row.id, taken)))
            ends_s[running[-1].job] = NOW_S + draw(st.sampled_from([100.0, 200.0, 300.0]))
    job = waits(
        "j", "p", draw(st.integers(1, 2)), tasks=draw(st.integers(2, 5)),
        allow_mixed_gpus=draw(st.sampled_from([False, False, True])),
    )  # fmt: skip
    return cluster(nodes, [project("p")], running=running, pending=[job]), ends_s


@settings(max_examples=60)
@given(mixed_clusters())
def test_start_and_forecast_agree_with_counting_by_hand(drawn: tuple[Snapshot, dict[JobId, float]]) -> None:
    snapshot, ends_s = drawn
    (job,), nodes = snapshot.pending, list(snapshot.nodes)
    plan = decided(snapshot, ONLY_ALLOCATE)

    def fits_at(at_s: float) -> bool:
        held = (row for row in snapshot.running if ends_s[row.job] > at_s)
        return fits(nodes, {gpu.uuid for row in held for task in row.tasks for gpu in task.gpus}, job)

    assert bool(plan.starts) == fits_at(NOW_S)
    if plan.verdicts:
        ever = fits_at(math.inf)
        assert (plan.verdicts[0].code is VerdictCode.UNSATISFIABLE) == (not ever)
        if ever:
            starts_s = min(at_s for at_s in ends_s.values() if fits_at(at_s)) - NOW_S
            forecast = QueueForecast(snapshot, plan, MAIN, DurationHistory(), Policy(), known_ends_s=ends_s)
            assert forecast.median_starts_s([job.job]) == {job.job: starts_s}
