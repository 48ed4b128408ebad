"""Runs the scheduling cases: decides on the cluster of a case and compares the state of every task.

``action`` cases are compared after one decision. ``integration`` cases run whole cycles: they are compared
after ``until_match`` cycles and again after each of ``after_match`` more, so that a plan undone by the next
one fails.

Jobs and tasks are compared by outcome, and by node where the case names one. Tasks expected in one GPU group
of a node must share a GPU if they fit on one (some cases name a group twice for two GPUs). Requested amounts,
messages and mock call counts are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from bench.conformance.case_cluster import CaseCluster, States, TaskState, next_states
from bench.conformance.case_result import CaseResult
from bench.conformance.format import Case
from scheduler.core.decide import decide
from scheduler.core.model.plan import Plan
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import WHOLE_MILLI, GpuShare, Snapshot
from scheduler.core.model.validation import SnapshotError

ACTION_NAMES = {
    "allocate": "allocate",
    "consolidation": "consolidate",
    "reclaim": "reclaim",
    "preempt": "preempt",
    "stalegangeviction": "stale_gangs",
}

STATE_OF_OUTCOME = {
    "start_now": "Binding",
    "start_when_victims_release": "Pipelined",
    "evicted": "Releasing",
    "keeps_running": "Running",
    "running": "Running",
    "pending": "Pending",
    "failed": "Failed",
    "succeeded": "Succeeded",
    "stuckinreleasing": "StuckInReleasing",
}
"""Task state of each outcome; ``terminating`` matches two states."""

PLACED = ("Binding", "Pipelined", "Running", "Releasing", "StuckInReleasing")
UNSUPPORTED = {
    "mig": "slices of a GPU",
    "dra": "resource claims",
    "numa": "NUMA zones",
    "pod_affinity": "affinity between pods",
    "custom_scheduler_conf": "its own scheduler configuration",
    "node_affinity": "node affinity of single tasks",
}


def run_case(case: Case, policy: Policy) -> CaseResult:
    """Run the case and compare; expectations are read only after the run."""
    actions = tuple(ACTION_NAMES[action] for action in case["actions"])
    policy = replace(policy, semantics=replace(policy.semantics, actions=actions))
    try:
        cluster = CaseCluster(case)
        states = cluster.initial_states()
        if case["suite"] == "action":
            snapshot = cluster.snapshot(states)
            plan = decide(snapshot, policy)
            states = apply(states, plan)
            wrong = [*_state_mismatches(case, states), *_node_mismatches(case, snapshot, plan)]
        else:
            wrong = _run_rounds(case, cluster, states, policy)
    except SnapshotError as error:
        return CaseResult(case["id"], False, "a decision", f"the snapshot is invalid: {error}")
    except Exception as error:  # a bug in the core fails this case only
        return CaseResult(case["id"], False, "a decision", f"{type(error).__name__}: {error}")
    return CaseResult(
        case["id"],
        not wrong,
        "; ".join(f"{name} {expected}" for name, expected, _ in wrong),
        "; ".join(f"{name} {got}" for name, _, got in wrong),
    )


def unsupported_reason(case: Case) -> str:
    """Return the features that a case needs and the scheduler lacks; "" when it is to be run."""
    if case["portable"]:
        return ""
    missing = [UNSUPPORTED[tag] for tag in case["tags"] if tag in UNSUPPORTED]
    return ", ".join(missing) or "marked as not portable"


def _run_rounds(case: Case, cluster: CaseCluster, states: States, policy: Policy) -> list[Mismatch]:
    """Run the cycles; return the mismatches of the first cycle that has any."""
    deleted = [task["id"] for job in cluster.jobs if job.get("delete_in_test") for task in job["tasks"]]
    rounds = case["rounds"]
    for cycle in range(1, rounds["until_match"] + rounds["after_match"] + 1):
        plan = decide(cluster.snapshot(states), policy)
        states = next_states(states, apply(states, plan), deleted)
        if cycle >= rounds["until_match"] and (wrong := list(_state_mismatches(case, states))):
            return [(f"[cycle {cycle}] {name}", expected, got) for name, expected, got in wrong]
    return []


def apply(states: Mapping[str, TaskState], plan: Plan) -> States:
    """Return the state of every task right after a plan."""
    after = dict(states)
    for eviction in plan.evictions:
        for task, state in states.items():
            job, _, rank = task.rpartition("-")
            reported = job == eviction.job and (not eviction.ranks or int(rank) in eviction.ranks)
            if reported and state.state == "Running":
                after[task] = replace(state, state="Releasing")
    for word, starts in (("Binding", plan.starts), ("Pipelined", plan.nominations)):
        for start in starts:
            for place in start.tasks:
                after[f"{start.job}-{place.rank}"] = TaskState(word, place.node, place.gpus)
    return after


# -- comparison -------------------------------------------------------------------------------------------

Mismatch = tuple[str, str, str]
"""A mismatch: name, expected, actual."""


def _state_mismatches(case: Case, states: Mapping[str, TaskState]) -> Iterator[Mismatch]:
    """Yield jobs and tasks with an unexpected outcome, then GPU groups that are split."""
    groups: dict[tuple[str, str], list[GpuShare]] = {}
    for name, expected, tasks in _expectations(case):
        off = [task for task in tasks if not _matches(states[task], expected)]
        if off:
            got = states[off[0]]
            yield name, _expected_text(expected), f"{got.state}{f' on {got.node}' if got.node else ''}"
            continue
        if not expected.get("ignore_gpu_group"):
            for task in tasks:
                for group, share in _grouped(states[task], expected):
                    groups.setdefault(group, []).append(share)
    for (node, number), shares in groups.items():
        uuids = sorted({share.uuid for share in shares})
        if len(uuids) > 1 and sum(share.milli for share in shares) <= WHOLE_MILLI:
            yield f"group {number} of {node}", "one GPU", ", ".join(uuids)


def _grouped(state: TaskState, expected: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], GpuShare]]:
    """Yield the GPU shares of a placed task with the node and expected group of each."""
    if state.node is not None and state.state in PLACED:
        shares = [gpu for gpu in state.gpus if gpu.milli < WHOLE_MILLI]
        for group, share in zip(expected.get("gpu_groups", ()), shares, strict=False):
            yield (state.node, group), share


def _expectations(case: Case) -> Iterator[tuple[str, Mapping[str, Any], list[str]]]:
    """Yield each expectation with the ids of its tasks."""
    tasks = {job["name"]: [task["id"] for task in job["tasks"]] for job in case["jobs"]}
    for job, expected in case["expected"]["jobs"].items():
        yield job, expected, tasks[job]
    for task, expected in case["expected"].get("tasks", {}).items():
        yield task, expected, [task]


def _matches(state: TaskState, expected: Mapping[str, Any]) -> bool:
    outcome = expected["outcome"]
    if outcome == "terminating":
        right = state.state in ("Releasing", "StuckInReleasing")
    else:
        right = state.state == STATE_OF_OUTCOME[outcome]
    node = expected.get("node")
    return right and (not node or state.state not in PLACED or state.node == node)


def _expected_text(expected: Mapping[str, Any]) -> str:
    node = expected.get("node")
    return f"{expected['status']}{f' on {node}' if node else ''}"


def _node_mismatches(case: Case, snapshot: Snapshot, plan: Plan) -> Iterator[Mismatch]:
    """Yield nodes whose idle or releasing GPUs differ right after the plan."""
    leaving = _releasing_milli(snapshot, plan)
    for name, expected in case["expected"].get("nodes", {}).items():
        node = next(node for node in snapshot.nodes if node.id == name)
        used = sum(gpu.used_milli for gpu in node.gpus) + _started_milli(plan.starts, name)
        got = {
            "idle_gpus": len(node.gpus) - used / WHOLE_MILLI,
            "releasing_gpus": (leaving.get(name, 0) - _started_milli(plan.nominations, name)) / WHOLE_MILLI,
        }
        for key, amount in got.items():
            if key in expected and expected[key] != amount:
                yield name, f"{key} {expected[key]}", f"{amount:g}"


def _releasing_milli(snapshot: Snapshot, plan: Plan) -> dict[str, int]:
    """Return the milli per node held by tasks that are stopping or evicted."""
    reported = {eviction.job: eviction.ranks for eviction in plan.evictions}
    leaving: dict[str, int] = {}
    for row in snapshot.running:
        for task in row.tasks:
            ranks = reported.get(row.job)
            if task.stopping or row.stopping or ranks == () or (ranks and task.rank in ranks):
                milli = sum(gpu.milli for gpu in task.gpus)
                leaving[task.node] = leaving.get(task.node, 0) + milli
    return leaving


def _started_milli(starts: Iterable[Any], node: str) -> int:
    return sum(
        gpu.milli for start in starts for task in start.tasks if task.node == node for gpu in task.gpus
    )
