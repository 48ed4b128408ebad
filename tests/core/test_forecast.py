"""When a waiting job will start."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.decide import decide
from scheduler.core.forecast.durations import DurationHistory, DurationKey
from scheduler.core.forecast.queue_simulation import SIMULATION_RUNS
from scheduler.core.forecast.start_times import (
    EVICTION_S,
    QueueForecast,
    draw_quantiles,
    has_forecast,
    queue_pool_of,
)
from scheduler.core.model.apply_plan import apply_plan, requeued_row
from scheduler.core.model.policy import Policy, SchedulingSemantics
from scheduler.core.model.snapshot import (
    GpuRow,
    GpuUuid,
    JobDependency,
    JobId,
    NodeId,
    PendingRow,
    PoolId,
    PoolRow,
    ProjectId,
    QuotaRow,
    ReservationRow,
    RunningRow,
    Snapshot,
    TopologyConstraint,
    TopologyRow,
)
from tests.core.cluster_builder import (
    MAIN,
    NOW_S,
    cluster,
    crowded,
    node,
    project,
    quota,
    runs,
    snapshots,
    waits,
)

KEEPS_ALL = Policy(semantics=SchedulingSemantics(actions=("allocate",)))
"""Nobody is asked to leave: what is foreseen follows from who ends when."""


def test_draws_are_spread_evenly_over_plays_and_jobs() -> None:
    assert all(0.0 <= part < 1.0 for number in range(50) for part in draw_quantiles(number))
    for number in (0, 7):
        assert sorted(int(part * SIMULATION_RUNS) for part in draw_quantiles(number)) == list(
            range(SIMULATION_RUNS)
        )
    assert draw_quantiles(3) == draw_quantiles(3)


def crowd() -> Snapshot:
    rows = [runs(f"r{i}", "p", ("n1", range(i, i + 1)), started_s=NOW_S - 100.0) for i in range(4)]
    line = [waits(f"j{i}", "p", 1, age_s=10.0 - i) for i in range(5)]
    return cluster([node("n1")], [project("p")], [], running=rows, pending=line)


def taught() -> DurationHistory:
    durations = DurationHistory()
    for n in range(1, 101):
        durations.learn(DurationKey("p", "ada", None, 1_000), 20.0 * n)
    return durations


def test_a_share_waits_for_a_gpu_that_its_own_project_shares() -> None:
    """The hole beside another project's share is of no use to it; beside one of its own it starts at once."""
    theirs = runs("old", "theirs", ("n1", [0]), milli=400)
    own = runs("older", "ours", ("n2", [0]), milli=700)
    photo = cluster(
        [node("n1", 1), node("n2", 1)],
        [project("ours"), project("theirs")],
        running=[theirs, own],
        pending=[waits("new", "ours", milli_per_gpu=500)],
    )
    ends_s = {theirs.job: NOW_S + 50.0, own.job: NOW_S + 90.0}
    for policy, start_s in ((KEEPS_ALL, 50.0), (replace(KEEPS_ALL, gpu_sharing_scope="any"), 0.0)):
        plan = replace(
            decide(photo, replace(policy, semantics=SchedulingSemantics(actions=()))), starts=(), verdicts=()
        )
        outlook = QueueForecast(photo, plan, MAIN, taught(), policy, known_ends_s=ends_s)
        assert outlook.median_starts_s([JobId("new")]) == {JobId("new"): start_s}


def test_from_snapshot_and_plan_to_a_median() -> None:
    snapshot, policy = crowd(), Policy()
    plan = decide(snapshot, policy)
    outlook = QueueForecast(snapshot, plan, MAIN, taught(), policy)
    jobs = [JobId(f"j{i}") for i in range(5)]
    medians = outlook.median_starts_s(jobs)
    assert list(medians.values()) == sorted(medians.values())
    assert 0.0 < medians[jobs[0]] < medians[jobs[4]] < 2_000.0
    assert medians == QueueForecast(snapshot, plan, MAIN, taught(), policy).median_starts_s(jobs[::-1])
    assert medians == {job: outlook.median_starts_s([job])[job] for job in jobs}  # alone, as together


