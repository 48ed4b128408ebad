"""Database state that the collector needs: nodes, running tasks and their GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.ssh import SshTarget
from portal.domain.states import LIVE_ATTEMPT_STATES, AttemptState, NodeState, NodeTransport
from portal.live.collector.frames import RunningTask
from portal.live.collector.sample_filter import KnownNode
from portal.models import Allocation, ClusterSettings, Gpu, Node, Task
from portal.selectors.nodes.host_keys import ssh_target
from portal.services.nodes.agent_settings import agent_settings_text


@dataclass(frozen=True)
class StreamedNode:
    """A node and its connection settings; a changed address compares unequal, so its stream is reopened."""

    public_id: str
    name: str
    target: SshTarget | None
    """None: this machine."""
    settings: str  # as JSON, so that it is hashable and comparable
    cluster: str


@dataclass(frozen=True)
class FollowedLog:
    """The log of a running task."""

    task_id: int
    job: str
    attempt: int
    rank: int
    mirrored_bytes: int

    @property
    def topic(self) -> str:
        """The topic of pages that show it."""
        return f"logs.{self.job}.{self.rank}"


@dataclass
class CollectorState:
    nodes: dict[str, StreamedNode] = field(default_factory=dict)
    gpu_orders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tasks_by_job: dict[str, list[RunningTask]] = field(default_factory=dict)  # by job
    known_nodes: dict[str, KnownNode] = field(default_factory=dict)  # by node, each that is watched
    logs: dict[str, list[FollowedLog]] = field(default_factory=dict)  # by node


def load_state() -> CollectorState:
    """Read everything in five queries."""
    cluster = ClusterSettings.objects.get_or_create(id=1)[0].cluster_id
    found = CollectorState()
    watched = Node.objects.exclude(state__in=[NodeState.ENROLLING.value, NodeState.RETIRED.value])
    for node in watched:
        found.nodes[node.public_id] = StreamedNode(
            public_id=node.public_id,
            name=node.name,
            target=None if node.transport == NodeTransport.LOCAL.value else ssh_target(node),
            settings=agent_settings_text(node.settings),
            cluster=cluster,
        )
        found.known_nodes[node.public_id] = KnownNode()
    gpus = Gpu.objects.filter(present=True).order_by("node_id", "index")
    for uuid, owner, mib, kept_mib in gpus.values_list(
        "uuid", "node__public_id", "memory_mib", "driver_reserved_mib"
    ):
        if owner in found.known_nodes:
            found.known_nodes[owner].shareable_mib[uuid] = mib - (kept_mib or 0)
    found.gpu_orders = {node: tuple(each.shareable_mib) for node, each in found.known_nodes.items()}
    held: dict[int, list[tuple[str, int]]] = defaultdict(list)
    allocations = Allocation.objects.filter(ended_at__isnull=True)
    for task_id, uuid, milli in allocations.values_list("task_id", "gpu__uuid", "milli"):
        held[task_id].append((uuid, milli))
    for task in _live_tasks():
        _add(found, task, held.get(task.pk, ()))
    return found


def _live_tasks() -> Any:
    return (
        Task.objects.filter(
            container_removed=False, attempt__state__in=[state.value for state in LIVE_ATTEMPT_STATES]
        )
        .exclude(state=AttemptState.CONFIGURING.value)
        .select_related("attempt__job", "node")
        .order_by("attempt_id", "rank")
    )


def _add(state: CollectorState, task: Task, gpus_held: Sequence[tuple[str, int]]) -> None:
    job, attempt, node = task.attempt.job.public_id, task.attempt.number, task.node.public_id
    gpus = tuple(uuid for uuid, _ in gpus_held)
    started_s = task.attempt.running_at.timestamp() if task.attempt.running_at else None
    state.tasks_by_job.setdefault(job, []).append(RunningTask(job, attempt, task.rank, node, gpus, started_s))
    if node in state.known_nodes:
        state.known_nodes[node].tasks.add((job, attempt, task.rank))
        for uuid, milli in gpus_held:
            state.known_nodes[node].holders.setdefault(uuid, []).append((job, attempt, milli))
    if not task.log_complete:
        state.logs.setdefault(node, []).append(FollowedLog(task.pk, job, attempt, task.rank, task.log_bytes))
