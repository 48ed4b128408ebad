"""Format of conformance files: defines every field and rejects unknown ones.

Fields of devices that this scheduler does not support (MIG, DRA, NUMA) and of KAI-Scheduler's own
configuration are accepted but not read; cases that have them are not portable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.conformance.validators import (
    InvalidValueError,
    Validator,
    anything,
    boolean,
    by_kind,
    count,
    integer,
    list_of,
    map_of,
    number,
    one_of,
    or_null,
    record,
    small_count,
    text,
)
from bench.replay.tables import read_json
from scheduler.replay.input_files import MalformedFileError

Case = Mapping[str, Any]
"""One validated case."""

STATES = (
    "Pending", "Gated", "Pipelined", "Allocated", "Binding", "Bound", "Running", "Releasing", "StuckInReleasing",
    "Succeeded", "Failed", "Deleted", "Unknown",
)  # fmt: skip
OUTCOMES = (
    "start_now", "start_when_victims_release", "evicted", "keeps_running", "pending", "terminating",
    "stuckinreleasing", "failed", "succeeded", "running",
)  # fmt: skip
ACTIONS = ("allocate", "consolidation", "reclaim", "preempt", "stalegangeviction")


@dataclass(frozen=True, slots=True)
class Cases:
    """All cases of one file, in file order."""

    scheduling: tuple[Case, ...]
    fair_share: tuple[Case, ...]
    predicates: tuple[Case, ...]

    def __len__(self) -> int:
        return len(self.scheduling) + len(self.fair_share) + len(self.predicates)


def read_cases(path: str | Path) -> Cases:
    """Return the cases of a file, plain or gzip.

    Raise MalformedFileError with the JSON path when the file cannot be read, a field is unknown, missing or
    of the wrong type, an id is duplicated, or a case names a node, queue or job that it does not define.
    """
    content = read_json(path)
    try:
        FILE(content, "$")
        cases = Cases(
            tuple(content.get("scheduling_cases", ())),
            tuple(content.get("fair_share_cases", ())),
            tuple(content.get("predicate_cases", ())),
        )
        _check_ids(content)
        for i, case in enumerate(cases.scheduling):
            _check_names(case, f"$.scheduling_cases[{i}]")
        for i, case in enumerate(cases.fair_share):
            _check_shares(case, f"$.fair_share_cases[{i}]")
    except InvalidValueError as error:
        raise MalformedFileError(path, error.path, error.message) from None
    except RecursionError:
        raise MalformedFileError(path, "", "groups are nested too deeply") from None
    return cases


def _check_ids(content: Case) -> None:
    """Raise InvalidValueError for a duplicate id."""
    seen: set[str] = set()
    for family in ("scheduling_cases", "fair_share_cases", "predicate_cases"):
        for i, case in enumerate(content.get(family, ())):
            if case["id"] in seen:
                raise InvalidValueError(f"$.{family}[{i}].id", f"{case['id']!r} is repeated")
            seen.add(case["id"])


def _check_names(case: Case, place: str) -> None:
    """Raise InvalidValueError for an unknown or duplicate queue, node, job or task."""
    queues = {queue["name"] for queue in case["queues"]}
    for i, queue in enumerate(case["queues"]):
        if queue["parent"] is not None and queue["parent"] not in queues:
            raise InvalidValueError(f"{place}.queues[{i}].parent", f"there is no queue {queue['parent']!r}")
    jobs, tasks = set(), set()
    for i, job in enumerate(case["jobs"]):
        at = f"{place}.jobs[{i}]"
        if job["name"] in jobs:
            raise InvalidValueError(f"{at}.name", f"{job['name']!r} is repeated")
        jobs.add(job["name"])
        if job["queue"] not in queues:
            raise InvalidValueError(f"{at}.queue", f"there is no queue {job['queue']!r}")
        for k, task in enumerate(job["tasks"]):
            tasks.add(task["id"])
            if task["id"] != f"{job['name']}-{k}":
                raise InvalidValueError(f"{at}.tasks[{k}].id", f"{task['id']!r} is not {job['name']}-{k}")
            if task.get("node") is not None and task["node"] not in case["nodes"]:
                raise InvalidValueError(f"{at}.tasks[{k}].node", f"there is no node {task['node']!r}")
    for key, known in (("jobs", jobs), ("tasks", tasks), ("nodes", set(case["nodes"]))):
        for name in case["expected"].get(key, ()):
            if name not in known:
                raise InvalidValueError(f"{place}.expected.{key}.{name}", "nothing has this name")


def _check_shares(case: Case, place: str) -> None:
    """Raise InvalidValueError when totals and expected shares do not match the operation or the queues."""
    several = case["op"] in ("all_resources", "hierarchy")
    if isinstance(case["total"], dict) != several:
        raise InvalidValueError(
            f"{place}.total", f"{case['op']} takes {'three totals' if several else 'one total'}"
        )
    if isinstance(case["resource"], list) != several:
        raise InvalidValueError(f"{place}.resource", f"{case['op']} takes {'several' if several else 'one'}")
    for key, queue in case["queues"].items():
        if queue.get("parent") is not None and queue["parent"] not in case["queues"]:
            raise InvalidValueError(f"{place}.queues.{key}.parent", f"there is no queue {queue['parent']!r}")
    for key, answer in case["fair_share"].items():
        if key not in case["queues"]:
            raise InvalidValueError(f"{place}.fair_share.{key}", "there is no such queue")
        if isinstance(answer, dict) != several:
            raise InvalidValueError(
                f"{place}.fair_share.{key}", "this result does not match the kind of division"
            )


# -- scheduling cases -------------------------------------------------------------------------------------

LINE = {"__line": integer}  # line in KAI-Scheduler's test table
NEAR = record({}, LINE, topology=text, required=text, preferred=text)


def _group(value: Any, place: str) -> None:
    """Validate a group; groups nest."""
    GROUP(value, place)


GROUP = record(
    {"name": text},
    LINE,
    min_available=or_null(count),
    min_subgroups=count,
    topology_constraint=or_null(NEAR),
    podsets=list_of(_group),
    subgroups=list_of(_group),
)

TASK = record(
    {"id": text, "state": one_of(*STATES)},
    node=or_null(text),
    gpu_groups=list_of(text),
    subgroup=text,
    gpus_override=small_count,
    task_priority=integer,
    mig_instances=map_of(count),
    legacy_mig=boolean,
    node_affinity=list_of(text),
    pod_labels=map_of(text),
    pod_affinity_topology_key=text,
    pod_anti_affinity_topology_key=text,
    annotations=anything,
    resource_claim_names=list_of(text),
    resource_claim_templates=anything,
    persistent_volume_claim_names=list_of(text),
    pvc_names=list_of(text),
    pvcs=anything,
    resize_deferred_actual=anything,
)

JOB = record(
    {
        "name": text,
        "queue": text,
        "priority": integer,
        "preemptible": boolean,
        "list_index": count,
        "gpus_per_task": number,
        "tasks": list_of(TASK),
        "min_available": or_null(count),
    },
    cpu_cores_per_task=number,
    memory_bytes_per_task=number,
    cpu_or_memory_explicit=boolean,
    fraction_devices_per_task=small_count,
    gpu_memory_mib_per_task=count,
    subgroup_tree=or_null(GROUP),
    topology_constraint=or_null(NEAR),
    age_minutes=number,
    best_effort=boolean,
    delete_in_test=boolean,
    stale_seconds=number,
    staleness_grace_seconds=number,
    preemption_delay_seconds=number,
    preemptibility_explicit=text,
    namespace=text,
    qos_class=text,
    job_not_ready=boolean,
)

NODE = record(
    {"gpus": small_count},
    gpu_memory_mib=count,
    cpu_cores=number,
    memory_bytes=number,
    max_tasks=count,
    labels=map_of(text),
    gpu_name=text,
    gpu_memory_synced=boolean,
    mig_instances=map_of(count),
    mig_strategy=text,
    mig_enabled=boolean,
    numa_topology=anything,
    conditions=anything,
)

QUEUE = record(
    {"name": text, "parent": or_null(text), "deserved_gpus": number, "limit_gpus": number},
    priority=integer,
    over_quota_weight_gpus=number,
    created_index=integer,
    implicit=boolean,
    deserved_cpu_millis=number,
    limit_cpu_millis=number,
    deserved_memory_mb=number,
    limit_memory_mb=number,
    reclaim_min_runtime_seconds=number,
    preempt_min_runtime_seconds=number,
)

EXPECTED = record(
    {"status": text, "outcome": one_of(*OUTCOMES)},
    node=or_null(text),
    gpus_total=number,
    gpus_accepted=number,
    cpu_millis_total=number,
    memory_bytes_total=number,
    gpu_groups=list_of(text),
    ignore_gpu_group=boolean,
    error_message=text,
    last_start_older_than_seconds=number,
    numa_zones=anything,
)

SCHEDULING = record(
    {
        "id": text,
        "suite": one_of("action", "integration"),
        "actions": list_of(one_of(*ACTIONS)),
        "rounds": record(
            {"until_match": small_count, "after_match": small_count}, seconds_between_rounds=number
        ),
        "tags": list_of(text),
        "portable": boolean,
        "nodes": map_of(NODE),
        "queues": list_of(QUEUE),
        "jobs": list_of(JOB),
        "expected": record(
            {"jobs": map_of(EXPECTED)},
            tasks=map_of(EXPECTED),
            tasks_not_checked_by_origin=map_of(EXPECTED),
            nodes=map_of(record({}, idle_gpus=number, releasing_gpus=number, numa_zones_available=anything)),
            max_calls=record({}, binds=count, evictions=count, pipelined=count),
        ),
    },
    LINE,
    name=text,
    source=text,
    test_function=text,
    core=boolean,
    note=text,
    notes=anything,
    topologies=list_of(
        record(
            {
                "ObjectMeta": record({"Name": text}),
                "Spec": record({"Levels": list_of(record({"NodeLabel": text}))}),
            }
        )
    ),
    dra=anything,
    scheduler_conf=anything,
)

# -- fair share -------------------------------------------------------------------------------------------

RESOURCE = one_of("gpu", "cpu", "memory")
TRIPLE = record({}, gpu=number, cpu=number, memory=number)
CLAIM = record(
    {"deserved": number, "limit": number, "over_quota_weight": number, "request": number},
    usage=number,
    allocated=number,
    allocated_non_preemptible=number,
    fair_share_start=number,
)


def _one_or_three(value: Any, place: str) -> None:
    (TRIPLE if isinstance(value, dict) else number)(value, place)


def _one_or_list(value: Any, place: str) -> None:
    (list_of(RESOURCE) if isinstance(value, list) else RESOURCE)(value, place)


FAIR_SHARE = record(
    {
        "id": text,
        "op": one_of("deserved_then_over_quota", "over_quota_only", "all_resources", "hierarchy"),
        "total": _one_or_three,
        "k_value": number,
        "resource": _one_or_list,
        "queues": map_of(
            record(
                {},
                priority=integer,
                parent=or_null(text),
                created=or_null(number),
                name=text,
                gpu=CLAIM,
                cpu=CLAIM,
                memory=CLAIM,
            )
        ),
        "fair_share": map_of(_one_or_three),
    },
    LINE,
    name=text,
    remaining=number,
    assertions=count,
    source=text,
    test_function=text,
    verified=boolean,
)

# -- predicates -------------------------------------------------------------------------------------------

AMOUNTS = record({}, cpu=number, cpu_millis=number, memory=number, gpu=number)
STANDING = record(
    {},
    deserved=number,
    fair_share=number,
    allocated=number,
    allocated_non_preemptible=number,
    limit=number,
    over_quota_weight=number,
    request=number,
    usage=number,
)
STANDING_QUEUE = record(
    {},
    name=text,
    parent=or_null(text),
    priority=integer,
    created=number,
    gpu=STANDING,
    cpu=STANDING,
    memory=STANDING,
)
RECLAIMER = record(
    {"RequiredResources": AMOUNTS, "IsPreemptable": boolean}, Name=text, Namespace=text, Queue=text
)
ORDER_JOB = record(
    {"tasks": list_of(record({}, devices=count, gpu_memory_mib=number, gpu=number, cpu_millis=number, memory=number))}
)  # fmt: skip
CAPACITY_TASK = record(
    {"Status": text},
    Job=text,
    Name=text,
    Namespace=text,
    ResourceRequestType=text,
    GpuRequirement=record({}, gpus=number, gpu_memory_mib=number, devices=count),
    ResReqVector=AMOUNTS,
)
CAPACITY_JOB = record(
    {"Queue": text},
    Name=text,
    Namespace=text,
    Preemptibility=text,
    JobFitErrors=anything,
    PodSets=map_of(record({"tasks": list_of(CAPACITY_TASK)}, min_available=count)),
)

TABLES: dict[str, Validator] = {
    "reclaimerInfo": record({"reclaimerInfo": RECLAIMER, "queue": STANDING_QUEUE, "canReclaim": boolean}, name=text),
    "reclaimeeQueue": record(
        {"reclaimerQueue": STANDING_QUEUE, "reclaimeeQueue": STANDING_QUEUE, "expected": boolean},
        reclaimerResources=AMOUNTS,
        name=text,
    ),
    "lqueue": record(
        {"lqueue": STANDING_QUEUE, "rqueue": STANDING_QUEUE, "expectedResult": integer},
        Name=text,
        lJobInfo=or_null(ORDER_JOB),
        rJobInfo=or_null(ORDER_JOB),
        lVictims=or_null(list_of(ORDER_JOB)),
        rVictims=or_null(list_of(ORDER_JOB)),
        totalResources=AMOUNTS,
        minNodeGPUMemory=or_null(number),
    ),
    "maxAllowed": record(
        {"maxAllowed": AMOUNTS, "allocated": AMOUNTS, "requestedQuota": AMOUNTS, "isOverMaxAllowed": boolean},
        resourceName=text,
        name=text,
    ),
    "allocatedNonPreemptible": record(
        {
            "deserved": AMOUNTS,
            "allocatedNonPreemptible": AMOUNTS,
            "requestedQuota": AMOUNTS,
            "expectedResult": boolean,
        },
        resource=text,
        name=text,
    ),
    "job": record(
        {"queues": map_of(STANDING_QUEUE), "job": CAPACITY_JOB, "expectedResult": boolean},
        requestedShare=AMOUNTS,
        node=anything,
        maxNodeGPUMemory=or_null(number),
        name=text,
    ),
}  # fmt: skip
"""Each table is identified by a field that only it has."""


def table_of(data: Mapping[str, Any]) -> str | None:
    """Return the field that identifies the table; None when unknown."""
    return next((mark for mark in TABLES if mark in data), None)


def _table(data: Mapping[str, Any]) -> Validator | None:
    mark = table_of(data)
    return None if mark is None else TABLES[mark]


PREDICATE_DATA: dict[str, Validator] = {
    "reclaimable": record(
        {
            "queues": map_of(STANDING_QUEUE),
            "reclaimer": RECLAIMER,
            "victims": list_of(
                record(
                    {
                        "queue": text,
                        "tasks": list_of(
                            record({}, gpu=number, cpu_millis=number, cpu=number, memory=number, status=text)
                        ),
                    },
                    min_available=count,
                    name=text,
                )
            ),
        }
    ),
    "filter_victim": record(
        {"queues": map_of(STANDING_QUEUE), "reclaimer": or_null(RECLAIMER), "victim_queue": text}
    ),
    "table": by_kind(_table),
}


def _predicate(case: Mapping[str, Any]) -> Validator | None:
    kind = case.get("kind")
    if kind not in PREDICATE_DATA:
        return None
    answer: dict[str, Validator] = {} if kind == "table" else {"expected": boolean}
    return record(
        {"id": text, "kind": text, "data": PREDICATE_DATA[kind], **answer},
        LINE,
        source=text,
        name=text,
        test_function=text,
        verified=boolean,
    )


FILE = record(
    {},
    meta=map_of(anything),
    scheduling_cases=list_of(SCHEDULING),
    fair_share_cases=list_of(FAIR_SHARE),
    predicate_cases=list_of(by_kind(_predicate)),
)
