"""Serializers of pools, nodes, GPUs, environments, templates and node operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rest_framework import serializers

from portal.api.serializers.references import Reference, reference, timestamp
from portal.domain.node_breaker import BreakerState, IncidentKind
from portal.domain.node_operations import OperationKind, RolloutStatus
from portal.domain.states import GpuHealth, JobKind, NodeState, RuntimeKind
from portal.models import AgentRollout as AgentRolloutRow
from portal.models import Environment as EnvironmentRow
from portal.models import Gpu as GpuRow
from portal.models import Node as NodeRow
from portal.models import NodeOperation as NodeOperationRow
from portal.models import Template as TemplateRow
from portal.models import Topology as TopologyRow
from portal.selectors.environments import nodes_by_pin
from portal.selectors.nodes.agent_version import has_newer_agent_for
from portal.selectors.nodes.gang_address import node_gang_address

HEALTH = [word.value for word in GpuHealth]
NODE_STATES = [word.value for word in NodeState]
RUNTIMES = [word.value for word in RuntimeKind]


class GpuSummary(serializers.Serializer[Any]):
    """A GPU of a node."""

    uuid = serializers.CharField()
    index = serializers.IntegerField()
    model = serializers.CharField()
    memory_mib = serializers.IntegerField()
    simulated = serializers.BooleanField()
    health = serializers.ChoiceField(HEALTH)
    health_reason = serializers.CharField(allow_blank=True, help_text="Of one that is ok: a warning.")
    present = serializers.BooleanField(help_text="The node's last hello named it.")
    foreign_process_owner = serializers.CharField(
        allow_blank=True, help_text="Whose program that is no job's works on it; while so nothing new comes."
    )
    used_milli = serializers.IntegerField(help_text="1000 is all of it.")
    nvlink_island = serializers.IntegerField(
        allow_null=True,
        help_text="GPUs of the node with equal numbers are joined by NVLink; null: not known.",
    )
    compute_capability = serializers.FloatField(allow_null=True, help_text="Such as 9.0; null: not told.")
    mig_profile = serializers.CharField(
        allow_blank=True, help_text="Of a slice, such as 1g.10gb; blank: a whole GPU."
    )
    driver_reserved_mib = serializers.IntegerField(
        allow_null=True, help_text="Of its memory, what the driver keeps for itself; null: not told."
    )
    bus_id = serializers.CharField(allow_blank=True, help_text="Its PCIe address; blank: not told.")
    numa_node = serializers.IntegerField(
        allow_null=True, help_text="The NUMA node it hangs on; null: not told, or there is but one."
    )
    jobs = serializers.ListField(child=serializers.CharField(), help_text="Jobs on it, of those you may see.")


class Gpu(GpuSummary):
    """A GPU with its node and pool."""

    node = Reference()
    pool = Reference()


class Pool(Reference):
    """Nodes that share one quota."""

    engine = serializers.CharField()
    nodes = serializers.IntegerField()
    gpus = serializers.IntegerField()
    used_milli = serializers.IntegerField()
    gpu_models = serializers.ListField(child=serializers.CharField())
    allow_host_network = serializers.BooleanField(help_text="Gangs may use the network of its nodes.")
    fabric_interface = serializers.CharField(
        allow_blank=True, help_text="By it, or in this network, its nodes reach each other."
    )
    fabric_network = serializers.CharField(
        allow_blank=True, help_text="A network of the engine, in place of that of the nodes."
    )
    fabric_devices = serializers.ListField(child=serializers.CharField(), help_text="Devices that these get.")
    fabric_adapters = serializers.CharField(allow_blank=True, help_text="NCCL_IB_HCA of such gangs.")


class NodeBreaker(serializers.Serializer[Any]):
    """State of a node's circuit breaker."""

    state = serializers.ChoiceField(
        [phase.value for phase in BreakerState], help_text="aside: it gets none; trial: it gets one job."
    )
    cause = serializers.ChoiceField([cause.value for cause in IncidentKind], allow_blank=True)
    message = serializers.CharField(allow_blank=True)
    since = serializers.DateTimeField(allow_null=True)
    probe_at = serializers.DateTimeField(allow_null=True, help_text="When it is tried with one job.")
    trip_count = serializers.IntegerField(
        help_text="How often it was aside of late; each time is twice as long."
    )


