"""Serializers of pools, nodes, GPUs, environments, templates and node operations.

Rows of pools, nodes, GPUs and environments come from ``portal.selectors.nodes.nodes``, with annotations and
prefetched rows. The context of nodes and GPUs maps GPU rows to ids of visible jobs; that of a topology counts
its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django.db.models import QuerySet
from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.serializers.references import Reference
from portal.domain.node_breaker import BreakerState, IncidentKind
from portal.domain.node_operations import OperationKind, RolloutStatus
from portal.domain.states import GpuHealth, JobKind, NodeState, RuntimeKind
from portal.models import AgentRollout as AgentRolloutRow
from portal.models import Gpu as GpuRow
from portal.models import Node as NodeRow
from portal.models import NodeOperation as NodeOperationRow
from portal.models import Project as ProjectRow
from portal.models import Topology as TopologyRow
from portal.selectors.environments import nodes_by_pin
from portal.selectors.nodes.agent_version import has_newer_agent_for
from portal.selectors.nodes.gang_address import node_gang_address

HEALTH = [word.value for word in GpuHealth]
NODE_STATES = [word.value for word in NodeState]
Holders = Mapping[int, list[str]]
RUNTIMES = [word.value for word in RuntimeKind]


class GpuSummary(ResponseSerializer):
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

    @staticmethod
    def get_jobs(row: GpuRow, holders: Holders) -> list[str]:
        return holders.get(row.pk, [])


class Gpu(GpuSummary):
    """A GPU with its node and pool."""

    node = Reference()
    pool = Reference(source="node.pool")


class Pool(Reference):
    """Nodes that share one quota."""

    engine = serializers.CharField()
    nodes = serializers.IntegerField(source="node_count")
    gpus = serializers.IntegerField(source="gpu_count")
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

    @staticmethod
    def get_gpu_models(row: Any, context: None) -> list[str]:
        return sorted(row.gpu_models or [])


class NodeBreaker(ResponseSerializer):
    """State of a node's circuit breaker."""

    state = serializers.ChoiceField(
        [phase.value for phase in BreakerState],
        source="breaker_state",
        help_text="aside: it gets none; trial: it gets one job.",
    )
    cause = serializers.ChoiceField(
        [cause.value for cause in IncidentKind], allow_blank=True, source="breaker_cause"
    )
    message = serializers.CharField(allow_blank=True, source="breaker_message")
    since = serializers.DateTimeField(allow_null=True, source="breaker_since")
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
    breaker = NodeBreaker(source="*")
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

    @staticmethod
    def get_agent_program(row: NodeRow, holders: Holders) -> str | None:
        digest: str | None = row.agent_info.get("agent_digest")
        return digest

    @staticmethod
    def get_agent_newer(row: NodeRow, holders: Holders) -> bool:
        return has_newer_agent_for(row)

    @staticmethod
    def get_interface(row: NodeRow, holders: Holders) -> str | None:
        return reached.interface if (reached := node_gang_address(row, row.pool.fabric)) else None

    @staticmethod
    def get_address(row: NodeRow, holders: Holders) -> str | None:
        return reached.address if (reached := node_gang_address(row, row.pool.fabric)) else None

    @staticmethod
    def get_interface_chosen(row: NodeRow, holders: Holders) -> bool:
        return bool(row.gang_interface)

    @staticmethod
    def get_version_warnings(row: NodeRow, holders: Holders) -> list[str]:
        return list(row.agent_info.get("version_warnings", ()))


class Topology(Reference):
    """Levels of distance between nodes, read from their labels, such as block and rack."""

    levels = serializers.ListField(child=serializers.CharField(), help_text="Label keys, outermost first.")
    nodes = serializers.IntegerField(help_text="Nodes that have the label of its outermost level.")

    @staticmethod
    def get_nodes(row: TopologyRow, count_nodes: Callable[[TopologyRow], int]) -> int:
        return count_nodes(row)


class ReturningNode(Node):
    """A node that returns to service."""

    operation = serializers.CharField(
        allow_null=True, help_text="The check that decides, under checks/; null: it is in service."
    )


class OperationStep(ResponseSerializer):
    """One step of an operation on a node."""

    name = serializers.CharField()
    ok = serializers.BooleanField()
    message = serializers.CharField(allow_blank=True)
    seconds = serializers.FloatField()


class NodeOperation(ResponseSerializer):
    """An operation on a node, such as a test or an upgrade, with its finished steps."""

    id = serializers.CharField(source="public_id")
    kind = serializers.ChoiceField([act.value for act in OperationKind])
    ok = serializers.BooleanField(allow_null=True, help_text="null: it has not finished.")
    started_at = serializers.DateTimeField()
    finished_at = serializers.DateTimeField(allow_null=True)
    steps = OperationStep(many=True)


class AgentRolloutNode(ResponseSerializer):
    """One node of a rollout."""

    node = Reference()
    operation = serializers.CharField(source="public_id", help_text="The act on that node, under checks/.")
    state = serializers.ChoiceField([turn.value for turn in RolloutStatus], source="rollout_status.value")


class AgentRollout(ResponseSerializer):
    """An upgrade of many nodes: first one, then several in parallel, until one fails."""

    id = serializers.CharField(source="public_id")
    ok = serializers.BooleanField(allow_null=True, help_text="null: it has not finished.")
    started_at = serializers.DateTimeField()
    finished_at = serializers.DateTimeField(allow_null=True)
    message = serializers.CharField(allow_blank=True)
    nodes = AgentRolloutNode(many=True)

    @staticmethod
    def get_nodes(row: AgentRolloutRow, context: None) -> QuerySet[NodeOperationRow]:
        return row.operations.select_related("node").order_by("node__name")


class ImageClaim(ResponseSerializer):
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

    @staticmethod
    def get_image_claims(row: Any, context: None) -> list[dict[str, Any]]:
        return [{"image_digest": pin, "nodes": nodes} for pin, nodes in nodes_by_pin(row.claims).items()]

    @staticmethod
    def get_projects(row: Any, context: None) -> QuerySet[ProjectRow] | None:
        return row.projects.all() if row.limited else None


class Template(Reference):
    """A prefilled launch form."""

    title = serializers.CharField()
    description = serializers.CharField(allow_blank=True)
    kind = serializers.ChoiceField([kind.value for kind in JobKind])
    environment = Reference(allow_null=True)
    fields = serializers.DictField(  # type: ignore[assignment]
        help_text="Fields of the submit body."
    )