def test_a_job_that_gpus_are_freed_for_gets_them_and_the_free_ones_beside_them() -> None:
    rows = [runs(f"r{i}", "rich", ("n1", [i]), started_s=NOW_S - 100.0) for i in range(3)]
    pending = [waits("first", "poor", 2, age_s=20.0), waits("second", "rich", 1, age_s=10.0)]
    quotas = [quota("poor", guaranteed=2), quota("rich")]
    projects = [project("rich"), project("poor")]
    snapshot = cluster([node("n1", 4)], projects, quotas, running=rows, pending=pending)
    plan = decide(snapshot, Policy())
    assert [(each.for_job, each.reason.value) for each in plan.evictions] == [("first", "reclaimed")]
    outlook = QueueForecast(snapshot, plan, MAIN, taught(), Policy())
    assert outlook.queue == ("first", "r0", "second")
    medians = outlook.median_starts_s(outlook.queue)
    assert medians[JobId("first")] == EVICTION_S < medians[JobId("second")]


def test_the_order_of_rows_changes_no_forecast() -> None:
    snapshot, policy = crowd(), Policy()
    turned = replace(snapshot, running=snapshot.running[::-1], pending=snapshot.pending[::-1])
    found = [
        QueueForecast(each, decide(each, policy), MAIN, taught(), policy).median_starts_s([JobId("j3")])
        for each in (snapshot, turned)
    ]
    assert found[0] == found[1]


def test_a_time_limit_caps_the_sampled_duration() -> None:
    snapshot, policy = crowd(), Policy()
    limited = replace(snapshot, running=tuple(replace(row, time_limit_s=130.0) for row in snapshot.running))
    outlook = QueueForecast(limited, decide(limited, policy), MAIN, taught(), policy)
    assert outlook.median_starts_s([JobId("j0")])[JobId("j0")] <= 30.0


def test_jobs_that_do_not_wait_here_have_no_forecast() -> None:
    snapshot, policy = crowd(), Policy()
    with pytest.raises(KeyError):
        QueueForecast(snapshot, decide(snapshot, policy), MAIN, taught(), policy).median_starts_s(
            [JobId("r0")]
        )


# -- what a decision obeys, a forecast knows ------------------------------------------------------------------


def ends_in(job: str, of: str, left_s: float, *places: tuple[str, range], **changes: Any) -> RunningRow:
    """A running job that surely ends then: it runs into its time limit, and nothing like it is known."""
    return runs(job, of, *places, started_s=NOW_S - 10_000.0, time_limit_s=10_000.0 + left_s, **changes)


def asks(job: str, of: str, count: int = 1, **changes: Any) -> PendingRow:
    """A waiting job that would run for a minute."""
    return waits(job, of, count, **{"time_limit_s": 60.0, **changes})


def foreseen(snapshot: Snapshot, job: str, policy: Policy = KEEPS_ALL) -> float:
    """In how many seconds a job starts that does not start at once; nothing is known of how long jobs run."""
    plan = decide(snapshot, policy)
    assert job not in {start.job for start in plan.starts}
    medians_s = QueueForecast(snapshot, plan, MAIN, DurationHistory(), policy).median_starts_s([JobId(job)])
    median_s = medians_s[JobId(job)]
    return median_s if median_s == math.inf else round(median_s, 3)


@pytest.mark.parametrize("bound", [quota("p", limit=2), quota("top", limit=2)], ids=["own", "above"])
def test_a_limit_is_waited_for_though_gpus_are_free(bound: QuotaRow) -> None:
    running = [ends_in("r0", "p", 500.0, ("n0", range(1))), ends_in("r1", "p", 900.0, ("n0", range(1, 2)))]
    snapshot = cluster(
        [node("n0")],
        [project("top"), project("p", "top")],
        [bound],
        running=running,
        pending=[asks("me", "p")],
    )
    assert foreseen(snapshot, "me") == 500.0


