"""Layer profiles and pipeline plans of projects; the scheduler reads profiles and computes plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from django.db import transaction

from portal.access import Permission, require_permission
from portal.domain.pipeline_plans import (
    MAX_BANDWIDTH,
    MAX_GPUS_PER_NODE,
    MAX_NODES,
    MIN_BANDWIDTH,
)
from portal.engine_client import query_plan, query_profile
from portal.errors import InvalidRequest, ServiceUnavailable, Unsatisfiable
from portal.models import LayerProfile, NodePool, PipelinePlan, Project, User
from portal.selectors.nodes.free_nodes import pool_gpu_memory_mib
from portal.selectors.nodes.network_links import slowest_link_bandwidth
from portal.services.audit import record_action

NO_ANSWER = "The scheduler does not answer. Try again in a moment."
MIB = 1024 * 1024


@dataclass(frozen=True)
class TopologyInput:
    """``nodes`` nodes with ``gpus_per_node`` GPUs each; bandwidths in bytes per second.

    ``memory_bytes`` None is the memory of the pool's smallest GPU, and ``link_bandwidth`` None its slowest
    measured link, if there is a pool.
    """

    nodes: int
    gpus_per_node: int
    node_bandwidth: float
    link_bandwidth: float | None
    pool: NodePool | None = None
    memory_bytes: float | None = None

    def levels(self) -> list[tuple[int, float]]:
        """Return machines and bandwidth, innermost first; a level of one machine is left out."""
        inner = (
            [(self.gpus_per_node, self.node_bandwidth)] if self.gpus_per_node > 1 or self.nodes == 1 else []
        )
        return inner + ([(self.nodes, self.link_bandwidth)] if self.nodes > 1 and self.link_bandwidth else [])


def do_create_profile(user: User, project: Project, name: str, content: Any) -> LayerProfile:
    """Store a layer profile that the scheduler accepts. Must not run in a transaction."""
    require_permission(user, Permission.SUBMIT, project)
    if not name.strip() or len(name) > 100:
        raise InvalidRequest(fields={"name": "Give it a name of at most 100 characters."})
    answer = query_profile(content)
    if answer is None:
        raise ServiceUnavailable(NO_ANSWER)
    if "error" in answer:
        raise InvalidRequest(fields={"profile": answer["error"]})
    with transaction.atomic():
        row = LayerProfile.objects.create(
            project=project, name=name.strip(), content=content, layers=answer["layers"],
            batch_size=answer["batch_size"], created_by=user,
        )  # fmt: skip
        record_action(user, "profile.create", row, after={"project": project.name, "layers": len(row.layers)})
    return row


def do_delete_profile(user: User, row: LayerProfile) -> None:
    """Delete a profile and its plans. Jobs that were launched from them keep running."""
    require_permission(user, Permission.SUBMIT, row.project)
    with transaction.atomic():
        record_action(user, "profile.delete", row, before={"project": row.project.name})
        row.delete()


def do_create_plan(user: User, profile: LayerProfile, topology: TopologyInput) -> PipelinePlan:
    """Compute and store the plans of a profile. Must not run in a transaction."""
    require_permission(user, Permission.SUBMIT, profile.project)
    if topology.link_bandwidth is None and topology.pool is not None and topology.nodes > 1:
        topology = replace(topology, link_bandwidth=slowest_link_bandwidth(topology.pool))
    if wrong := _topology_errors(topology):
        raise InvalidRequest(fields=wrong)
    memory_bytes = topology.memory_bytes
    if memory_bytes is None and topology.pool is not None:
        memory_mib = pool_gpu_memory_mib(topology.pool)
        memory_bytes = memory_mib * MIB if memory_mib else None
    answer = query_plan(profile.content, topology.levels(), memory_bytes)
    if answer is None:
        raise ServiceUnavailable(NO_ANSWER)
    if "error" in answer:
        raise Unsatisfiable(answer["error"])
    with transaction.atomic():
        row = PipelinePlan.objects.create(
            profile=profile, pool=topology.pool, nodes=topology.nodes, gpus_per_node=topology.gpus_per_node,
            node_bandwidth=topology.node_bandwidth, memory_bytes=memory_bytes,
            link_bandwidth=topology.link_bandwidth if topology.nodes > 1 else None,
            answer=answer, created_by=user,
        )  # fmt: skip
        record_action(user, "plan.create", row, after={"profile": profile.name, "config": answer["config"]})
    return row


def _topology_errors(topology: TopologyInput) -> dict[str, str]:
    wrong: dict[str, str] = {}
    for field, most in (("nodes", MAX_NODES), ("gpus_per_node", MAX_GPUS_PER_NODE)):
        if not 1 <= getattr(topology, field) <= most:
            wrong[field] = f"Must be between 1 and {most}."
    bandwidths = [("node_bandwidth", topology.node_bandwidth)]
    if topology.nodes > 1:
        bandwidths.append(("link_bandwidth", topology.link_bandwidth or 0.0))
    for field, bandwidth in bandwidths:
        if not MIN_BANDWIDTH <= bandwidth <= MAX_BANDWIDTH:
            wrong[field] = f"Must be between {MIN_BANDWIDTH:g} and {MAX_BANDWIDTH:g} bytes per second."
    if topology.nodes > 1 and topology.link_bandwidth is None:
        wrong["link_bandwidth"] = "Enter the bandwidth between nodes: no link of the pool is measured."
    if topology.memory_bytes is not None and not 0 < topology.memory_bytes < 1e15:
        wrong["memory_bytes"] = "Must be above 0."
    return wrong