class Node(Reference):
    """A node with its GPUs."""

    pool = Reference()
    state = serializers.ChoiceField(NODE_STATES)
    state_reason = serializers.CharField(allow_blank=True)
    reachable = serializers.BooleanField()
    unreachable_since = serializers.DateTimeField(allow_null=True)
    status_message = serializers.CharField(allow_blank=True)
    breaker = NodeBreaker()
    clock_skew_s = serializers.FloatField(
        allow_null=True, help_text="Its clock less ours; null: not told. More than 2 s is told on pages."
    )
    simulated = serializers.BooleanField()
    runtime = serializers.ChoiceField(RUNTIMES)
    agent_version = serializers.CharField(allow_blank=True)
    agent_program = serializers.CharField(
        allow_null=True, help_text="SHA-256 of the agent that runs there; null: it does not say."
    )
    agent_newer = serializers.BooleanField(help_text="The portal has another agent for it; upgrade it.")
    last_seen_at = serializers.DateTimeField(allow_null=True)
    cpu_milli = serializers.IntegerField()
    memory_mib = serializers.IntegerField()
    labels = serializers.DictField(child=serializers.CharField(), help_text="Where it stands: key to value.")
    interface = serializers.CharField(
        allow_null=True,
        help_text="By it ranks of gangs on other nodes reach those here; null: none is known.",
    )
    address = serializers.CharField(allow_null=True, help_text="Its address there.")
    interface_chosen = serializers.BooleanField(help_text="true: by an administrator, for this node.")
    missing_requirements = serializers.CharField(
        allow_blank=True, help_text="What it has not of what its pool names for gangs on several nodes."
    )
    version_warnings = serializers.ListField(
        child=serializers.CharField(), help_text="A message for each of its programs that is too old."
    )
    gpus = GpuSummary(many=True)


class Topology(Reference):
    """Levels of distance between nodes, read from their labels, such as block and rack."""

    levels = serializers.ListField(child=serializers.CharField(), help_text="Label keys, outermost first.")
    nodes = serializers.IntegerField(help_text="Nodes that have the label of its outermost level.")


class ReturningNode(Node):
    """A node that returns to service."""

    operation = serializers.CharField(
        allow_null=True, help_text="The check that decides, under checks/; null: it is in service."
    )


class OperationStep(serializers.Serializer[Any]):
    """One step of an operation on a node."""

    name = serializers.CharField()
    ok = serializers.BooleanField()
    message = serializers.CharField(allow_blank=True)
    seconds = serializers.FloatField()


class NodeOperation(serializers.Serializer[Any]):
    """An operation on a node, such as a test or an upgrade, with its finished steps."""

    id = serializers.CharField()
    kind = serializers.ChoiceField([act.value for act in OperationKind])
    ok = serializers.BooleanField(allow_null=True, help_text="null: it has not finished.")
    started_at = serializers.DateTimeField()
    finished_at = serializers.DateTimeField(allow_null=True)
    steps = OperationStep(many=True)


class AgentRolloutNode(serializers.Serializer[Any]):
    """One node of a rollout."""

    node = Reference()
    operation = serializers.CharField(help_text="The act on that node, under checks/.")
    state = serializers.ChoiceField([turn.value for turn in RolloutStatus])


class AgentRollout(serializers.Serializer[Any]):
    """An upgrade of many nodes: first one, then several in parallel, until one fails."""

    id = serializers.CharField()
    ok = serializers.BooleanField(allow_null=True, help_text="null: it has not finished.")
    started_at = serializers.DateTimeField()
    finished_at = serializers.DateTimeField(allow_null=True)
    message = serializers.CharField(allow_blank=True)
    nodes = AgentRolloutNode(many=True)