def test_the_limit_per_user_delays_a_forecast() -> None:
    running = [ends_in("r0", "p", 500.0, ("n0", range(2)))]
    snapshot = cluster(
        [node("n0")], [project("p")], [quota("p", person=2)], running=running, pending=[asks("me", "p")]
    )
    assert foreseen(snapshot, "me") == 500.0


def test_firm_work_waits_for_its_guarantee() -> None:
    running = [ends_in("r0", "p", 500.0, ("n0", range(2)), preemptible=False)]
    snapshot = cluster(
        [node("n0")],
        [project("p")],
        [quota("p", 2)],
        running=running,
        pending=[asks("me", "p", preemptible=False)],
    )
    assert foreseen(snapshot, "me") == 500.0


NODES = [node("a", 2), node("h", 2, model="H100")]
BUSY = [ends_in("soon", "p", 100.0, ("a", range(2))), ends_in("late", "p", 700.0, ("h", range(2)))]


@pytest.mark.parametrize(
    ("wish", "wanted"),
    [
        ({}, 100.0),
        ({"gpu_model": "H100"}, 700.0),
        ({"gpu_model": "A100|H100"}, 100.0),
        ({"node_affinity": NodeId("h")}, 700.0),
        ({"avoid_nodes": (NodeId("a"),)}, 700.0),
        ({"avoid_nodes": (NodeId("a"),), "ineligible_nodes": (NodeId("a"),)}, 700.0),
        ({"cpu_milli": 48_000}, 700.0),
    ],
)
def test_a_job_waits_for_nodes_that_can_run_it(wish: dict[str, Any], wanted: float) -> None:
    nodes = [replace(NODES[0], cpu_milli=32_000), NODES[1]]
    snapshot = cluster(nodes, [project("p")], running=BUSY, pending=[asks("me", "p", 2, **wish)])
    assert foreseen(snapshot, "me") == wanted


def test_memory_capability_and_mig_slices_are_distinguished_on_one_node() -> None:
    cards = (
        GpuRow(GpuUuid("x-gpu0"), 0, "A100", 40_960, compute_capability=8.0),
        GpuRow(GpuUuid("x-gpu1"), 1, "A100", 81_920, compute_capability=9.0),
        GpuRow(GpuUuid("x-gpu2"), 2, "A100", 10_240, mig_profile="1g.10gb", compute_capability=8.0),
    )
    running = [ends_in(f"r{i}", "p", 100.0 * (i + 1), ("x", range(i, i + 1))) for i in range(3)]
    pending = [
        asks("any", "p"),
        asks("large", "p", min_gpu_memory_mib=50_000),
        asks("new", "p", min_compute_capability=8.6),
        asks("slice", "p", mig_profile="1g.10gb"),
    ]
    snapshot = cluster([node("x", gpus=cards)], [project("p")], running=running, pending=pending)
    plan = decide(snapshot, KEEPS_ALL)
    outlook = QueueForecast(snapshot, plan, MAIN, DurationHistory(), KEEPS_ALL)
    medians = outlook.median_starts_s([row.job for row in pending])
    # "large" stands where "new" could, for a minute
    assert [round(median_s) for median_s in medians.values()] == [100, 200, 260, 300]


def test_unschedulable_nodes_and_lost_gpus_release_nothing() -> None:
    drained = replace(NODES[0], schedulable=False)
    snapshot = cluster([drained, NODES[1]], [project("p")], running=BUSY, pending=[asks("me", "p")])
    assert foreseen(snapshot, "me") == 700.0
    lost = replace(NODES[0], gpus=tuple(replace(gpu, healthy=False) for gpu in NODES[0].gpus))
    snapshot = cluster([lost, NODES[1]], [project("p")], running=BUSY, pending=[asks("me", "p")])
    assert foreseen(snapshot, "me") == 700.0


