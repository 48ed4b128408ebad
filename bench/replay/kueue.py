"""Kueue's performance scenario: workloads of many queues in cohorts that borrow unused quota.

The clock is simulated; each cycle advances it by its real duration. A workload runs for its time once
admitted, and restarts from the beginning when preempted. Time to admission counts to the last admission, as
in Kueue's recorder.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.replay.kueue_simulator import Cohorts, KueueSimulator, Workload
from bench.replay.tables import MAX_INTEGER, read_json
from scheduler.core.model.plan import Plan
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import JobId, Snapshot
from scheduler.incremental import EXPLAIN_INTERVAL_S, IncrementalDecider
from scheduler.replay.input_files import MalformedFileError

MAX_COHORTS = 100
MAX_QUEUES = 1_000
MAX_GPUS = 10_000
MAX_WORKLOADS = 1_000_000
ACTION_SWITCHES = {"reclaim_within_cohort": ("any", "reclaim"), "within_queue": ("lower_priority", "preempt")}
"""By field: the value that enables an action, and the action; "never" disables it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scenario", help="JSON: cohorts, queues_per_cohort, nominal_quota, workload_sets, ..."
    )


def run(arguments: argparse.Namespace) -> int:
    """Replay and print one JSON line; return 0. Raise MalformedFileError with the location in the file."""
    scenario = Scenario(arguments.scenario)
    sys.stderr.write(
        f"{scenario.cohorts.cohorts} cohorts of {scenario.cohorts.cohort_gpus} GPUs, "
        f"{len(scenario.workloads)} workloads\n"
    )
    simulator = KueueSimulator(
        scenario.cohorts, scenario.workloads, scenario.policy, _decide_with_explanations(IncrementalDecider())
    )
    never = simulator.run()
    sys.stdout.write(json.dumps(summarize(scenario, simulator, never)) + "\n")
    return 0


def _decide_with_explanations(decider: IncrementalDecider) -> Callable[[Snapshot, Policy], Plan]:
    """Return a decision function that writes verdicts as consecutive live cycles do: a batch now and then."""
    explained_s = -math.inf

    def decide(snapshot: Snapshot, policy: Policy) -> Plan:
        nonlocal explained_s
        plan = decider.decide(snapshot, policy)
        if decider.has_unexplained and snapshot.now_s - explained_s >= EXPLAIN_INTERVAL_S:
            decider.explain_next()
            explained_s = snapshot.now_s
        return plan

    return decide


def summarize(scenario: Scenario, simulator: KueueSimulator, never: set[JobId]) -> dict[str, Any]:
    """Return the metrics of one JSON line; times in seconds, a mean of nothing is None."""
    waits: dict[str, list[float]] = {each["class"]: [] for each in scenario.sets}
    for workload in scenario.workloads:
        if workload.job not in never:
            waits[workload.kind].append(simulator.admitted_s[workload.job] - workload.created_s)
    gpus = scenario.cohorts.cohorts * scenario.cohorts.cohort_gpus
    return {
        "wall_s": round(simulator.wall_s, 3),
        "floor_s": scenario.floor_s,
        "times_floor": round(simulator.wall_s / scenario.floor_s, 3) if scenario.floor_s else None,
        "decide_s": round(simulator.decide_s, 3),
        "commit_s": round(simulator.commit_s, 3),
        "mean_time_to_admission_s": {
            **{kind: _mean(each) for kind, each in waits.items()},
            "all": _mean([wait for each in waits.values() for wait in each]),
        },
        "usage_percent": round(100 * simulator.busy_gpu_s / (gpus * simulator.wall_s), 1)
        if simulator.wall_s
        else 0.0,
        "lost_gpu_s": round(simulator.lost_gpu_s, 1),
        "decisions": simulator.decisions,
        "decisions_cut_short": simulator.truncated_decisions,
        "longest_cycle_s": round(simulator.longest_cycle_s, 3),
        "preemptions": simulator.preemptions,
        "workloads": len(scenario.workloads),
        "never_admitted": len(never),
    }