class ImageClaim(serializers.Serializer[Any]):
    """The image that nodes report under an environment's tag."""

    image_digest = serializers.CharField()
    nodes = serializers.ListField(child=serializers.CharField(), help_text="Names.")


class Environment(Reference):
    """An approved image or virtual environment for jobs."""

    title = serializers.CharField()
    description = serializers.CharField(allow_blank=True)
    runtime = serializers.ChoiceField(RUNTIMES)
    image = serializers.CharField(allow_blank=True)
    image_digest = serializers.CharField(
        allow_blank=True,
        help_text="The one image that new jobs run: name@sha256:... of a registry, or sha256:... (the digest of its "
        "configuration) of one that was loaded. Blank: nodes have not agreed on it yet; each job runs what the tag "
        "names on the node of its first start.",
    )
    image_resolved_at = serializers.DateTimeField(allow_null=True)
    image_resolved_by = serializers.CharField(
        allow_blank=True,
        help_text="The nodes that agreed on image_digest, or the administrator who chose it.",
    )
    image_claims = ImageClaim(
        many=True,
        help_text="What its tag names on nodes, as each reports. An image other than image_digest runs only after "
        "update-image/.",
    )
    min_driver = serializers.CharField(
        allow_blank=True,
        help_text="Jobs with GPUs stay off nodes whose NVIDIA driver is older; blank: any will do.",
    )
    image_cuda = serializers.CharField(
        allow_blank=True,
        help_text="The CUDA version that its image asks of drivers; blank: none, or not known yet.",
    )
    min_cuda = serializers.CharField(
        allow_blank=True,
        help_text="What administrators say in place of image_cuda: a version, or none; blank: what the image says.",
    )
    tool = serializers.CharField(allow_blank=True, help_text="Blank: for batch only.")
    enabled = serializers.BooleanField()
    projects = Reference(
        many=True,
        allow_null=True,
        help_text="Only these and all below them may run it, of those you may see; null: all.",
    )
    present_nodes = serializers.IntegerField(help_text="Nodes that have it already.")
    known_nodes = serializers.IntegerField(help_text="Nodes that were asked.")


class Template(Reference):
    """A prefilled launch form."""

    title = serializers.CharField()
    description = serializers.CharField(allow_blank=True)
    kind = serializers.ChoiceField([kind.value for kind in JobKind])
    environment = Reference(allow_null=True)
    fields = serializers.DictField(  # type: ignore[assignment]
        help_text="Fields of the submit body."
    )


def gpu_summary(row: GpuRow, holders: Mapping[int, list[str]]) -> dict[str, Any]:
    """Return a GPU of a node; ``holders`` maps GPU rows to ids of visible jobs."""
    return {
        "uuid": row.uuid,
        "index": row.index,
        "model": row.model,
        "memory_mib": row.memory_mib,
        "simulated": row.simulated,
        "health": row.health,
        "health_reason": row.health_reason,
        "foreign_process_owner": row.foreign_process_owner,
        "present": row.present,
        "used_milli": row.used_milli,
        "nvlink_island": row.nvlink_island,
        "compute_capability": row.compute_capability,
        "mig_profile": row.mig_profile,
        "driver_reserved_mib": row.driver_reserved_mib,
        "bus_id": row.bus_id,
        "numa_node": row.numa_node,
        "jobs": holders.get(row.pk, []),
    }


def gpu(row: GpuRow, holders: Mapping[int, list[str]]) -> dict[str, Any]:
    return {**gpu_summary(row, holders), "node": reference(row.node), "pool": reference(row.node.pool)}


def pool(row: Any) -> dict[str, Any]:
    """Return a pool with its totals; ``row`` comes from ``list_pools``."""
    return {
        "id": row.public_id,
        "name": row.name,
        "engine": row.engine,
        "nodes": row.node_count,
        "gpus": row.gpu_count,
        "used_milli": row.used_milli,
        "gpu_models": sorted(row.gpu_models or []),
        "allow_host_network": row.allow_host_network,
        "fabric_interface": row.fabric_interface,
        "fabric_network": row.fabric_network,
        "fabric_devices": row.fabric_devices,
        "fabric_adapters": row.fabric_adapters,
    }