def reserved(nodes: str, of: str | None, from_s: float, to_s: float) -> ReservationRow:
    projects = () if of is None else (ProjectId(of),)
    return ReservationRow("r", "r", (NodeId(nodes),), projects, NOW_S + from_s, NOW_S + to_s)


@pytest.mark.parametrize(
    ("row", "limit_s", "wanted"),
    [
        (reserved("n0", "q", -10.0, 400.0), 60.0, 400.0),  # kept for another until then
        (reserved("n0", None, -10.0, 400.0), 60.0, 400.0),  # maintenance
        (reserved("n0", "p", -10.0, 400.0), 60.0, 100.0),  # its own
        (reserved("n0", "q", 150.0, 400.0), 60.0, 400.0),  # not gone before it begins
        (reserved("n0", "q", 170.0, 400.0), 60.0, 100.0),  # surely gone before
        (reserved("n0", "q", 9_000.0, 9_400.0), None, 9_400.0),  # never surely gone
    ],
)
def test_reserved_nodes_open_and_close_with_time(
    row: ReservationRow, limit_s: float | None, wanted: float
) -> None:
    snapshot = cluster(
        [node("n0", 1)], [project("p"), project("q")], running=[ends_in("r0", "p", 100.0, ("n0", range(1)))],
        pending=[asks("me", "p", time_limit_s=limit_s)],
    )  # fmt: skip
    assert foreseen(replace(snapshot, reservations=(row,)), "me") == wanted


def test_held_and_dependent_jobs_block_nobody() -> None:
    running = [ends_in("r0", "p", 100.0, ("n0", range(1)))]
    before = [
        asks("held", "p", age_s=50.0, held=True),
        asks("after", "p", age_s=40.0, dependencies=(JobDependency(JobId("r0"), "r0", ProjectId("p")),)),
    ]
    snapshot = cluster([node("n0", 1)], [project("p")], running=running, pending=[*before, asks("me", "p")])
    assert foreseen(snapshot, "me") == 100.0


def test_no_forecast_before_the_start_after_time() -> None:
    snapshot = cluster([node("n0", 1)], [project("p")], pending=[asks("me", "p", not_before_s=NOW_S + 300.0)])
    assert foreseen(snapshot, "me") == 300.0


def test_priority_precedes_age() -> None:
    running = [ends_in("r0", "p", 100.0, ("n0", range(1)))]
    pending = [asks("old", "p", age_s=900.0), asks("urgent", "p", priority=75)]
    snapshot = cluster([node("n0", 1)], [project("p")], running=running, pending=pending)
    assert [foreseen(snapshot, "urgent"), foreseen(snapshot, "old")] == [100.0, 160.0]


def test_a_job_waits_in_the_pool_that_can_run_it() -> None:
    pools = [PoolRow(MAIN, "main"), PoolRow(PoolId("big"), "big")]
    running = [ends_in("r0", "p", 100.0, ("b0", range(4)), pool=PoolId("big"))]
    snapshot = cluster(
        [node("n0", 1), node("b0", 4, pool="big")], [project("p")], running=running, pools=pools,
        pending=[asks("me", "p", 4, pools=(MAIN, PoolId("big")))],
    )  # fmt: skip
    plan = decide(snapshot, KEEPS_ALL)
    (verdict,) = plan.verdicts
    assert queue_pool_of(snapshot.pending[0], verdict) == "big"
    outlook = QueueForecast(snapshot, plan, PoolId("big"), DurationHistory(), KEEPS_ALL)
    assert outlook.median_starts_s([JobId("me")]) == {"me": pytest.approx(100.0)}


def test_an_elastic_job_starts_with_the_fewest_tasks_that_do() -> None:
    running = [ends_in("r0", "p", 100.0, ("n0", range(2)))]
    snapshot = cluster(
        [node("n0", 2)], [project("p")], running=running, pending=[asks("me", "p", tasks=8, min_tasks=2)]
    )
    assert foreseen(snapshot, "me") == 100.0