class Scenario:
    """Content of a scenario file. ``floor_s``: the duration with an instant scheduler, if the file has it."""

    def __init__(self, path: str) -> None:
        self._path = path
        content = read_json(path)
        if not isinstance(content, dict):
            raise MalformedFileError(path, "$", "an object is expected")
        limit = content.get("borrowing_limit")
        self.cohorts = Cohorts(
            self._integer(content, "$", "cohorts", 1, MAX_COHORTS),
            self._integer(content, "$", "queues_per_cohort", 1, MAX_QUEUES),
            self._integer(content, "$", "nominal_quota", 0, MAX_GPUS),
            None if limit is None else self._integer(content, "$", "borrowing_limit", 0, MAX_GPUS),
        )
        if not 1 <= self.cohorts.cohort_gpus <= MAX_GPUS:
            message = f"the queues of a cohort have {self.cohorts.cohort_gpus} GPUs, not 1 to {MAX_GPUS}"
            raise MalformedFileError(path, "$.nominal_quota", message)
        self.policy = self._policy(content)
        self.sets = self._sets(content)
        self.workloads = self._workloads()
        floor = content.get("floor_with_an_instant_scheduler")
        self.floor_s: float | None = None
        if floor is not None:
            at = "$.floor_with_an_instant_scheduler"
            self.floor_s = self._number(self._object(floor, at), at, "wall_s", 1e-3)

    def _policy(self, content: dict[str, Any]) -> Policy:
        """Return the default policy without the actions that the scenario disables."""
        policy = Policy()
        for field, (word, action) in ACTION_SWITCHES.items():
            value = content.get(field, word)
            if value not in (word, "never"):
                raise MalformedFileError(self._path, f"$.{field}", f"{value!r} is not {word!r} or 'never'")
            if value == "never":
                actions = tuple(each for each in policy.semantics.actions if each != action)
                policy = replace(policy, semantics=replace(policy.semantics, actions=actions))
        return policy

    def _sets(self, content: dict[str, Any]) -> list[dict[str, Any]]:
        sets = content.get("workload_sets")
        if not isinstance(sets, list) or not sets:
            raise MalformedFileError(self._path, "$.workload_sets", "a list of workload sets is expected")
        total = 0
        for i, each in enumerate(sets):
            at = f"$.workload_sets[{i}]"
            self._object(each, at)
            if not isinstance(each.get("class"), str) or not each["class"]:
                raise MalformedFileError(self._path, f"{at}.class", "the name of a class is expected")
            if each["class"] == "all":
                raise MalformedFileError(self._path, f"{at}.class", "'all' is reserved for the mean over all")
            total += self._integer(each, at, "count", 0, MAX_WORKLOADS)
            self._number(each, at, "creation_interval_ms", 0.0)
            self._number(each, at, "run_time_ms", 0.0)
            self._integer(each, at, "priority", -MAX_INTEGER, MAX_INTEGER)
            self._integer(each, at, "gpus", 1, MAX_GPUS)
        if total * self.cohorts.cohorts * self.cohorts.queues_per_cohort > MAX_WORKLOADS:
            raise MalformedFileError(self._path, "$.workload_sets", f"more than {MAX_WORKLOADS} workloads")
        return sets

    def _workloads(self) -> list[Workload]:
        """Return the workloads of all sets and queues, the first after one interval."""
        return [
            Workload(
                JobId(f"{cohort:03}-{queue:03}-{number:03}-{i:06}"),
                each["class"],
                cohort,
                queue,
                (i + 1) * each["creation_interval_ms"] / 1000,
                each["run_time_ms"] / 1000,
                each["priority"],
                each["gpus"],
            )
            for cohort in range(self.cohorts.cohorts)
            for queue in range(self.cohorts.queues_per_cohort)
            for number, each in enumerate(self.sets)
            for i in range(each["count"])
        ]

    def _object(self, value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise MalformedFileError(self._path, at, "an object is expected")
        return value

    def _integer(self, where: dict[str, Any], at: str, field: str, low: int, high: int) -> int:
        value = where.get(field)
        if not isinstance(value, int) or isinstance(value, bool):
            raise MalformedFileError(self._path, f"{at}.{field}", _type_error(value, "whole number"))
        if not low <= value <= high:
            raise MalformedFileError(self._path, f"{at}.{field}", f"{value} is not between {low} and {high}")
        return value

    def _number(self, where: dict[str, Any], at: str, field: str, low: float) -> float:
        value = where.get(field)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise MalformedFileError(self._path, f"{at}.{field}", _type_error(value, "number"))
        if not low <= value <= MAX_INTEGER:
            raise MalformedFileError(
                self._path, f"{at}.{field}", f"{value} is not between {low:g} and {MAX_INTEGER}"
            )
        return float(value)


def _type_error(value: Any, kind: str) -> str:
    return "it is missing" if value is None else f"{repr(value)[:40]} is not a {kind}"


def _mean(values: list[float]) -> float | None:
    return round(statistics.fmean(values), 3) if values else None
