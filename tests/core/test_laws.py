"""What holds for every plan on every cluster: the properties of the scheduler, on drawn clusters."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.decide import _Decision, decide, preview_request
from scheduler.core.model.apply_plan import apply_plan
from scheduler.core.model.policy import Policy
from scheduler.core.model.serialization import plan_to_json, snapshot_from_json, snapshot_to_json
from scheduler.core.model.snapshot import WHOLE_MILLI, ProjectId, Snapshot
from scheduler.core.model.validation import check_snapshot
from scheduler.core.session.cache import DecisionCache
from tests.core.cluster_builder import crowded, release_stopping_jobs, snapshots
from tests.core.plan_rules import check_plan

POLICY = Policy()
CALM = [HealthCheck.too_slow, HealthCheck.data_too_large]


def every_plan_obeys_the_laws(snapshot: Snapshot) -> None:
    check_plan(snapshot, decide(snapshot, POLICY))


def nothing_that_fits_is_said_not_to_fit(snapshot: Snapshot) -> None:
    decision = _Decision(snapshot, POLICY)
    plan = decision.plan()
    rows = {row.job: row for row in snapshot.pending}
    for verdict in plan.verdicts:
        row = rows[verdict.job]
        if verdict.code in (VerdictCode.INSUFFICIENT_RESOURCES, VerdictCode.OVER_FAIR_SHARE):
            assert not any(decision._session.pool_states[pool].fits_now(row) for pool in row.pools), verdict
        if verdict.code is VerdictCode.UNSATISFIABLE:
            assert not any(decision._session.pool_states[pool].could_ever_fit(row) for pool in row.pools), (
                verdict
            )
        assert verdict.message.endswith(".")


def verdicts_and_breakdowns_have_the_same_numbers(snapshot: Snapshot) -> None:
    """What a project holds and its share; a job over it is said to be so by both, and no other one."""
    plan = decide(snapshot, POLICY)
    breakdowns = {(each.project, each.pool): each for each in plan.share_breakdowns}
    parents = {row.parent for row in snapshot.projects}
    projects = {row.job: row.project for row in snapshot.pending}
    for verdict in plan.verdicts:
        details = verdict.details
        if "fair_share_gpus" not in details:
            continue
        project = str(details.get("project") or projects[verdict.job])
        if project in parents:  # the verdict names the jobs of the project itself apart from those below it
            continue
        breakdown = breakdowns[project, details["pool"]]
        assert details["used_gpus"] == breakdown.allocated_milli / 1000, verdict
        assert details["fair_share_gpus"] == breakdown.fair_share_milli / 1000, verdict
        over = details["used_gpus"] + details["needed_gpus"] > details["fair_share_gpus"]
        if verdict.code is VerdictCode.OVER_FAIR_SHARE:
            assert over and "with this job it would hold" in verdict.message, verdict


def no_start_passes_what_one_person_may_hold(snapshot: Snapshot) -> None:
    """Counted here anew, from rows alone: people hold through a project what they hold in all below it."""
    plan = decide(snapshot, POLICY)
    waiting = {row.job: row for row in snapshot.pending}
    parent = {row.id: row.parent for row in snapshot.projects}
    held: Counter[tuple[str, str, str]] = Counter()
    begun: set[tuple[str, str, str]] = set()
    places = [(row.project, row.user, row.pool, row.tasks, False) for row in snapshot.running]
    for start in plan.starts:
        row = waiting[start.job]
        places.append((row.project, row.user, start.pool, start.tasks, True))
    for of, user, pool, tasks, starts in places:
        milli = sum(gpu.milli for task in tasks for gpu in task.gpus)
        level: ProjectId | None = of
        while level is not None:
            held[level, user, pool] += milli
            if starts and milli:
                begun.add((level, user, pool))
            level = parent[level]
    for each in snapshot.quotas:
        if each.user_limit_milli is not None:
            for project, user, pool in begun:
                if (project, pool) == (each.project, each.pool):
                    assert held[project, user, pool] <= each.user_limit_milli


def a_person_who_holds_too_much_is_told_so(snapshot: Snapshot) -> None:
    """The numbers of the verdict say so themselves, and the change that it names keeps within them."""
    rows = {row.job: row for row in snapshot.pending}
    for verdict in decide(snapshot, POLICY).verdicts:
        if verdict.code is VerdictCode.USER_LIMIT:
            used, needed, most = (
                verdict.details[name] for name in ("used_gpus", "needed_gpus", "user_limit_gpus")
            )
            assert float(used or 0) + float(needed or 0) > float(most or 0)
            assert rows[verdict.job].total_milli > 0


def nobody_starts_or_takes_part_before_its_turn_can_come(snapshot: Snapshot) -> None:
    """A job that waits for others changes nothing for anybody else."""
    plan = decide(snapshot, POLICY)
    waits = {row.job for row in snapshot.pending if row.dependencies}
    assert not waits & {start.job for start in (*plan.starts, *plan.nominations)}
    assert not waits & {eviction.for_job for eviction in plan.evictions}
    assert not waits & {job for verdict in plan.verdicts for job in verdict.jobs_ahead}
    reported = {verdict.job: verdict.code for verdict in plan.verdicts}
    for row in snapshot.pending:
        if row.dependencies and not row.held and row.not_before_s is None and row.node_affinity is None:
            assert reported[row.job] in (VerdictCode.DEPENDENCY, VerdictCode.UNSATISFIABLE)
    if all(pool.placement == "pack" for pool in snapshot.pools):  # what waits tells the others what is usual
        without = decide(
            replace(snapshot, pending=tuple(row for row in snapshot.pending if not row.dependencies)), POLICY
        )
        assert (without.starts, without.share_breakdowns) == (plan.starts, plan.share_breakdowns)


def a_second_decision_changes_nothing(snapshot: Snapshot) -> None:
    first = decide(snapshot, POLICY)
    second = decide(apply_plan(snapshot, first), POLICY)
    assert (second.starts, second.evictions) == ((), ())


def the_order_of_rows_does_not_matter(snapshot: Snapshot) -> None:
    shuffled = replace(
        snapshot,
        **{
            name: tuple(random.Random(7).sample(rows, len(rows)))
            for name in (
                "pools",
                "nodes",
                "projects",
                "quotas",
                "usage",
                "running",
                "pending",
                "reservations",
            )
            for rows in [getattr(snapshot, name)]
        },
    )
    assert plan_to_json(decide(shuffled, POLICY)) == plan_to_json(decide(snapshot, POLICY))


def a_saved_snapshot_replays_to_the_same_plan(snapshot: Snapshot) -> None:
    again = snapshot_from_json(snapshot_to_json(snapshot))
    assert again == snapshot
    assert plan_to_json(decide(again, POLICY)) == plan_to_json(decide(snapshot, POLICY))


def shares_meet_the_max_min_certificate(snapshot: Snapshot) -> None:
    """Nobody gets more than it could use, and the rest is left over only when nobody with weight wants it."""
    decision = _Decision(snapshot, POLICY)
    decision.plan()
    for dataset in decision._session.pool_states.values():
        for parent, children in dataset.tree.children.items():
            total = dataset.capacity_milli if parent is None else dataset.fair_share_milli[parent]
            given = sum(dataset.fair_share_milli[child] for child in children)
            promised = sum(
                min(dataset.quotas[child].guaranteed_milli, dataset.requested_milli[child])
                for child in children
            )
            assert given <= max(total, promised) + 1e-6
            for child in children:
                share = dataset.fair_share_milli[child]
                assert share <= dataset.requested_milli[child] + 1e-6
                assert (
                    share
                    >= min(dataset.quotas[child].guaranteed_milli, dataset.requested_milli[child]) - 1e-6
                )


def a_receipt_adds_up(snapshot: Snapshot) -> None:
    for breakdown in decide(snapshot, POLICY).share_breakdowns:
        assert sum(step.amount_milli for step in breakdown.steps) == pytest.approx(breakdown.fair_share_milli)


def every_victim_is_needed(snapshot: Snapshot) -> None:
    """With any one victim back, the job it leaves for would not fit even once all the others had left."""
    decision = _Decision(snapshot, POLICY)
    plan = decision.plan()
    assert not decision._evict_action.reprieve_victims()
    placed = {start.job for start in (*plan.nominations, *plan.starts)}
    for eviction in plan.evictions:
        assert eviction.for_job in placed


def what_is_remembered_changes_no_plan(snapshot: Snapshot) -> None:
    """Decisions on one snapshot after the other come out the same with a memory as without."""
    memory = DecisionCache()
    for _ in range(3):
        plan = decide(snapshot, POLICY, memory)
        assert plan_to_json(plan) == plan_to_json(decide(snapshot, POLICY))
        for request in snapshot.pending[-1:]:
            preview = preview_request(snapshot, POLICY, request, memory)
            assert preview == preview_request(snapshot, POLICY, request)
        after = apply_plan(snapshot, plan)
        snapshot = replace(release_stopping_jobs(after), now_s=snapshot.now_s + 60)


def shares_of_a_gpu_are_of_one_project(snapshot: Snapshot) -> None:
    """No start joins shares of another project, also not where these are leaving."""
    milli = (300, 500, 700)
    shared = tuple(
        row.change({"milli_per_gpu": milli[i % 3]})
        if row.request.gpus and not (row.task_requests or row.nominated_tasks)
        else row
        for i, row in enumerate(snapshot.pending)
    )
    snapshot = replace(snapshot, pending=shared)
    waiting = {row.job: row.project for row in snapshot.pending}
    stands: dict[str, set[str]] = defaultdict(set)
    for row in snapshot.running:
        for task in row.tasks:
            for gpu in task.gpus:
                if gpu.milli < WHOLE_MILLI:
                    stands[gpu.uuid].add(row.project)
    for start in decide(snapshot, POLICY).starts:
        for place in start.tasks:
            for gpu in place.gpus:
                if gpu.milli < WHOLE_MILLI:
                    stands[gpu.uuid].add(waiting[start.job])
                    assert stands[gpu.uuid] == {waiting[start.job]}


LAWS: list[Callable[[Snapshot], None]] = [
    every_plan_obeys_the_laws,
    nothing_that_fits_is_said_not_to_fit,
    verdicts_and_breakdowns_have_the_same_numbers,
    no_start_passes_what_one_person_may_hold,
    a_person_who_holds_too_much_is_told_so,
    nobody_starts_or_takes_part_before_its_turn_can_come,
    a_second_decision_changes_nothing,
    the_order_of_rows_does_not_matter,
    a_saved_snapshot_replays_to_the_same_plan,
    shares_meet_the_max_min_certificate,
    a_receipt_adds_up,
    every_victim_is_needed,
    shares_of_a_gpu_are_of_one_project,
    what_is_remembered_changes_no_plan,
]


# the short run draws the same examples each time; the long one draws new ones
@pytest.mark.timeout(600)  # twenty seconds where nothing else runs
@settings(max_examples=150, deadline=None, suppress_health_check=CALM, derandomize=True)
@given(snapshot=st.one_of(snapshots(), crowded()))
def test_invariants_of_a_decision(snapshot: Snapshot) -> None:
    check_snapshot(snapshot)
    for law in LAWS:
        law(snapshot)


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@settings(max_examples=10_000, deadline=None, suppress_health_check=CALM)
@given(snapshot=st.one_of(snapshots(), crowded()))
def test_laws_long(law: Callable[[Snapshot], None], snapshot: Snapshot) -> None:
    law(snapshot)


@settings(max_examples=100, deadline=None, suppress_health_check=CALM, derandomize=True)
@given(snapshot=snapshots(), budget=st.integers(100, 110))
def test_a_small_budget_is_reported(snapshot: Snapshot, budget: int) -> None:
    policy = replace(POLICY, max_steps_per_cycle=budget, max_suggestion_steps=0)
    plan = decide(snapshot, policy)
    check_plan(snapshot, plan)
    assert plan.truncated >= any(v.code is VerdictCode.CYCLE_BUDGET_EXHAUSTED for v in plan.verdicts)
