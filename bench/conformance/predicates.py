"""Runs the predicate cases, each against the rule of the core that it tests.

Amounts keep the units of the case, because rules only compare amounts of one resource. Absent means 0, -1
unlimited.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from bench.conformance.case_result import CaseResult
from bench.conformance.format import Case, table_of
from scheduler.core.model.resources import UNBOUNDED, ZERO, Entitlement, ResourceVector, build_entitlement
from scheduler.core.model.snapshot import PoolId, ProjectId, QuotaRow, UserId
from scheduler.core.shares.quota_ledger import PoolLedger
from scheduler.core.shares.reclaim_rules import (
    ReclaimCheck,
    is_over_share,
    may_reclaim,
    may_reclaim_from,
)
from scheduler.core.shares.sibling_order import sibling_key

DEFAULT_GPU_MIB = 100
"""GPU memory where a case gives none (KAI-Scheduler's default)."""

ORDER_OF_ORIGIN = (("cpu", 1), ("memory", 2), ("gpu", 0))
"""The first exceeded resource that KAI-Scheduler names, with its index in ``ResourceVector``."""

Data = Mapping[str, Any]


def run_case(case: Case) -> CaseResult:
    data = case["data"]
    if case["kind"] == "table":
        table = table_of(data) or ""
        got: Any = TABLES[table](data)
        expected: Any = _expected_of_table(table, data)
    else:
        got = (_reclaimable if case["kind"] == "reclaimable" else _filter_victim)(data)
        expected = case["expected"]
    return CaseResult(case["id"], got == expected, str(expected), str(got))


def _expected_of_table(table: str, data: Data) -> Any:
    if table == "reclaimerInfo":
        return data["canReclaim"]
    if table == "reclaimeeQueue":
        return data["expected"]
    if table == "maxAllowed":
        return data["isOverMaxAllowed"], data.get("resourceName", "")
    if table == "allocatedNonPreemptible":
        return data["expectedResult"], data.get("resource", "")
    return data["expectedResult"]


# -- reclaim --------------------------------------------------------------------------------------------


def _can_reclaim(data: Data) -> bool:
    owed, held, firm = _queue_state(data["queue"])
    reclaimer = data["reclaimerInfo"]
    return may_reclaim(owed, held, firm, _amounts(reclaimer["RequiredResources"]), reclaimer["IsPreemptable"])


def _strategy(data: Data) -> bool:
    """Check one reason: victim over its share, or (with a request) reclaimer within its guarantee."""
    taker, taker_held, _ = _queue_state(data["reclaimerQueue"])
    giver, giver_held, _ = _queue_state(data["reclaimeeQueue"])
    if "reclaimerResources" not in data:
        return is_over_share(giver, giver_held)
    unbounded = giver._replace(entitled=UNBOUNDED)  # disables the first reason
    return may_reclaim_from(unbounded, giver_held, taker, taker_held, _amounts(data["reclaimerResources"]))


def _reclaimable(data: Data) -> bool:
    taking = _taking(data)
    for victim in data["victims"]:
        if not taking.allows(victim["queue"]):
            return False
        taking.add_victim(victim["queue"], _sum(_amounts(task) for task in victim["tasks"]))
    return taking.is_balanced()


def _filter_victim(data: Data) -> bool:
    if data["reclaimer"] is None:
        return True
    return _taking(data).may_have_reclaimable(data["victim_queue"])


def _taking(data: Data) -> ReclaimCheck[str]:
    queues, reclaimer = data["queues"], data["reclaimer"]
    owed, held, firm = _queue_states(queues)
    return ReclaimCheck(
        _paths(queues),
        owed,
        held,
        firm,
        reclaimer["Queue"],
        _amounts(reclaimer["RequiredResources"]),
        reclaimer["IsPreemptable"],
    )


# -- order ------------------------------------------------------------------------------------------------


def _queue_order(data: Data) -> int:
    """Return -1 when the left queue goes first, 1 when the right one does or they are equal."""
    capacity = _amounts(data.get("totalResources", {}))
    gpu_mib = data.get("minNodeGPUMemory") or DEFAULT_GPU_MIB
    keys = []
    for side in ("l", "r"):
        queue = data[f"{side}queue"]
        owed, held, _ = _queue_state(queue)
        job = data.get(f"{side}JobInfo") or {"tasks": ()}
        leaving = [task for victim in data.get(f"{side}Victims") or () for task in victim["tasks"]]
        keys.append(
            sibling_key(
                "",
                owed,
                held,
                _sum(_order_task(task, gpu_mib) for task in job["tasks"]),
                capacity,
                _sum(_order_task(task, gpu_mib) for task in leaving),
            )
        )
    return -1 if keys[0] < keys[1] else 1


def _order_task(task: Data, gpu_mib: float) -> ResourceVector:
    shares = task.get("devices", 1) * task.get("gpu_memory_mib", 0) / gpu_mib
    return ResourceVector(task.get("gpu", 0) + shares, task.get("cpu_millis", 0), task.get("memory", 0))


# -- limits and guarantees --------------------------------------------------------------------------------


def _over_limit(data: Data) -> tuple[bool, str]:
    return _first_over(_amounts(data["maxAllowed"]), _amounts(data["allocated"]), data)


def _over_guarantee(data: Data) -> tuple[bool, str]:
    return _first_over(_amounts(data["deserved"]), _amounts(data["allocatedNonPreemptible"]), data)


def _first_over(bound: ResourceVector, held: ResourceVector, data: Data) -> tuple[bool, str]:
    """Return whether the request exceeds ``bound``, and the resource that KAI-Scheduler would name."""
    owed = build_entitlement(UNBOUNDED, ResourceVector(*map(_bound, bound)), UNBOUNDED)
    ledger = _ledger({"": ("",)}, {"": owed}, {"": held}, {"": ZERO})
    asked = _amounts(data["requestedQuota"])
    for name, i in ORDER_OF_ORIGIN:
        alone = ResourceVector(*(asked[n] if n == i else 0 for n in (0, 1, 2)))
        if ledger.exceeded_limit(ProjectId(""), alone):
            return True, name
    return False, ""


def _ledger(
    paths: Mapping[str, tuple[str, ...]],
    owed: Mapping[str, Entitlement],
    held: Mapping[str, ResourceVector],
    firm: Mapping[str, ResourceVector],
) -> PoolLedger:
    quotas = {ProjectId(key): QuotaRow(ProjectId(key), PoolId(""), 0, None) for key in paths}
    ledger = PoolLedger(quotas, {ProjectId(key): tuple(map(ProjectId, path)) for key, path in paths.items()})
    ledger.has_cpu_or_memory_quota = True
    ledger.limit = {ProjectId(key): each.limit for key, each in owed.items()}
    ledger.guaranteed = {ProjectId(key): each.guaranteed for key, each in owed.items()}
    ledger.held.update({ProjectId(key): each for key, each in held.items()})
    ledger.held_non_preemptible.update({ProjectId(key): each for key, each in firm.items()})
    return ledger


def _capacity(data: Data) -> bool:
    """Return True when the job may start.

    A table with ``requestedShare`` tests one bound: limits where there are any, otherwise guarantees. A table
    with tasks tests both.
    """
    job, queues = data["job"], data["queues"]
    owed, held, firm = _queue_states(queues)
    preemptible = job.get("Preemptibility", "") == "preemptible"
    if "requestedShare" in data:
        asked = _amounts(data["requestedShare"])
        if any("limit" in queue.get(r, {}) for queue in queues.values() for r in ("gpu", "cpu", "memory")):
            preemptible = True
        else:
            owed = {key: each._replace(limit=UNBOUNDED) for key, each in owed.items()}
    else:
        gpu_mib = data.get("maxNodeGPUMemory") or DEFAULT_GPU_MIB
        tasks = [task for group in job.get("PodSets", {}).values() for task in _next_tasks(group)]
        asked = _sum(_capacity_task(task, gpu_mib) for task in tasks)
    ledger = _ledger(_paths(queues), owed, held, firm)
    return not ledger.is_blocked(ProjectId(job["Queue"]), UserId(""), asked, preemptible)


def _next_tasks(group: Data) -> list[Data]:
    """Return the tasks that start next: those missing for the minimum, or one beyond it."""
    waiting = [task for task in group["tasks"] if task["Status"] == "Pending"]
    lacking = group.get("min_available", len(group["tasks"])) - (len(group["tasks"]) - len(waiting))
    return waiting[: max(1, lacking)]


def _capacity_task(task: Data, gpu_mib: float) -> ResourceVector:
    amounts = _amounts(task.get("ResReqVector", {}))
    if task.get("ResourceRequestType") == "gpu_memory":
        asked = task.get("GpuRequirement", {})
        return amounts._replace(gpu_milli=asked.get("devices", 1) * asked.get("gpu_memory_mib", 0) / gpu_mib)
    return amounts


TABLES: dict[str, Callable[[Data], Any]] = {
    "reclaimerInfo": _can_reclaim,
    "reclaimeeQueue": _strategy,
    "lqueue": _queue_order,
    "maxAllowed": _over_limit,
    "allocatedNonPreemptible": _over_guarantee,
    "job": _capacity,
}


# -- amounts of a case ------------------------------------------------------------------------------------


def _queue_states(
    queues: Data,
) -> tuple[dict[str, Entitlement], dict[str, ResourceVector], dict[str, ResourceVector]]:
    owed, held, firm = {}, {}, {}
    for key, queue in queues.items():
        owed[key], held[key], firm[key] = _queue_state(queue)
    return owed, held, firm


def _queue_state(queue: Data) -> tuple[Entitlement, ResourceVector, ResourceVector]:
    """Return a queue's entitlement, what it holds, and the non-preemptible part of that."""

    def each(name: str) -> ResourceVector:
        return ResourceVector(
            *(queue.get(resource, {}).get(name, 0) for resource in ("gpu", "cpu", "memory"))
        )

    owed = build_entitlement(
        ResourceVector(*map(_bound, each("deserved"))),
        ResourceVector(*map(_bound, each("limit"))),
        ResourceVector(*map(_bound, each("fair_share"))),
        queue.get("priority", 0),
        queue.get("created", 0.0),
    )
    return owed, each("allocated"), each("allocated_non_preemptible")


def _paths(queues: Data) -> dict[str, tuple[str, ...]]:
    """Return the path of each queue to its root."""
    paths = {}
    for key in queues:
        path = [key]
        while (above := queues[path[-1]].get("parent")) in queues and above not in path:
            path.append(above)
        paths[key] = tuple(path)
    return paths


def _amounts(numbers: Data) -> ResourceVector:
    return ResourceVector(
        numbers.get("gpu", 0), numbers.get("cpu_millis", numbers.get("cpu", 0)), numbers.get("memory", 0)
    )


def _sum(amounts: Any) -> ResourceVector:
    total = ZERO
    for each in amounts:
        total = total.add(each)
    return total


def _bound(number: float) -> float:
    return math.inf if number == -1 else number