@pytest.mark.parametrize(
    ("me", "quotas"),
    [
        (asks("me", "p", 3), []),  # no node is so large
        (asks("me", "p", 2), [quota("p", limit=1)]),
        (asks("me", "p", 2, preemptible=False), [quota("p", 1)]),
    ],
)
def test_jobs_that_never_start_have_no_forecast(me: PendingRow, quotas: list[QuotaRow]) -> None:
    running = [ends_in("r0", "p", 100.0, ("n0", range(2)))]
    snapshot = cluster([node("n0", 2)], [project("p")], quotas, running=running, pending=[me])
    assert foreseen(snapshot, "me") == math.inf


def test_a_forecast_includes_reclaims_once_a_project_is_within_its_share() -> None:
    running = [
        ends_in("own", "poor", 500.0, ("n0", range(1))),
        *(ends_in(f"r{i}", "rich", 5_000.0, ("n0", range(i, i + 1))) for i in (1, 2, 3)),
    ]
    snapshot = cluster([node("n0", 4)], [project("poor"), project("rich")], running=running,
                       pending=[asks("me", "poor", 2)])  # fmt: skip
    assert foreseen(snapshot, "me") == 5_000.0
    assert foreseen(snapshot, "me", Policy()) == 500.0
    assert foreseen(snapshot, "me", Policy(preemption_delay_s=600.0)) == 600.0
    protected = [replace(row, preemptible=False) for row in snapshot.running]
    assert foreseen(replace(snapshot, running=tuple(protected)), "me", Policy()) == 5_000.0


@pytest.mark.parametrize(
    "request_changes",
    [{}, {"tasks": 3, "min_tasks": 2}, {"cpu_milli": 500, "memory_mib": 64, "time_limit_s": 60.0},
     {"milli_per_gpu": 500}, {"gpu_model": "A100", "priority": 7}],
)  # fmt: skip
def test_an_evicted_job_requests_again_what_it_held(request_changes: dict[str, Any]) -> None:
    row = waits("me", "p", 1, **request_changes)
    snapshot = cluster([node("n0", 4)], [project("p")], pending=[row])
    running = apply_plan(snapshot, decide(snapshot, Policy())).running
    assert [each.job for each in running] == ["me"]
    again = requeued_row(running[0])
    assert replace(again, pools=row.pools, submitted_s=row.submitted_s, version=row.version) == row


@given(st.one_of(snapshots(), crowded()))
def test_forecasts_do_not_depend_on_row_order(snapshot: Snapshot) -> None:
    turned = replace(
        snapshot,
        nodes=snapshot.nodes[::-1], running=snapshot.running[::-1], pending=snapshot.pending[::-1],
        quotas=snapshot.quotas[::-1], reservations=snapshot.reservations[::-1],
    )  # fmt: skip
    assert all_foreseen(snapshot) == all_foreseen(turned)


def all_foreseen(snapshot: Snapshot) -> list[dict[JobId, float]]:
    """By pool, of every job that has a turn there, with the rules that must hold for each."""
    plan = decide(snapshot, Policy())
    rows = {row.job: row for row in snapshot.pending}
    waiting: dict[PoolId, list[PendingRow]] = {}
    for verdict in plan.verdicts:
        row, pool = rows[verdict.job], queue_pool_of(rows[verdict.job], verdict)
        if not (row.held or row.dependencies or not row.total_milli or pool is None):
            waiting.setdefault(pool, []).append(row)
    found = []
    for pool, here in sorted(waiting.items()):
        outlook = QueueForecast(snapshot, plan, pool, DurationHistory(), Policy())
        medians_s = outlook.median_starts_s(sorted(row.job for row in here))
        assert len(medians_s) == len(here)
        assert all(NOW_S + medians_s[row.job] >= (row.not_before_s or 0.0) for row in here)
        found.append(medians_s)
    return found