def node(row: NodeRow, holders: Mapping[int, list[str]]) -> dict[str, Any]:
    """Return a node with its GPUs, which must be prefetched."""
    return {
        "id": row.public_id,
        "name": row.name,
        "pool": reference(row.pool),
        "state": row.state,
        "state_reason": row.state_reason,
        "reachable": row.reachable,
        "unreachable_since": timestamp(row.unreachable_since),
        "status_message": row.status_message,
        "breaker": {
            "state": row.breaker_state,
            "cause": row.breaker_cause,
            "message": row.breaker_message,
            "since": timestamp(row.breaker_since),
            "probe_at": timestamp(row.probe_at),
            "trip_count": row.trip_count,
        },
        "clock_skew_s": row.clock_skew_s,
        "simulated": row.simulated,
        "runtime": row.runtime,
        "agent_version": row.agent_version,
        "agent_program": row.agent_info.get("agent_digest"),
        "agent_newer": has_newer_agent_for(row),
        "last_seen_at": timestamp(row.last_seen_at),
        "cpu_milli": row.cpu_milli,
        "memory_mib": row.memory_mib,
        "labels": row.labels,
        "interface": reached.interface if (reached := node_gang_address(row, row.pool.fabric)) else None,
        "address": reached.address if reached else None,
        "interface_chosen": bool(row.gang_interface),
        "missing_requirements": row.missing_requirements,
        "version_warnings": list(row.agent_info.get("version_warnings", ())),
        "gpus": [gpu_summary(each, holders) for each in row.gpus.all()],
    }


def topology(row: TopologyRow, nodes: int) -> dict[str, Any]:
    """Return a topology; ``nodes`` is the number of nodes with its labels."""
    return {"id": row.public_id, "name": row.name, "levels": row.levels, "nodes": nodes}


def node_operation(row: NodeOperationRow) -> dict[str, Any]:
    return {
        "id": row.public_id,
        "kind": row.kind,
        "ok": row.ok,
        "started_at": timestamp(row.started_at),
        "finished_at": timestamp(row.finished_at),
        "steps": row.steps,
    }


def agent_rollout(row: AgentRolloutRow) -> dict[str, Any]:
    checks = row.operations.select_related("node").order_by("node__name")
    return {
        "id": row.public_id,
        "ok": row.ok,
        "started_at": timestamp(row.started_at),
        "finished_at": timestamp(row.finished_at),
        "message": row.message,
        "nodes": [
            {"node": reference(check.node), "operation": check.public_id, "state": check.rollout_status.value}
            for check in checks
        ],
    }


def environment(row: EnvironmentRow) -> dict[str, Any]:
    """Return an environment; ``row`` comes from ``list_environments``."""
    return {
        "id": row.public_id,
        "name": row.name,
        "title": row.title,
        "description": row.description,
        "runtime": row.runtime,
        "image": row.image,
        "image_digest": row.image_digest,
        "image_resolved_at": timestamp(row.image_resolved_at),
        "image_resolved_by": row.image_resolved_by,
        "image_claims": [
            {"image_digest": pin, "nodes": nodes}
            for pin, nodes in nodes_by_pin(getattr(row, "claims", ())).items()
        ],
        "min_driver": row.min_driver,
        "image_cuda": row.image_cuda,
        "min_cuda": row.min_cuda,
        "tool": row.tool,
        "enabled": row.enabled,
        "projects": [reference(project) for project in row.projects.all()]
        if getattr(row, "limited", False)
        else None,
        "present_nodes": getattr(row, "present_nodes", 0),
        "known_nodes": getattr(row, "known_nodes", 0),
    }


def template(row: TemplateRow) -> dict[str, Any]:
    return {
        "id": row.public_id,
        "name": row.name,
        "title": row.title,
        "description": row.description,
        "kind": row.kind,
        "environment": reference(row.environment),
        "fields": row.fields,
    }
