"""Converts a scheduling case to a snapshot, and a plan to the cluster of the next cycle.

A case is kept as task states (``TaskState``). Every cycle builds a new snapshot from them, as KAI-Scheduler's
harness does, so only task states persist between cycles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.conformance.format import Case
from scheduler.core.model.snapshot import (
    UNLIMITED_MILLI,
    WHOLE_MILLI,
    GpuRow,
    GpuShare,
    GpuUuid,
    GroupRow,
    JobId,
    NodeId,
    NodeRow,
    PendingRow,
    PoolId,
    PoolRow,
    ProjectId,
    ProjectRow,
    QuotaRow,
    ResourceQuota,
    RunningRow,
    RunningTask,
    Snapshot,
    TaskRequest,
    TopologyConstraint,
    TopologyRow,
    UserId,
)

NOW_S = 1_000_000.0
MINUTE_S = 60.0
RAN_S = MINUTE_S
"""Time since the start of running jobs."""

POOL = PoolId("pool")
USER = UserId("somebody")
DEFAULT_GPU_MIB = 100
DEFAULT_CORES = 20_000
DEFAULT_MEMORY_BYTES = 20_000_000_000
DEFAULT_TASK_MEMORY_BYTES = 1_000_000_000
DEFAULT_STALE_GRACE_S = 60.0
"""Grace for ``action`` cases; KAI-Scheduler's ``integration`` harness has none."""

PENDING_STATES = ("Pending", "Gated", "Pipelined")
ALLOCATED_STATES = ("Running", "Allocated", "Binding", "Bound", "Releasing", "StuckInReleasing")


@dataclass(frozen=True, slots=True)
class TaskState:
    """State of a task: KAI-Scheduler's state name, node and GPU shares."""

    state: str
    node: str | None = None
    gpus: tuple[GpuShare, ...] = ()


States = dict[str, TaskState]


