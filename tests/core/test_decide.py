"""Decisions on clusters drawn as tables: who starts where, and what the others are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from portal.domain.jobs.reasons import VerdictCode
from portal.domain.scheduling.throughput import Layout, LayoutSpeed
from scheduler.core.decide import decide, preview_request
from scheduler.core.model.apply_plan import apply_plan
from scheduler.core.model.plan import AlternativeKind, Plan, Verdict
from scheduler.core.model.policy import Policy, PolicyError
from scheduler.core.model.serialization import snapshot_from_json, snapshot_to_json
from scheduler.core.model.snapshot import (
    NodeId,
    PendingRow,
    PoolId,
    PoolRow,
    RunningRow,
    Snapshot,
    UsageRow,
    UserId,
)
from scheduler.core.model.validation import SnapshotError
from tests.core.cluster_builder import (
    MAIN,
    NOW_S,
    cluster,
    node,
    places,
    project,
    quota,
    release_stopping_jobs,
    runs,
    started,
    waits,
)
from tests.core.plan_rules import check_plan

POLICY = Policy()
VISION, NLP = project("vision", created_s=1.0), project("nlp", created_s=2.0)


def verdict(plan: Plan, job: str) -> Verdict:
    (found,) = (verdict for verdict in plan.verdicts if verdict.job == job)
    return found


# -- who starts ----------------------------------------------------------------------------------------------

ORDER = [
    (
        "higher priority goes first inside a project",
        cluster([node("n1", 1)], [VISION], pending=[
            waits("late", "vision", priority=100), waits("early", "vision", age_s=9)]),
        {"late"},
    ),
    (
        "the older of two equals goes first",
        cluster([node("n1", 1)], [VISION], pending=[
            waits("young", "vision", age_s=1), waits("old", "vision", age_s=2)]),
        {"old"},
    ),
    (
        "the person who used less goes first",
        cluster([node("n1", 1)], [VISION], usage=[UsageRow(VISION.id, MAIN, UserId("ada"), 5000.0)], pending=[
            waits("adas", "vision", age_s=9), waits("bobs", "vision", user=UserId("bob"))]),
        {"bobs"},
    ),
    (
        "a burst of one person pays at once",
        cluster([node("n1", 2)], [VISION], pending=[
            waits("a1", "vision", age_s=9), waits("a2", "vision", age_s=8),
            waits("b1", "vision", user=UserId("bob"))]),
        {"a1", "b1"},
    ),
    (
        "below the guarantee comes before higher project priority",
        cluster([node("n1", 1)], [VISION, NLP], [quota("vision", 1), quota("nlp", 0, priority=5)], pending=[
            waits("v", "vision"), waits("n", "nlp", age_s=9)]),
        {"v"},
    ),
    (
        "higher project priority comes before a lower share",
        cluster([node("n1", 2)], [VISION, NLP], [quota("nlp", priority=5)],
                running=[runs("r", "nlp", ("n1", [0]))],
                pending=[waits("v", "vision", age_s=9), waits("n", "nlp")]),
        {"n"},
    ),
    (
        "the lower dominant share counting the job goes first",
        cluster([node("n1", 4)], [VISION, NLP], running=[runs("r", "vision", ("n1", [0]))],
                pending=[waits("v", "vision", 3, age_s=9), waits("n", "nlp", 3)]),
        {"n"},
    ),
    (
        "a weight of 3 takes three of four GPUs",
        cluster([node("n1", 4)], [VISION, NLP], [quota("vision", weight=3), quota("nlp", weight=1)], pending=[
            *(waits(f"v{i}", "vision", age_s=i) for i in range(4)),
            *(waits(f"n{i}", "nlp", age_s=i) for i in range(4))]),
        {"v3", "v2", "v1", "n3"},
    ),
    (
        "a gang that does not fit lets a smaller job pass",
        cluster([node("n1", 2)], [VISION], pending=[
            waits("gang", "vision", 2, tasks=2, age_s=9), waits("small", "vision")]),
        {"small"},
    ),
    (
        "a limit of an ancestor holds for the children together",
        cluster([node("n1", 4)], [project("lab"), project("a", "lab"), project("b", "lab")],
                [quota("lab", limit=3)],
                pending=[waits("a1", "a", 2), waits("b1", "b", 2), waits("b2", "b", 1)]),
        {"a1", "b2"},
    ),
    (
        "work that nobody may take back fits inside the guarantee of every ancestor",
        cluster([node("n1", 4)], [project("lab"), project("a", "lab")], [quota("lab", 1), quota("a", 2)],
                pending=[waits("one", "a", preemptible=False, age_s=9),
                         waits("two", "a", preemptible=False)]),
        {"one"},
    ),
    (
        "jobs of a group stand beside its children",
        cluster([node("n1", 2)], [project("lab"), project("a", "lab")],
                pending=[waits("own", "lab"), waits("own2", "lab"), waits("childs", "a")]),
        {"own", "childs"},
    ),
    (
        "a job takes its second pool when the first is full",
        cluster([node("n1", 1), node("n2", 1, pool="spare")], [VISION],
                pools=[PoolRow(MAIN, "main"), PoolRow(PoolId("spare"), "spare")],
                running=[runs("r", "vision", ("n1", [0]))],
                pending=[waits("j", "vision", pools=(MAIN, PoolId("spare")))]),
        {"j"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("snapshot", "expected"), [row[1:] for row in ORDER], ids=[row[0] for row in ORDER])
def test_which_jobs_start(snapshot: Snapshot, expected: set[str]) -> None:
    assert started(decide(snapshot, POLICY)) == expected


# -- where ---------------------------------------------------------------------------------------------------

TWO = [node("n1"), node("n2")]
PLACES = [
    (
        "packing fills the node that is fuller",
        cluster(TWO, [VISION], running=[runs("r", "vision", ("n2", [0]))], pending=[waits("j", "vision")]),
        [("n2", 1)],
    ),
    (
        "spreading takes the emptier one",
        cluster(TWO, [VISION], pools=[PoolRow(MAIN, "main", "spread")],
                running=[runs("r", "vision", ("n1", [0]))], pending=[waits("j", "vision")]),
        [("n2", 1)],
    ),
    (
        "a gang that fits on one node stands on one node",
        cluster(TWO, [VISION], running=[runs("r", "vision", ("n1", [0]))],
                pending=[waits("j", "vision", 2, tasks=2)]),
        [("n2", 2), ("n2", 2)],
    ),
    (
        "a gang that does not stands on as few as possible",
        cluster([node("n1", 2), *[node(f"m{i}", 4) for i in range(2)]], [VISION],
                pending=[waits("j", "vision", 2, tasks=4)]),
        [("m0", 2), ("m0", 2), ("m1", 2), ("m1", 2)],
    ),
    (
        "the model decides",
        cluster([node("n1"), node("n2", model="H100")], [VISION],
                pending=[waits("j", "vision", gpu_model="H100")]),
        [("n2", 1)],
    ),
    (
        "a node to avoid is avoided",
        cluster(TWO, [VISION], pending=[waits("j", "vision", avoid_nodes=(NodeId("n1"),))]),
        [("n2", 1)],
    ),
    (
        "a home volume calls its job back",
        cluster(TWO, [VISION], pending=[waits("j", "vision", node_affinity=NodeId("n2"))]),
        [("n2", 1)],
    ),
    (
        "CPU and memory have to fit as well",
        cluster([node("n1", cpu_milli=500), node("n2")], [VISION], pending=[waits("j", "vision")]),
        [("n2", 1)],
    ),
    (
        "a job without GPUs leaves nodes with free GPUs alone",
        cluster([node("n1"), node("n2", 0)], [VISION], pending=[waits("j", "vision", 0)]),
        [("n2", 0)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("snapshot", "expected"), [row[1:] for row in PLACES], ids=[row[0] for row in PLACES]
)
def test_where(snapshot: Snapshot, expected: list[tuple[str, int]]) -> None:
    assert places(decide(snapshot, POLICY), "j") == expected


def test_shares_meet_on_the_fullest_gpu_and_never_pass_a_whole() -> None:
    jobs = [waits(f"j{i}", "vision", milli_per_gpu=400, age_s=9 - i) for i in range(3)]
    plan = decide(cluster([node("n1", 2)], [VISION], pending=jobs), POLICY)
    on = [start.tasks[0].gpus[0].uuid for start in plan.starts]
    assert on == ["n1-gpu0", "n1-gpu0", "n1-gpu1"]


def test_no_start_on_drained_silent_or_gpuless_nodes() -> None:
    lost = node("n3", 1)
    lost = replace(lost, gpus=tuple(replace(gpu, healthy=False) for gpu in lost.gpus))
    nodes = [node("n1", schedulable=False), node("n2", reachable=False), lost]
    plan = decide(cluster(nodes, [VISION], pending=[waits("j", "vision")]), POLICY)
    assert verdict(plan, "j").code is VerdictCode.INSUFFICIENT_RESOURCES


def test_a_cluster_out_of_service_is_reported() -> None:
    nodes = [node("n1", schedulable=False), node("n2", schedulable=False), node("n3", reachable=False)]
    plan = decide(cluster(nodes, [VISION], pending=[waits("j", "vision")]), POLICY)
    assert verdict(plan, "j").code is VerdictCode.INSUFFICIENT_RESOURCES
    says = "Needs 1 GPU; no node accepts jobs now: 2 are out of service, 1 is unreachable."
    assert verdict(plan, "j").message == says


def test_only_nodes_that_could_run_it_count() -> None:
    nodes = [node("n1", 2), node("n2", 8)]
    ineligible = {"avoid_nodes": (NodeId("n2"),), "ineligible_nodes": (NodeId("n2"),)}
    jobs = [waits("small", "vision", 2, **ineligible), waits("large", "vision", 4, **ineligible)]
    plan = decide(cluster(nodes, [VISION], pending=jobs), POLICY)
    assert places(plan, "small") == [("n1", 2)]
    assert verdict(plan, "large").code is VerdictCode.UNSATISFIABLE
    assert "largest node of this cluster has 2" in verdict(plan, "large").message
    alone = decide(cluster(nodes[1:], [VISION], pending=[waits("j", "vision", 1, **ineligible)]), POLICY)
    assert verdict(alone, "j").code is VerdictCode.UNSATISFIABLE
    assert verdict(alone, "j").message == (
        "No node of this cluster can run it: each lacks the runtime of its environment, has too old a driver, "
        "does not enforce the network policy of its project, or lacks a volume that it mounts "
        "or the image that its environment was saved as."
    )


def test_a_driver_too_old_for_the_image_is_reported_with_both_versions() -> None:
    nodes = [
        node("n1", 2, driver_cuda="12.2"),
        node("n2", 2, driver_cuda="12.10"),
        node("n3", 8, driver_cuda="11.8"),
        node("n4", 0),
    ]
    ineligible = (NodeId("n1"), NodeId("n3"))
    needs = {"required_cuda": "12.4", "avoid_nodes": ineligible, "ineligible_nodes": ineligible}
    jobs = [waits("first", "vision", 2, **needs), waits("second", "vision", 1, **needs)]
    plan = decide(cluster(nodes, [VISION], pending=jobs), POLICY)
    assert places(plan, "first") == [("n2", 2)]
    assert verdict(plan, "second").code is VerdictCode.INSUFFICIENT_RESOURCES
    assert verdict(plan, "second").message.endswith(
        " Its image needs CUDA 12.4: 2 nodes are skipped because their drivers support at most CUDA 12.2."
    )
    newer = needs | {
        "required_cuda": "13.0",
        "avoid_nodes": (*ineligible, NodeId("n2")),
        "ineligible_nodes": (*ineligible, NodeId("n2")),
    }
    plan = decide(cluster(nodes, [VISION], pending=[waits("j", "vision", 1, **newer)]), POLICY)
    assert verdict(plan, "j").code is VerdictCode.UNSATISFIABLE
    assert verdict(plan, "j").message == (
        "No node of this cluster can run it: its image needs CUDA 13.0, but the newest driver supports CUDA 12.10."
    )


# -- what the others are told ----------------------------------------------------------------------------------

BUSY = [runs("r1", "nlp", ("n1", [0, 1, 2])), runs("r2", "nlp", ("n2", [0]))]
HELD3 = [runs("r1", "nlp", ("n1", [0, 1, 2]))]
BIG = [node("n1", 8), node("n2", 8)]

SAID = [
    (
        cluster(BIG, [NLP], [quota("nlp", 0, 6)], running=HELD3, pending=[waits("j", "nlp", 5)]),
        VerdictCode.PROJECT_LIMIT,
        "Needs 5 GPUs. nlp uses 3 of its limit of 6.",
    ),
    (
        cluster(BIG, [NLP], [quota("nlp", 0, 6)], running=HELD3, pending=[waits("j", "nlp", 8)]),
        VerdictCode.PROJECT_LIMIT,
        "Needs 8 GPUs. nlp uses 3 of its limit of 6.",
    ),
    (
        cluster(BIG, [project("lab"), project("nlp", "lab")], [quota("lab", 0, 4)], running=HELD3,
                pending=[waits("j", "nlp", 2)]),
        VerdictCode.PROJECT_LIMIT,
        "Needs 2 GPUs. lab (which contains nlp) uses 3 of its limit of 4.",
    ),
    (
        cluster(BIG, [NLP], [quota("nlp", 2)], pending=[waits("j", "nlp", 4, preemptible=False)]),
        VerdictCode.NON_PREEMPTIBLE_OVER_QUOTA,
        "Needs 4 GPUs, which must be guaranteed because the job is not preemptible. "
        "nlp uses 0 of its guaranteed 2 for non-preemptible jobs.",
    ),
    (
        cluster(TWO, [NLP], running=BUSY, pending=[waits("j", "nlp", 4)]),
        VerdictCode.INSUFFICIENT_RESOURCES,
        "Needs 4 GPUs; 4 are free now, at most 3 on one node.",
    ),
    (
        cluster(TWO, [NLP], running=BUSY, pending=[waits("j", "nlp", 2, tasks=3)]),
        VerdictCode.INSUFFICIENT_RESOURCES,
        "Needs 3 × 2 GPUs; 4 are free now, at most 3 on one node: enough for 1 of its 3 tasks.",
    ),
    (
        cluster([node("n1", 2, cpu_milli=4_000)], [NLP], running=[runs("r", "nlp", ("n1", [0]))],
                pending=[waits("j", "nlp", cpu_milli=4_000)]),
        VerdictCode.INSUFFICIENT_RESOURCES,
        "Needs 1 GPU; 1 is free now, but no node has it together with 4 CPUs and 1 GiB.",
    ),
    (
        cluster([node("n1", 1)], [NLP], running=[runs("r", "nlp", ("n1", [0]), milli=600)],
                pending=[waits("j", "nlp", milli_per_gpu=500)]),
        VerdictCode.INSUFFICIENT_RESOURCES,
        "Needs 0.5 of a GPU; no GPU has 0.5 free now.",
    ),
    (
        cluster(TWO, [NLP], pending=[waits("j", "nlp", 9)]),
        VerdictCode.UNSATISFIABLE,
        "Needs 9 GPUs on one node; the largest node of this cluster has 4.",
    ),
    (
        cluster(TWO, [NLP], pending=[waits("j", "nlp", 4, tasks=3)]),
        VerdictCode.UNSATISFIABLE,
        "Needs 3 × 4 GPUs at once; this cluster can hold 2 of its 3 tasks.",
    ),
    (
        cluster(TWO, [NLP], pending=[waits("j", "nlp", gpu_model="H100")]),
        VerdictCode.UNSATISFIABLE,
        "Needs 1 H100 GPU; there is no H100 GPU in this cluster.",
    ),
    (
        cluster(TWO, [NLP], pending=[waits("j", "nlp", memory_mib=1_048_576)]),
        VerdictCode.UNSATISFIABLE,
        "Needs 1 GPU with 1 CPU and 1024 GiB on one node; no node of this cluster is that large.",
    ),
    (
        cluster(TWO, [NLP], pending=[waits("j", "nlp", held=True)]),
        VerdictCode.HELD,
        "Held until it is released.",
    ),
    (
        cluster(TWO, [NLP], pending=[waits("j", "nlp", not_before_s=NOW_S + 60)]),
        VerdictCode.BEGIN_TIME,
        "It must not start before 1970-01-12 13:47 UTC.",
    ),
    (
        cluster([node("n1", reachable=False)], [NLP], pending=[waits("j", "nlp", node_affinity=NodeId("n1"))]),
        VerdictCode.VOLUME_UNAVAILABLE,
        "Its home volume is on n1, which is unreachable.",
    ),
    (
        cluster(TWO, [NLP, VISION], running=[
                    runs("r1", "nlp", ("n1", [0, 1, 2, 3])),
                    runs("r2", "vision", ("n2", [0, 1, 2, 3]), preemptible=False)],
                pending=[waits("j", "nlp", 1)]),
        VerdictCode.OVER_FAIR_SHARE,
        "Needs 1 GPU; none is free now. "
        "nlp holds 4 of its fair share of 4; with this job it would hold 5, so no other project releases GPUs for "
        "it. It starts when enough are free.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("snapshot", "code", "message"), SAID, ids=[f"{i}-{row[1]}" for i, row in enumerate(SAID)]
)
def test_verdict_texts(snapshot: Snapshot, code: VerdictCode, message: str) -> None:
    said = verdict(decide(snapshot, POLICY), "j")
    assert (said.code, said.message) == (code, message)


def test_verdict_parameters_match_the_text() -> None:
    said = verdict(decide(cluster(TWO, [NLP], running=BUSY, pending=[waits("j", "nlp", 4)]), POLICY), "j")
    assert said.details == {
        "needed_gpus": 4.0, "free_gpus": 4, "largest_free_gpus": 3, "tasks_possible": 0, "used_gpus": 4.0,
        "fair_share_gpus": 8.0, "pool": "main", "nodes_with_1_free": 1, "nodes_with_3_free": 1,
        "jobs_ahead": 0,
    }  # fmt: skip


def test_jobs_ahead_are_listed_in_order() -> None:
    full = [runs("r", "nlp", ("n1", [0, 1, 2, 3]))]
    jobs = [waits(f"j{i}", "nlp", age_s=9 - i) for i in range(3)]
    plan = decide(cluster([node("n1")], [NLP], running=full, pending=jobs), POLICY)
    assert [verdict(plan, f"j{i}").jobs_ahead for i in range(3)] == [(), ("j0",), ("j0", "j1")]


CHANGES = [
    ("fewer GPUs", waits("j", "nlp", 4), AlternativeKind.FEWER_GPUS, {"gpus_per_task": 3}),
    ("fewer tasks", waits("j", "nlp", 3, tasks=2), AlternativeKind.FEWER_TASKS, {"tasks": 1}),
    (
        "another model",
        waits("j", "nlp", 4, gpu_model="A100"),
        AlternativeKind.OTHER_MODEL,
        {"gpu_model": "H100"},
    ),
]


@pytest.mark.parametrize(("job", "kind", "fields"), [row[1:] for row in CHANGES], ids=[r[0] for r in CHANGES])
def test_the_cheapest_change_would_start_it(job, kind, fields) -> None:
    nodes = [*TWO, node("n3", 4 if job.request.constraints.gpu_model else 0, model="H100")]
    snapshot = cluster(nodes, [NLP], running=BUSY, pending=[job])
    change = verdict(decide(snapshot, POLICY), "j").suggestion
    assert change is not None
    assert (change.kind, change.fields) == (kind, fields)
    assert preview_request(snapshot, POLICY, job.change(fields)).starts_now


# -- questions ---------------------------------------------------------------------------------------------------


def test_would_start_answers_now_later_or_never() -> None:
    snapshot = cluster(TWO, [NLP], running=BUSY)
    assert preview_request(snapshot, POLICY, waits("q", "nlp", 3)).starts_now
    later = preview_request(snapshot, POLICY, waits("q", "nlp", 4))
    assert not later.starts_now and not later.is_unsatisfiable
    assert [change.kind for change in later.alternatives] == [AlternativeKind.FEWER_GPUS]
    assert preview_request(snapshot, POLICY, waits("q", "nlp", 5)).is_unsatisfiable


# -- bad input -----------------------------------------------------------------------------------------------------

SOUND = cluster(TWO, [NLP], [quota("nlp", 1)], running=BUSY, pending=[waits("j", "nlp")])
FASTER_THAN_ALL = LayoutSpeed(Layout("h200", 1, 1, 0), 120)
BROKEN = [
    ("now_s", replace(SOUND, now_s=float("nan"))),
    ("nodes[n1].cpu_milli", replace(SOUND, nodes=(replace(SOUND.nodes[0], cpu_milli=-1), *SOUND.nodes[1:]))),
    ("nodes[n1].pool", replace(SOUND, nodes=(replace(SOUND.nodes[0], pool=PoolId("x")), *SOUND.nodes[1:]))),
    ("nodes[n1]", replace(SOUND, nodes=(*SOUND.nodes, node("n1", 0)))),
    (
        "nodes[n1].gpus[n1-gpu0].used_milli",
        replace(SOUND, nodes=(replace(SOUND.nodes[0], gpus=node("n1").gpus), *SOUND.nodes[1:])),
    ),
    ("projects[nlp].parent", replace(SOUND, projects=(project("nlp", "gone"),))),
    ("projects[a].parent", replace(SOUND, projects=(NLP, project("a", "b"), project("b", "a")))),
    ("quotas[nlp,main].weight", replace(SOUND, quotas=(quota("nlp", weight=-1.0),))),
    ("quotas[nlp,main]", replace(SOUND, quotas=(quota("nlp"), quota("nlp")))),
    ("running[r].tasks[0].gpus", cluster(TWO, [NLP], running=[runs("r", "nlp", ("n1", [7]))])),
    ("jobs[j]", replace(SOUND, pending=(waits("j", "nlp"), waits("j", "nlp")))),
    ("pending[j].tasks", replace(SOUND, pending=(waits("j", "nlp", tasks=0),))),
    ("pending[j].milli_per_gpu", replace(SOUND, pending=(waits("j", "nlp", milli_per_gpu=1001),))),
    ("pending[j].project", replace(SOUND, pending=(waits("j", "gone"),))),
    (
        "pending[j].layout_speeds",
        replace(SOUND, pending=(waits("j", "nlp", layout_speeds=(FASTER_THAN_ALL,)),)),
    ),
]


@pytest.mark.parametrize(("field", "snapshot"), BROKEN, ids=[row[0] for row in BROKEN])
def test_an_invalid_snapshot_is_refused_by_field(field: str, snapshot: Snapshot) -> None:
    with pytest.raises(SnapshotError) as refusal:
        decide(snapshot, POLICY)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"now_s"', '"then_s"', "snapshot.then_s"),
        ('"request": [1, 1000, 1000', '"request": [1, 1000, "1000"', "snapshot.pending[0].request[2]"),
        ('"format": 2', '"format": 99', "format"),
        ("{", "[", "(text)"),
    ],
)
def test_an_invalid_saved_snapshot_is_refused_by_field(old: str, new: str, field: str) -> None:
    text = snapshot_to_json(replace(SOUND, running=()))
    assert old in text
    with pytest.raises(SnapshotError) as refusal:
        snapshot_from_json(text.replace(old, new))
    assert refusal.value.field == field


def test_a_setting_out_of_range_is_refused_by_name() -> None:
    with pytest.raises(PolicyError) as refusal:
        Policy(usage_half_life_s=1.0)
    assert refusal.value.field == "usage_half_life_s"


# -- making room -----------------------------------------------------------------------------------------------

BORROWED = [runs("old", "vision", ("n1", [0, 1]), started_s=NOW_S - 900),
            runs("young", "vision", ("n1", [2, 3]), started_s=NOW_S - 60)]  # fmt: skip

ROOM = [
    (
        "a project under its guarantee takes back what others borrowed, least lost work first",
        cluster([node("n1")], [VISION, NLP], [quota("nlp", 2)], running=BORROWED,
                pending=[waits("j", "nlp", 2)]),
        {("young", "reclaimed")},
    ),
    (
        "a checkpoint makes an old job the cheaper one to ask",
        cluster([node("n1")], [VISION, NLP], [quota("nlp", 2)],
                running=[replace(BORROWED[0], checkpoint_s=NOW_S - 1), BORROWED[1]],
                pending=[waits("j", "nlp", 2)]),
        {("old", "reclaimed")},
    ),
    (
        "work inside a guarantee is never taken",
        cluster([node("n1")], [VISION, NLP], [quota("nlp", 2), quota("vision", 4)], running=BORROWED,
                pending=[waits("j", "nlp", 2)]),
        set(),
    ),
    (
        "work that is not preemptible is never taken",
        cluster([node("n1")], [VISION, NLP], [quota("nlp", 2)],
                running=[replace(row, preemptible=False) for row in BORROWED],
                pending=[waits("j", "nlp", 2)]),
        set(),
    ),
    (
        "nobody takes more than the fair share",
        cluster([node("n1")], [VISION, NLP], running=BORROWED, pending=[waits("j", "nlp", 3)]),
        set(),
    ),
    (
        "equal weights meet in the middle",
        cluster([node("n1")], [VISION, NLP], running=BORROWED, pending=[waits("j", "nlp", 2)]),
        {("young", "reclaimed")},
    ),
    (
        "higher priority takes from lower inside a project",
        cluster([node("n1")], [VISION], running=BORROWED, pending=[waits("j", "vision", 1, priority=100)]),
        {("young", "preempted")},
    ),
    (
        "equal priority takes nothing inside a project",
        cluster([node("n1")], [VISION], running=BORROWED, pending=[waits("j", "vision", 1)]),
        set(),
    ),
    (
        "a limit is no reason to wait behind lower priority of one's own",
        cluster([node("n1"), node("n2")], [VISION], [quota("vision", 0, 4)], running=BORROWED,
                pending=[waits("j", "vision", 2, priority=100)]),
        {("young", "preempted")},
    ),
    (
        "who is not needed stays",
        cluster([node("n1"), node("n2")], [VISION, NLP], [quota("nlp", 4)],
                running=[runs("a", "vision", ("n1", [0]), started_s=NOW_S - 10),
                         runs("b", "vision", ("n2", [0, 1, 2, 3]), started_s=NOW_S - 20),
                         runs("c", "vision", ("n1", [1, 2, 3]), started_s=NOW_S - 10)],
                pending=[waits("j", "nlp", 4)]),
        {("a", "reclaimed"), ("c", "reclaimed")},
    ),
    (
        "a gang takes from several nodes",
        cluster(TWO, [VISION, NLP], [quota("nlp", 4)],
                running=[runs("a", "vision", ("n1", [0, 1, 2, 3])), runs("b", "vision", ("n2", [0, 1])),
                         runs("c", "vision", ("n2", [2, 3]), preemptible=False)],
                pending=[waits("j", "nlp", 2, tasks=2)]),
        {("a", "reclaimed")},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("snapshot", "leave"), [row[1:] for row in ROOM], ids=[row[0] for row in ROOM])
def test_which_jobs_are_preempted(snapshot: Snapshot, leave: set[tuple[str, str]]) -> None:
    plan = decide(snapshot, POLICY)
    assert {(e.job, e.reason.value) for e in plan.evictions} == leave
    assert all(e.for_job == "j" for e in plan.evictions)
    assert (verdict(plan, "j").code is VerdictCode.WAITING_FOR_EVICTION) == bool(leave)


def test_the_preemptor_starts_on_the_reserved_nodes() -> None:
    snapshot = cluster([node("n1")], [VISION, NLP], [quota("nlp", 3)], running=[
        runs("r", "vision", ("n1", [0, 1, 2]))], pending=[waits("j", "nlp", 3)])  # fmt: skip
    first = decide(snapshot, POLICY)
    kept = "Needs 3 GPUs, reserved for it; it starts when a job of another project has stopped."
    assert verdict(first, "j").message == kept  # whoever reads it may not see jobs of vision
    leaving = apply_plan(snapshot, first)
    newcomer = replace(leaving, pending=(*leaving.pending, waits("small", "vision")))
    between = decide(newcomer, POLICY)
    assert started(between) == {"small"}  # the fourth GPU is not needed by j
    greedy = replace(leaving, pending=(*leaving.pending, waits("big", "vision", 2)))
    assert started(decide(greedy, POLICY)) == set()
    released = release_stopping_jobs(leaving)
    assert started(decide(released, POLICY)) == {"j"}
    first_in_order = waits("urgent", "nlp", 3, priority=99, age_s=9.0)
    late = replace(released, pending=(*released.pending, first_in_order))
    assert started(decide(late, POLICY)) == {"j"}
    forgotten = replace(late, pending=tuple(replace(row, nominated_tasks=()) for row in late.pending))
    assert started(decide(forgotten, POLICY)) == {"urgent"}  # so the promise is what decides
    cancelled = replace(late, pending=(first_in_order,))
    assert started(decide(cancelled, POLICY)) == {"urgent"}


def test_an_edited_quota_reorders_the_queue() -> None:
    def plan(guaranteed: float) -> Plan:
        return decide(
            cluster([node("n1")], [VISION, NLP], [quota("vision", 2), quota("nlp", guaranteed)],
                    running=BORROWED, pending=[waits("j", "nlp", 2)], usage=[
                        UsageRow(NLP.id, MAIN, None, 4e6)]),
            POLICY,
        )  # fmt: skip

    assert plan(0).evictions == ()
    assert [e.job for e in plan(2).evictions] == ["young"]


def _two_nodes(guaranteed: float, running: list[RunningRow], pending: list[PendingRow]) -> Snapshot:
    projects = [project(name, created_s=at) for at, name in enumerate(("a", "b", "c"))]
    quotas = [quota("a", 0, 4, weight=0), quota("c", guaranteed, weight=0)]
    return cluster([node("n0"), node("n1")], projects, quotas, running=running, pending=pending)


STANDS = [
    (
        "places stay free for nobody whose bound opens only when a third has left",
        _two_nodes(2, [runs("low", "a", ("n0", range(3)), priority=25),
                       runs("going", "c", ("n0", [3]), preemptible=False, stopping=True)],
                   [waits("j0", "a"), waits("j1", "a"),
                    waits("firm", "c", 4, milli_per_gpu=500, priority=25, preemptible=False)]),
    ),
    (
        "a gang for which one place was made keeps that place, and takes the other from nobody above it",
        cluster([node("n0"), node("n1")], [project("a"), project("b", created_s=1.0)], [quota("a", weight=0)],
                running=[runs("going", "a", ("n0", range(2)), preemptible=False, stopping=True),
                         runs("firm", "a", ("n1", range(3)), preemptible=False),
                         runs("low", "a", ("n1", [3]), priority=25)],
                pending=[waits("pair", "b", tasks=2, priority=25), waits("wide", "b", 3)]),
    ),
    (
        "one who leaves for its project's share, while the winner starts elsewhere",
        cluster([node("n0"), node("n1")], [project("a"), project("b", created_s=1.0), project("c")],
                [quota("c", weight=2)],
                running=[runs("low", "b", ("n1", [0]), priority=25),
                         runs("firm", "c", ("n1", range(1, 4)), preemptible=False)],
                pending=[waits("wide", "b", 3), waits("other", "c", 3, priority=25),
                         waits("pair", "b", tasks=2, priority=25)]),
    ),
]  # fmt: skip


@pytest.mark.parametrize("snapshot", [case[1] for case in STANDS], ids=[case[0] for case in STANDS])
def test_a_plan_can_be_applied(snapshot: Snapshot) -> None:
    plan = decide(snapshot, POLICY)
    check_plan(snapshot, plan)
    again = decide(apply_plan(snapshot, plan), POLICY)
    assert (again.starts, again.evictions) == ((), ())


OTHER = PoolRow(PoolId("other"), "other")
ROOMY = {"cpu_milli": 64_000, "memory_mib": 65_536}
"""What each of the jobs that ask for 8 GPUs below needs of CPU and memory."""
OFFERED: dict[str, tuple[Snapshot, AlternativeKind, dict[str, object], str]] = {
    "one GPU is free here, four in another pool": (
        cluster(
            [node("n1", 8), node("n2", 8, pool="other")], [NLP], pools=[PoolRow(MAIN, "main"), OTHER],
            running=[runs("a", "nlp", ("n1", range(7)), preemptible=False),
                     runs("b", "nlp", ("n2", range(4)), preemptible=False, pool=OTHER.id)],
            pending=[waits("j", "nlp", 8, **ROOMY)],
        ),
        AlternativeKind.FEWER_GPUS,
        {"gpus_per_task": 4, "cpu_milli": 32_000, "memory_mib": 32_768, "pool": "other"},
        "with 4 GPUs instead of 8 and with 32 CPUs and 32 GiB of memory, in the pool other",
    ),
    "CPU in proportion to fewer GPUs": (
        cluster([node("n1", 8)], [NLP], running=[runs("a", "nlp", ("n1", range(7)), preemptible=False)],
                pending=[waits("j", "nlp", 8, **ROOMY)]),
        AlternativeKind.FEWER_GPUS,
        {"gpus_per_task": 1, "cpu_milli": 8_000, "memory_mib": 8_192},
        "with 1 GPU instead of 8 and with 8 CPUs and 8 GiB of memory",
    ),
    "less CPU": (
        cluster([node("n1", 8, cpu_milli=64_000)], [NLP],
                running=[runs("a", "nlp", ("n1", range(4)), preemptible=False)],
                pending=[waits("j", "nlp", 4, cpu_milli=64_000)]),
        AlternativeKind.FEWER_CPUS,
        {"cpu_milli": 32_000},
        "with 32 CPUs instead of 64",
    ),
    "less memory": (
        cluster([node("n1", 8)], [NLP], running=[runs("a", "nlp", ("n1", range(4)), preemptible=False)],
                pending=[waits("j", "nlp", 4, memory_mib=512_000)]),
        AlternativeKind.FEWER_CPUS,
        {"memory_mib": 250 * 1024},
        "with 250 GiB of memory instead of 500 GiB",
    ),
    "another model with fewer GPUs": (
        cluster([node("n1", 4), node("n2", 4, model="H100")], [NLP],
                running=[runs("a", "nlp", ("n1", range(4)), preemptible=False),
                         runs("b", "nlp", ("n2", range(2)), preemptible=False)],
                pending=[waits("j", "nlp", 4, gpu_model="A100")]),
        AlternativeKind.FEWER_GPUS,
        {"gpus_per_task": 2, "gpu_model": "H100"},
        "with H100 instead of A100, with 2 GPUs instead of 4",
    ),
    "more tasks of fewer GPUs": (
        cluster(
            [node("n1", 6), node("n2", 6)], [NLP],
            running=[runs("a", "nlp", ("n1", range(3)), preemptible=False),
                     runs("b", "nlp", ("n2", range(2)), preemptible=False)],
            pending=[waits("j", "nlp", 6, launcher="torchrun", cpu_milli=6_000, memory_mib=6_144)],
        ),
        AlternativeKind.OTHER_SHAPE,
        {"tasks": 2, "gpus_per_task": 3, "cpu_milli": 3_000, "memory_mib": 4_096},
        "as 2 tasks of 3 GPUs each",
    ),
    "less CPU for each task": (
        cluster([node("n1", 4), node("n2", 4)], [NLP],
                running=[runs("a", "nlp", ("n1", range(4)), preemptible=False)],
                pending=[waits("j", "nlp", 1, tasks=4, cpu_milli=32_000)]),
        AlternativeKind.FEWER_CPUS,
        {"cpu_milli": 16_000},
        "with 16 CPUs instead of 32",
    ),
    "the start of an elastic job": (
        cluster([node("n1", 4)], [NLP], running=[runs("a", "nlp", ("n1", range(2)), preemptible=False)],
                pending=[waits("j", "nlp", 1, tasks=4, min_tasks=3)]),
        AlternativeKind.FEWER_TASKS,
        {"min_tasks": 2},
        "with 2 tasks to start instead of 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("snapshot", "kind", "fields", "text"), OFFERED.values(), ids=OFFERED.keys())
def test_a_change_that_starts_a_job_is_offered(
    snapshot: Snapshot, kind: AlternativeKind, fields: dict[str, object], text: str
) -> None:
    """The changed request starts indeed: the same decision with it has no verdict for the job."""
    change = verdict(decide(snapshot, POLICY), "j").suggestion
    assert change is not None
    assert (change.kind, change.fields, change.change) == (kind, fields, text)
    (row,) = snapshot.pending
    changed = dict(change.fields)
    if pool := changed.pop("pool", None):
        changed["pools"] = (pool,)
    plan = decide(replace(snapshot, pending=(row.change(changed),)), POLICY)
    assert [start.job for start in plan.starts] == ["j"]
