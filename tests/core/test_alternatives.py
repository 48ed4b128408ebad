"""Changes that start a waiting job: each one that is offered starts it, whatever else waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.decide import decide, preview_request
from scheduler.core.model.plan import Alternative, AlternativeKind, Verdict
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import JobId, PendingRow, PoolId, PoolRow, Snapshot, TopologyConstraint
from scheduler.core.session.cache import MAX_VARIANT_LISTS, DecisionCache
from tests.core.cluster_builder import FABRIC, cluster, counted, crowded, node, project, runs, started, waits

POLICY = Policy()
EAGER = replace(POLICY, backfill_reserve_after_s=0.0)
"""Every gang that waits has a reservation."""
HOUR_S = 3_600.0
FIRM = {"preemptible": False}


def verdict_of(snapshot: Snapshot, job: str, policy: Policy = POLICY) -> Verdict:
    return next(verdict for verdict in decide(snapshot, policy).verdicts if verdict.job == job)


def changed(row: PendingRow, change: Alternative) -> PendingRow:
    fields = dict(change.fields)
    if "pool" in fields:
        fields["pools"] = (fields.pop("pool"),)
    if "gpu_model" in fields:
        fields["task_requests"] = tuple(
            ask.change({"gpu_model": fields["gpu_model"]}) for ask in row.task_requests
        )
    return row.change(fields)


def offered(snapshot: Snapshot, job: str, policy: Policy = POLICY) -> list[Alternative]:
    """The changes that the verdict and the preview name; each must start the job, unless others start elsewhere."""
    row = next(row for row in snapshot.pending if row.job == job)
    plan = decide(snapshot, policy)
    found = list(preview_request(snapshot, policy, row).alternatives)
    if (suggestion := verdict_of(snapshot, job, policy).suggestion) is not None:
        found.append(suggestion)
    for change in found:
        others = (each for each in snapshot.pending if each is not row)
        then = decide(replace(snapshot, pending=(*others, changed(row, change))), policy)
        if {start for start in then.starts if start.job != job} == set(plan.starts):
            assert job in started(then), change
    return found


def reserved_for_a_gang(*more: PendingRow) -> Snapshot:
    """A gang of 2 x 4 GPUs waits for the end of a job on n0, and n1 is free for it; n2 and n3 are full."""
    return cluster(
        [node(f"n{i}", 4) for i in range(4)],
        [project("p")],
        running=[
            runs("short", "p", ("n0", range(4)), time_limit_s=HOUR_S, **FIRM),
            *(runs(f"long-{i}", "p", (f"n{i}", range(4)), **FIRM) for i in (2, 3)),
        ],
        pending=[waits("gang", "p", 4, tasks=2, age_s=1e5), *more],
    )


def test_gpus_that_are_reserved_for_a_gang_are_not_offered() -> None:
    late = waits("late", "p", 4, tasks=3, time_limit_s=24 * HOUR_S)
    assert offered(reserved_for_a_gang(late), "late") == []


def test_jobs_of_one_class_are_offered_what_their_own_time_limit_allows() -> None:
    rows = [waits(f"limit-{limit_s:g}", "p", 4, tasks=3, time_limit_s=limit_s) for limit_s in (600.0, 1e5)]
    for order in (rows, rows[::-1]):
        named = [replace(row, job=JobId(f"{i}{row.job}")) for i, row in enumerate(order)]
        snapshot = reserved_for_a_gang(*named)
        for row in named:
            kinds = {change.kind for change in offered(snapshot, row.job)}
            assert (AlternativeKind.FEWER_TASKS in kinds) == bool(kinds) == (row.time_limit_s == 600.0)


def test_the_shorter_limit_passes_all_reservations() -> None:
    """Two gangs wait for different ends; a limit before the later one would still delay the other."""
    snapshot = cluster(
        [node(f"n{i}", 4, model="A100" if i < 2 else "H100") for i in range(4)],
        [project("p")],
        running=[
            runs("late", "p", ("n0", range(4)), time_limit_s=10 * HOUR_S, **FIRM),
            runs("soon", "p", ("n2", range(4)), time_limit_s=2 * HOUR_S, **FIRM),
        ],
        pending=[
            waits("first", "p", 4, tasks=2, age_s=2e5, gpu_model="A100"),
            waits("second", "p", 4, tasks=2, age_s=1e5, gpu_model="H100"),
            waits("asked", "p", 4, tasks=2, allow_mixed_gpus=True),
            waits("half", "p", 4),
        ],
    )
    limits_s = {
        job: {change.fields.get("time_limit_s") for change in offered(snapshot, job)} - {None}
        for job in ("asked", "half")
    }
    assert [max(found) < 2 * HOUR_S for found in limits_s.values()] == [True, False], limits_s


def test_roles_are_offered_only_places_that_hold_all_of_them() -> None:
    """4 + 4 + 2 free GPUs hold 3 + 3 + 2 and 2 by their number, but the last two GPUs are on two nodes."""
    row = waits("roles", "p", 3, tasks=4, pools=("main",))
    asks = tuple(row.request._replace(gpus=count) for count in (3, 3, 2, 2))
    nodes = [node(f"n{i}", count, pool="other") for i, count in enumerate((4, 4, 2))]
    snapshot = cluster(
        [node("m0", 10), *nodes],
        [project("p")],
        running=[runs("all", "p", ("m0", range(10)), **FIRM)],
        pending=[replace(row, task_requests=asks)],
        pools=[PoolRow(PoolId("main"), "main"), PoolRow(PoolId("other"), "other")],
    )
    assert offered(snapshot, "roles") == []


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_a_node_that_one_job_avoids_for_a_while_can_never_run_another(names: tuple[str, str]) -> None:
    never, later = names
    avoid = {"avoid_nodes": ("n0",)}
    snapshot = cluster(
        [node("n0", 4)],
        [project("p")],
        pending=[waits(never, "p", **avoid, ineligible_nodes=("n0",)), waits(later, "p", **avoid)],
    )
    assert verdict_of(snapshot, never).code is VerdictCode.UNSATISFIABLE
    assert verdict_of(snapshot, later).code is VerdictCode.INSUFFICIENT_RESOURCES


def test_a_job_that_no_domain_can_ever_hold_is_offered_a_wider_one() -> None:
    rows = [node(f"n{i}", 4, labels=(("block", "a"), ("rack", str(i)))) for i in range(2)]
    near = TopologyConstraint("fabric", "rack")
    gang = waits("gang", "p", 4, tasks=2, topology_constraint=near)
    snapshot = replace(cluster(rows, [project("p")], pending=[gang]), topologies=(FABRIC,))
    verdict = verdict_of(snapshot, "gang")
    assert verdict.code is VerdictCode.UNSATISFIABLE and verdict.suggestion is not None
    assert verdict.suggestion.kind is AlternativeKind.RELAX_TOPOLOGY
    assert offered(snapshot, "gang")


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    phases=[Phase.generate],
)
@given(
    snapshot=crowded(),
    stays=st.lists(st.booleans(), min_size=12, max_size=12),
    limits_s=st.lists(st.sampled_from([None, HOUR_S, 10 * HOUR_S]), min_size=12, max_size=12),
)
def test_every_change_that_is_offered_starts_the_job(
    snapshot: Snapshot, stays: list[bool], limits_s: list[float | None]
) -> None:
    """On clusters with some free GPUs, and reservations for gangs and by administrators."""
    rows = zip(snapshot.running, stays, limits_s, strict=False)
    running = tuple(replace(row, time_limit_s=limit_s) for row, stay, limit_s in rows if stay)
    snapshot = replace(snapshot, nodes=counted(snapshot.nodes, running), running=running)
    waiting = {verdict.job for verdict in decide(snapshot, EAGER).verdicts}
    for row in snapshot.pending:
        if row.job in waiting:
            offered(snapshot, row.job, EAGER)


def test_previews_of_ever_new_requests_keep_a_bounded_cache() -> None:
    """A worker answers previews for weeks: what it keeps must not grow with their number."""
    memory = DecisionCache()
    snapshot = cluster([node("n0", 4)], [project("p")], running=[runs("long", "p", ("n0", range(4)), **FIRM)])
    kept = []
    for number in range(2 * MAX_VARIANT_LISTS + 10):
        request = waits("preview", "p", 1 + number % 4, cpu_milli=1 + number)
        assert not preview_request(snapshot, POLICY, request, memory).starts_now
        kept.append(len(memory.variants))
    assert 1 < max(kept) <= MAX_VARIANT_LISTS + 2