class CaseCluster:
    """A case as a cluster; builds snapshots for any task states."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._unit_bytes = _memory_unit(case)
        self._jobs = {job["name"]: job for job in case["jobs"]}
        self._submitted_s = _submitted(case["jobs"])
        self._stale_grace_s = 0.0 if case["suite"] == "integration" else DEFAULT_STALE_GRACE_S
        self._nodes = case["nodes"]
        self._gpus = {
            name: tuple(GpuUuid(f"{name}/gpu{i}") for i in range(node["gpus"])) for name, node in self._nodes.items()
        }  # fmt: skip
        self.jobs = list(self._jobs.values())

    # -- initial state --------------------------------------------------------------------------------

    def initial_states(self) -> States:
        """Return the initial task states of the case, with GPUs for placed tasks."""
        groups: dict[tuple[str, str], GpuUuid] = {}
        free = {name: list(gpus) for name, gpus in self._gpus.items()}
        states: States = {}
        placed = [
            (job, task)
            for job in self.jobs
            for task in job["tasks"]
            if task["state"] in (*ALLOCATED_STATES, "Pipelined") and task.get("node") is not None
        ]
        # named groups first, so that each gets one GPU; whole GPUs take the rest
        for job, task in sorted(placed, key=lambda each: not each[1].get("gpu_groups")):
            ask = self.request(job, task)
            milli = self._milli_on(ask, task["node"])
            names = task.get("gpu_groups") or [f"{task['id']}/{i}" for i in range(ask.gpus)]
            shares = []
            for name in (
                names[: ask.gpus] if milli < WHOLE_MILLI else [f"{task['id']}/{i}" for i in range(ask.gpus)]
            ):
                key = (task["node"], name)
                if key not in groups and free[task["node"]]:
                    groups[key] = free[task["node"]].pop(0)
                if key in groups:
                    shares.append(GpuShare(groups[key], milli))
            states[task["id"]] = TaskState(task["state"], task["node"], tuple(shares))
        for job in self.jobs:
            for task in job["tasks"]:
                states.setdefault(task["id"], TaskState(task["state"]))
        return states

    # -- snapshot -------------------------------------------------------------------------------------

    def snapshot(self, states: Mapping[str, TaskState]) -> Snapshot:
        running = [row for job in self.jobs if (row := self._running(job, states))]
        pending = [waits for job in self.jobs if (waits := self._pending(job, states))]
        return Snapshot(
            NOW_S,
            (PoolRow(POOL, "pool", "pack"),),
            tuple(self._node(name, states) for name in self._nodes),
            tuple(
                ProjectRow(
                    ProjectId(queue["name"]),
                    queue["name"],
                    ProjectId(queue["parent"]) if queue["parent"] else None,
                    float(queue.get("created_index", 0)),
                )
                for queue in self._case["queues"]
            ),
            tuple(self._quota(queue) for queue in self._case["queues"]),
            running=tuple(running),
            pending=tuple(pending),
            topologies=tuple(
                TopologyRow(
                    topology["ObjectMeta"]["Name"],
                    tuple(level["NodeLabel"] for level in topology["Spec"]["Levels"]),
                )
                for topology in self._case.get("topologies", ())
            ),
        )

    def _quota(self, queue: Mapping[str, Any]) -> QuotaRow:
        deserved, limit = queue["deserved_gpus"], queue["limit_gpus"]
        megabyte = 1_000_000
        return QuotaRow(
            ProjectId(queue["name"]),
            POOL,
            UNLIMITED_MILLI if deserved < 0 else _milli(deserved),
            None if limit < 0 else _milli(limit),
            max(0.0, float(queue.get("over_quota_weight_gpus", 1))),
            int(queue.get("priority", 100)),
            cpu=_bounds(queue.get("deserved_cpu_millis"), queue.get("limit_cpu_millis"), 1.0),
            memory=_bounds(
                queue.get("deserved_memory_mb"), queue.get("limit_memory_mb"), megabyte / self._unit_bytes
            ),
            reclaim_min_runtime_s=queue.get("reclaim_min_runtime_seconds"),
        )

    def _node(self, name: str, states: Mapping[str, TaskState]) -> NodeRow:
        node = self._nodes[name]
        used = dict.fromkeys(self._gpus[name], 0)
        cpu = memory = 0
        for job, task in self._tasks():
            state = states[task["id"]]
            if state.node == name and state.state in ALLOCATED_STATES:
                ask = self.request(job, task)
                cpu += ask.cpu_milli
                memory += ask.memory_mib
                for gpu in state.gpus:
                    used[gpu.uuid] += gpu.milli
        return NodeRow(
            NodeId(name),
            name,
            POOL,
            True,
            True,
            round(node.get("cpu_cores", DEFAULT_CORES) * 1000),
            cpu,
            round(node.get("memory_bytes", DEFAULT_MEMORY_BYTES) / self._unit_bytes),
            memory,
            tuple(
                GpuRow(
                    uuid,
                    index,
                    node.get("gpu_name", ""),
                    node.get("gpu_memory_mib", DEFAULT_GPU_MIB),
                    used[uuid],
                    used[uuid] == WHOLE_MILLI and self._is_whole(uuid, states),
                )
                for index, uuid in enumerate(self._gpus[name])
            ),
            tuple(sorted(node.get("labels", {}).items())),
            node.get("max_tasks"),
        )

    def _is_whole(self, uuid: GpuUuid, states: Mapping[str, TaskState]) -> bool:
        return any(
            gpu == GpuShare(uuid, WHOLE_MILLI)
            for state in states.values()
            if state.state in ALLOCATED_STATES
            for gpu in state.gpus
        )

    def _running(self, job: Mapping[str, Any], states: Mapping[str, TaskState]) -> RunningRow | None:
        """Return the row of a job with its running tasks; one stuck in releasing only occupies GPUs."""
        groups = self._groups(job)
        tasks = []
        for rank, task in enumerate(job["tasks"]):
            state = states[task["id"]]
            if state.state not in ALLOCATED_STATES or state.state == "StuckInReleasing" or state.node is None:
                continue
            ask = self.request(job, task)
            tasks.append(
                RunningTask(
                    NodeId(state.node),
                    state.gpus,
                    ask.cpu_milli,
                    ask.memory_mib,
                    rank,
                    self._group_of(job, task) if groups else None,
                    state.state == "Releasing",
                    ask.share_mib,
                )
            )
        if not tasks:
            return None
        stale = self._stale(job, states)
        return RunningRow(
            JobId(job["name"]),
            ProjectId(job["queue"]),
            USER,
            POOL,
            int(job["priority"]),
            bool(job["preemptible"]),
            NOW_S - RAN_S,
            None,
            tuple(tasks),
            stopping=all(task.stopping for task in tasks),
            name=job["name"],
            min_tasks=self._min_tasks(job),
            groups=groups,
            topology_constraint=_near(
                (job.get("subgroup_tree") or {}).get("topology_constraint") or job.get("topology_constraint")
            ),
            submitted_s=self._submitted_s[job["name"]],
            stale_since_s=NOW_S - job.get("stale_seconds", 0) if stale else None,
            stale_gang_grace_s=job.get("staleness_grace_seconds", self._stale_grace_s),
        )  # fmt: skip

    def _pending(self, job: Mapping[str, Any], states: Mapping[str, TaskState]) -> PendingRow | None:
        waiting = [
            (rank, task)
            for rank, task in enumerate(job["tasks"])
            if states[task["id"]].state in PENDING_STATES
        ]
        if not waiting or job.get("job_not_ready"):
            return None
        waiting.sort(key=lambda each: (-each[1].get("task_priority", 0), each[0]))
        asks = tuple(self.request(job, task) for _, task in waiting)
        first, groups = asks[0], self._groups(job)
        return PendingRow(
            JobId(job["name"]),
            job["name"],
            ProjectId(job["queue"]),
            USER,
            (POOL,),
            self._submitted_s[job["name"]],
            int(job["priority"]),
            bool(job["preemptible"]),
            len(waiting),
            first,
            None,
            min_tasks=self._min_tasks(job),
            ranks=tuple(rank for rank, _ in waiting),
            task_requests=asks if any(ask != first for ask in asks) else (),
            groups=groups,
            group_of_rank=tuple(self._group_of(job, task) for _, task in waiting) if groups else (),
            topology_constraint=_near(
                (job.get("subgroup_tree") or {}).get("topology_constraint") or job.get("topology_constraint")
            ),
            preemption_delay_s=job.get("preemption_delay_seconds"),
            nominated_tasks=tuple(self._nominated_tasks(job, states)),
        )  # fmt: skip

    def _nominated_tasks(
        self, job: Mapping[str, Any], states: Mapping[str, TaskState]
    ) -> Iterator[RunningTask]:
        """Yield the placements nominated for a job's tasks in an earlier cycle."""
        for rank, task in enumerate(job["tasks"]):
            state = states[task["id"]]
            if state.state == "Pipelined" and state.node is not None:
                ask = self.request(job, task)
                yield RunningTask(NodeId(state.node), state.gpus, ask.cpu_milli, ask.memory_mib, rank)

    # -- tasks and groups -----------------------------------------------------------------------------

    def _tasks(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        for job in self.jobs:
            for task in job["tasks"]:
                yield job, task

    def request(self, job: Mapping[str, Any], task: Mapping[str, Any]) -> TaskRequest:
        """Return the request of a task. A fraction is a share of one GPU, or of each of several."""
        if job.get("best_effort"):
            return TaskRequest(0, WHOLE_MILLI, 0, 0)
        gpus = task.get("gpus_override", job["gpus_per_task"])
        count, milli, share_mib = int(gpus), WHOLE_MILLI, None
        if gpus != int(gpus):
            count, milli = job.get("fraction_devices_per_task", 1), _milli(gpus)
        if job.get("gpu_memory_mib_per_task") and not gpus:
            count = job.get("fraction_devices_per_task", 1)
            share_mib = job["gpu_memory_mib_per_task"]
        return TaskRequest(
            count,
            milli,
            round(job.get("cpu_cores_per_task", 1) * 1000),
            round(job.get("memory_bytes_per_task", DEFAULT_TASK_MEMORY_BYTES) / self._unit_bytes),
            share_mib=share_mib,
        )

    def _milli_on(self, ask: TaskRequest, node: str) -> int:
        """Return the milli that a task holds of each GPU on a node."""
        if ask.share_mib is None:
            return ask.milli
        gpu_mib = int(self._nodes[node].get("gpu_memory_mib", DEFAULT_GPU_MIB))
        return -(-ask.share_mib * WHOLE_MILLI // gpu_mib)

    def _min_tasks(self, job: Mapping[str, Any]) -> int | None:
        """Return the minimum number of tasks; None when groups define it."""
        return None if job["min_available"] is None else int(job["min_available"])

    def _groups(self, job: Mapping[str, Any]) -> tuple[GroupRow, ...]:
        tree = job.get("subgroup_tree") or {}
        if not tree.get("podsets") and not tree.get("subgroups"):
            return ()
        if "min_subgroups" in tree:
            root = GroupRow(tree["name"], None, tree["min_subgroups"])
            return (root, *_subgroups(tree, tree["name"]))
        return tuple(_subgroups(tree, None))

    def _group_of(self, job: Mapping[str, Any], task: Mapping[str, Any]) -> str:
        return str(task.get("subgroup", "default"))

    def _stale(self, job: Mapping[str, Any], states: Mapping[str, TaskState]) -> bool:
        """Return True when a job runs fewer tasks than its minimum and none has succeeded."""
        if any(states[task["id"]].state == "Succeeded" for task in job["tasks"]):
            return False
        alive = [task for task in job["tasks"] if states[task["id"]].state in ALLOCATED_STATES]
        tree = job.get("subgroup_tree") or {}
        leaves = [group for group in _leaves(tree) if "min_available" in group]
        if leaves:
            return any(
                sum(task.get("subgroup") == leaf["name"] for task in alive) < (leaf["min_available"] or 0)
                for leaf in leaves
            )
        return len(alive) < (len(job["tasks"]) if job["min_available"] is None else job["min_available"])


def next_states(states: States, after: Mapping[str, TaskState], deleted: Iterable[str]) -> States:
    """Return the states at the start of the next cycle; tasks in ``deleted`` stay releasing once evicted."""
    stay = set(deleted)
    moved: States = {}
    for task, state in after.items():
        if state.state == "Releasing":
            moved[task] = state if task in stay else TaskState("Pending")
        elif state.state == "Pipelined":
            moved[task] = TaskState("Pending")
        elif state.state == "Binding":
            moved[task] = replace(state, state="Running")
        else:
            moved[task] = state
    return {**states, **moved}


def _submitted(jobs: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return submit times: by priority, then in list order, one minute apart, the oldest first."""
    ordered = sorted(sorted(jobs, key=lambda job: job["list_index"]), key=lambda job: -job["priority"])
    return {
        job["name"]: NOW_S - MINUTE_S * (job.get("age_minutes") or len(ordered) - index)
        for index, job in enumerate(ordered)
    }


def _memory_unit(case: Case) -> int:
    """Return the bytes that represent one MiB of the snapshot: 1 MB, or less where amounts are finer."""
    amounts = [node.get("memory_bytes", DEFAULT_MEMORY_BYTES) for node in case["nodes"].values()]
    amounts += [job.get("memory_bytes_per_task", DEFAULT_TASK_MEMORY_BYTES) for job in case["jobs"]]
    return next(unit for unit in (1_000_000, 1_000, 1) if unit == 1 or all(a % unit == 0 for a in amounts))


def _bounds(guaranteed: float | None, limit: float | None, scale: float) -> ResourceQuota:
    """Return quota bounds; None and -1 mean unlimited."""
    return ResourceQuota(
        None if guaranteed is None or guaranteed < 0 else round(guaranteed * scale),
        None if limit is None or limit < 0 else round(limit * scale),
    )


def _milli(gpus: float) -> int:
    return round(gpus * WHOLE_MILLI)


def _near(constraint: Mapping[str, Any] | None) -> TopologyConstraint | None:
    if not constraint or not (constraint.get("required") or constraint.get("preferred")):
        return None
    return TopologyConstraint(
        constraint.get("topology", ""), constraint.get("required"), constraint.get("preferred")
    )


def _subgroups(group: Mapping[str, Any], parent: str | None) -> Iterator[GroupRow]:
    """Yield the nested groups, parents before children."""
    for inner in (*group.get("subgroups", ()), *group.get("podsets", ())):
        least = inner.get("min_available", inner.get("min_subgroups"))
        yield GroupRow(inner["name"], parent, least, _near(inner.get("topology_constraint")))
        yield from _subgroups(inner, inner["name"])


def _leaves(group: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from group.get("podsets", ())
    for inner in group.get("subgroups", ()):
        yield from _leaves(inner)