P_ONLY = project("p")
ENDLESS = runs("endless", "p", ("n0", [0, 1]))
"""A running job without a time limit, of which nothing is known."""
SHORT_S = 500.0
SHORT = ends_in("short", "p", SHORT_S, ("n1", [0, 1]))
BLOCKED: dict[str, tuple[Snapshot, float]] = {
    # a snapshot with the job "me", and the earliest time at which a forecast may let it start
    "its GPUs": (cluster([node("n0", 2)], [P_ONLY], running=[ENDLESS], pending=[waits("me", "p")]), math.inf),
    "its CPUs": (
        cluster([node("n0", 4, cpu_milli=2_000)], [P_ONLY], running=[ENDLESS],
                pending=[waits("me", "p", cpu_milli=1_500)]),
        math.inf,
    ),
    "the whole node": (
        cluster([node("n0", 4)], [P_ONLY], running=[ENDLESS], pending=[waits("me", "p", 4)]), math.inf,
    ),
    "a limit": (
        cluster([node("n0", 4)], [P_ONLY], [quota("p", limit=2)], running=[ENDLESS], pending=[waits("me", "p")]),
        math.inf,
    ),
    "a drained node beside": (
        cluster([node("n0", 2), node("n1", 2, schedulable=False)], [P_ONLY], running=[ENDLESS],
                pending=[waits("me", "p")]),
        math.inf,
    ),
    "an unreachable node beside": (
        cluster([node("n0", 2), node("n1", 2, reachable=False)], [P_ONLY], running=[ENDLESS],
                pending=[waits("me", "p")]),
        math.inf,
    ),
    "a reserved node beside": (
        replace(
            cluster([node("n0", 2), node("n1", 2)], [P_ONLY, project("q")], running=[ENDLESS],
                    pending=[waits("me", "p")]),
            reservations=(
                ReservationRow("r", "r", (NodeId("n1"),), (ProjectId("q"),), NOW_S - 60, NOW_S + 3600),
            ),
        ),
        3600.0,
    ),
    "a waiting job ahead": (
        cluster([node("n1", 2)], [P_ONLY], running=[SHORT],
                pending=[waits("ahead", "p", 2, priority=90), waits("me", "p")]),
        math.inf,
    ),
    "the place of a larger job": (
        cluster([node("n0", 2), node("n1", 2)], [P_ONLY], running=[replace(SHORT, preemptible=False)],
                pending=[waits("gang", "p", 2, tasks=2, age_s=1e5, priority=90, time_limit_s=60.0),
                         waits("me", "p")]),
        500.0,
    ),
    "one rack": (
        replace(
            cluster([node("n0", 2, labels=(("rack", "1"),)), node("n2", 2, labels=(("rack", "2"),)),
                     node("n3", 2, labels=(("rack", "3"),))],
                    [P_ONLY], running=[ENDLESS],
                    pending=[waits("me", "p", 2, tasks=2, topology_constraint=TopologyConstraint("f", "rack"))]),
            topologies=(TopologyRow("f", ("rack",)),),
        ),
        math.inf,
    ),
}  # fmt: skip


@pytest.mark.parametrize("known", [DurationHistory(), taught()], ids=["nothing known", "small jobs known"])
@pytest.mark.parametrize(("snapshot", "earliest_s"), BLOCKED.values(), ids=BLOCKED.keys())
def test_no_forecast_says_now_of_a_job_that_something_without_an_end_blocks(
    snapshot: Snapshot, earliest_s: float, known: DurationHistory
) -> None:
    plan = decide(snapshot, Policy())
    verdict = next(each for each in plan.verdicts if each.job == "me")
    if not has_forecast(next(row for row in snapshot.pending if row.job == "me"), verdict):
        return
    pool = queue_pool_of(snapshot.pending[-1], verdict)
    median_s = QueueForecast(snapshot, plan, pool, known, Policy()).median_starts_s([JobId("me")])[
        JobId("me")
    ]
    waits_behind = known.learned_count and any(row.job == "ahead" for row in snapshot.pending)
    assert median_s >= (SHORT_S if waits_behind else earliest_s), verdict
