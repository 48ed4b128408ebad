"""Serializers of pools, nodes, GPUs, environments and node operations.

Rows of pools, nodes, GPUs and environments come from ``portal.selectors.nodes.nodes``, with annotations and
prefetched rows. The context of nodes and GPUs maps GPU rows to ids of visible jobs; that of a topology counts
its nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from django.db.models import QuerySet
from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.serializers.references import Reference, UserReference
from portal.domain.nodes.node_breaker import BreakerState, IncidentKind
from portal.domain.nodes.node_operations import OperationKind, RolloutStatus
from portal.domain.states import GpuHealth, GpuState, NodeState, RuntimeKind
from portal.models import AgentRollout as AgentRolloutRow
from portal.models import Gpu as GpuRow
from portal.models import Node as NodeRow
from portal.models import NodeOperation as NodeOperationRow
from portal.models import Project as ProjectRow
from portal.models import Topology as TopologyRow
from portal.selectors.environments.environments import nodes_by_pin
from portal.selectors.nodes.agent_version import has_newer_agent_for
from portal.selectors.nodes.gpu_states import GpuCounts

HEALTH = [word.value for word in GpuHealth]
GPU_STATES = [word.value for word in GpuState]
NODE_STATES = [word.value for word in NodeState]
Holders = Mapping[int, list[str]]
RUNTIMES = [word.value for word in RuntimeKind]


class GpuCountsDetail(ResponseSerializer):
    """Numbers of GPUs by state; each GPU is in one, the first that applies."""

    total = serializers.IntegerField(help_text="All that the last hello of a node listed.")
    held = serializers.IntegerField(help_text="Held by jobs, in whole or in part.")
    unreachable = serializers.IntegerField(help_text="Their node does not answer.")
    unhealthy = serializers.IntegerField(
        help_text="Lost, quarantined, or used by a program that belongs to no job."
    )
    drained = serializers.IntegerField(
        help_text="Their node takes no new jobs: cordoned, drained, enrolling or quarantined."
    )
    reserved = serializers.IntegerField(
        help_text="Their node is reserved now, for projects or for maintenance."
    )
    free = serializers.IntegerField(help_text="A job can start on them now.")


class GpuSummary(ResponseSerializer):
    """A GPU of a node."""

    uuid = serializers.CharField()
    index = serializers.IntegerField()
    model = serializers.CharField()
    memory_mib = serializers.IntegerField()
    simulated = serializers.BooleanField()
    health = serializers.ChoiceField(HEALTH)
    health_reason = serializers.CharField(
        allow_blank=True, help_text="Reason of its health; for a healthy GPU, a warning."
    )
    present = serializers.BooleanField(help_text="Whether the last hello of the node listed it.")
    state = serializers.ChoiceField(
        GPU_STATES, allow_null=True, help_text="As in `gpu_counts` of its node; null if not present."
    )
    foreign_process_owner = serializers.CharField(
        allow_blank=True,
        help_text="Owner of a foreign process on the GPU; no task is placed on it meanwhile.",
    )
    used_milli = serializers.IntegerField(help_text="1000 is the whole GPU.")
    nvlink_island = serializers.IntegerField(
        allow_null=True,
        help_text="GPUs of a node with equal numbers are connected by NVLink; null if unknown.",
    )
    compute_capability = serializers.FloatField(
        allow_null=True, help_text="CUDA compute capability, such as 9.0; null if unknown."
    )
    mig_profile = serializers.CharField(
        allow_blank=True, help_text="Profile of a MIG instance, such as 1g.10gb; blank for a whole GPU."
    )
    driver_reserved_mib = serializers.IntegerField(
        allow_null=True, help_text="GPU memory reserved by the driver; null if unknown."
    )
    bus_id = serializers.CharField(allow_blank=True, help_text="PCIe address; blank if unknown.")
    numa_node = serializers.IntegerField(
        allow_null=True, help_text="NUMA node; null if unknown, or if the node has only one."
    )
    jobs = serializers.ListField(child=serializers.CharField(), help_text="Visible jobs on it.")

    @staticmethod
    def get_state(row: GpuRow, holders: Holders) -> str | None:
        return str(getattr(row, "state")) if row.present else None  # noqa: B009 - an annotation

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
    gpus = serializers.IntegerField()
    gpu_counts = GpuCountsDetail()
    used_milli = serializers.IntegerField()
    gpu_models = serializers.ListField(child=serializers.CharField())
    allow_host_network = serializers.BooleanField(help_text="Gangs may use the host network of its nodes.")
    fabric_interface = serializers.CharField(
        allow_blank=True,
        help_text="Interface or network by which its nodes reach each other; blank if detected by each agent.",
    )
    fabric_network = serializers.CharField(
        allow_blank=True, help_text="Container network that gang tasks join instead of the host network."
    )
    fabric_devices = serializers.ListField(child=serializers.CharField(), help_text="Devices of gang tasks.")
    fabric_adapters = serializers.CharField(
        allow_blank=True, help_text="Value of NCCL_IB_HCA for gang tasks."
    )

    @staticmethod
    def get_gpus(row: Any, context: None) -> int:
        return _pool_counts(row).total

    @staticmethod
    def get_gpu_counts(row: Any, context: None) -> GpuCounts:
        return _pool_counts(row)

    @staticmethod
    def get_gpu_models(row: Any, context: None) -> list[str]:
        return sorted(row.gpu_models or [])


def _pool_counts(row: Any) -> GpuCounts:
    return GpuCounts(**(row.gpus_by_state or {}))


class NodeLink(ResponseSerializer):
    """The network between two nodes, as last measured."""

    node_a = serializers.CharField(source="node_a.name")
    node_b = serializers.CharField(source="node_b.name")
    mib_per_s = serializers.FloatField(help_text="Bandwidth of one TCP stream.")
    connect_ms = serializers.FloatField(allow_null=True, help_text="Time to connect and be greeted.")
    measured_at = serializers.DateTimeField()


class NodeBreaker(ResponseSerializer):
    """State of a node's circuit breaker."""

    state = serializers.ChoiceField(
        [phase.value for phase in BreakerState],
        source="breaker_state",
        help_text="A quarantined node gets no new work; a node on probation runs at most one job.",
    )
    cause = serializers.ChoiceField(
        [cause.value for cause in IncidentKind], allow_blank=True, source="breaker_cause"
    )
    message = serializers.CharField(allow_blank=True, source="breaker_message")
    since = serializers.DateTimeField(allow_null=True, source="breaker_since")
    probe_at = serializers.DateTimeField(
        allow_null=True,
        help_text="Start of the probation; null if not quarantined, or if quarantined until the cause is removed.",
    )
    trip_count = serializers.IntegerField(
        help_text="Number of recent quarantines; each is twice as long as the previous one."
    )


class Node(Reference):
    """A node with its GPUs."""

    pool = Reference()
    state = serializers.ChoiceField(NODE_STATES)
    state_reason = serializers.CharField(allow_blank=True)
    reachable = serializers.BooleanField()
    unreachable_since = serializers.DateTimeField(allow_null=True)
    status_message = serializers.CharField(allow_blank=True)
    unreachable_code = serializers.CharField(
        allow_blank=True, help_text="Such as `host_key_mismatch`; blank if reachable or unknown."
    )
    breaker = NodeBreaker(source="*")
    clock_skew_s = serializers.FloatField(
        allow_null=True,
        help_text="Clock of the node minus clock of the portal; null if unknown. Pages warn above 2 s.",
    )
    simulated = serializers.BooleanField()
    runtime = serializers.ChoiceField(RUNTIMES)
    agent_version = serializers.CharField(allow_blank=True)
    agent_program = serializers.CharField(
        allow_null=True, help_text="SHA-256 of the running agent; null if not reported."
    )
    agent_newer = serializers.BooleanField(help_text="The portal has a newer agent for it.")
    last_seen_at = serializers.DateTimeField(allow_null=True)
    cpu_milli = serializers.IntegerField()
    memory_mib = serializers.IntegerField()
    labels = serializers.DictField(
        child=serializers.CharField(), help_text="Label keys and values, such as its position in a topology."
    )
    interface = serializers.CharField(
        allow_null=True,
        help_text="Interface by which ranks on other nodes reach ranks on this one; null if unknown.",
    )
    address = serializers.CharField(allow_null=True, help_text="Address of this interface.")
    interface_chosen = serializers.BooleanField(help_text="Whether an administrator chose the interface.")
    missing_requirements = serializers.CharField(
        allow_blank=True,
        help_text="Requirements of its pool for multi-node gangs that it does not meet, as a message.",
    )
    version_warnings = serializers.ListField(
        child=serializers.CharField(), help_text="A message for each program whose version is too old."
    )
    gpu_counts = GpuCountsDetail()
    gpus = GpuSummary(many=True)

    @staticmethod
    def get_gpu_counts(row: NodeRow, holders: Holders) -> GpuCounts:
        return GpuCounts(**Counter(str(getattr(gpu, "state")) for gpu in row.gpus.all() if gpu.present))  # noqa: B009

    @staticmethod
    def get_agent_program(row: NodeRow, holders: Holders) -> str | None:
        digest: str | None = row.agent_info.get("agent_digest")
        return digest

    @staticmethod
    def get_agent_newer(row: NodeRow, holders: Holders) -> bool:
        return has_newer_agent_for(row)

    @staticmethod
    def get_interface(row: NodeRow, holders: Holders) -> str | None:
        return reached.interface if (reached := row.gang_address(row.pool.fabric)) else None

    @staticmethod
    def get_address(row: NodeRow, holders: Holders) -> str | None:
        return reached.address if (reached := row.gang_address(row.pool.fabric)) else None

    @staticmethod
    def get_interface_chosen(row: NodeRow, holders: Holders) -> bool:
        return bool(row.gang_interface)

    @staticmethod
    def get_version_warnings(row: NodeRow, holders: Holders) -> list[str]:
        return list(row.agent_info.get("version_warnings", ()))


class Topology(Reference):
    """Levels of distance between nodes, read from their labels, such as block and rack."""

    levels = serializers.ListField(child=serializers.CharField(), help_text="Label keys, outermost first.")
    nodes = serializers.IntegerField(help_text="Number of nodes with the label of the outermost level.")

    @staticmethod
    def get_nodes(row: TopologyRow, count_nodes: Callable[[TopologyRow], int]) -> int:
        return count_nodes(row)


class ReturningNode(Node):
    """A node that returns to service."""

    operation = serializers.CharField(
        allow_null=True,
        help_text="The check that decides, under operations/; null if the node is already in service.",
    )


class HostKey(ResponseSerializer):
    """A public key of a node's sshd."""

    key_type = serializers.CharField(help_text="Such as ssh-ed25519.")
    fingerprint = serializers.CharField(help_text="SHA256 fingerprint as `ssh-keygen -l` prints it.")


class HostKeyChange(ResponseSerializer):
    """A confirmation of a new host key."""

    old_type = serializers.CharField()
    old_fingerprint = serializers.CharField()
    new_type = serializers.CharField()
    new_fingerprint = serializers.CharField()
    actor = UserReference(allow_null=True, help_text="Who confirmed it; null if the account was removed.")
    reason = serializers.CharField()
    changed_at = serializers.DateTimeField()


class NodeHostKeys(ResponseSerializer):
    """The address of a node, its confirmed host key, and the one that it presents now."""

    host = serializers.CharField(source="node.host")
    port = serializers.IntegerField(source="node.port")
    known = HostKey(source="keys.known", help_text="Every connection is pinned to it.")
    presented = HostKey(
        source="keys.presented", allow_null=True, help_text="null if none could be read; see `problem`."
    )
    problem = serializers.CharField(
        source="keys.problem", allow_blank=True, help_text="Why no key could be read."
    )
    changed = serializers.BooleanField(
        source="keys.changed", help_text="The presented key is not the confirmed one."
    )
    changes = HostKeyChange(many=True, help_text="The latest confirmations, newest first.")


class DrainedJob(ResponseSerializer):
    """A job with tasks on a node."""

    job = serializers.CharField(source="job.public_id")
    name = serializers.CharField(source="job.name")
    kind = serializers.CharField(source="job.kind")
    owner = serializers.CharField(source="job.owner.username")
    project = serializers.CharField(source="job.project.name")
    gpu_milli = serializers.IntegerField(source="milli", help_text="Held on this node.")
    lost_gpu_seconds = serializers.FloatField(
        help_text="GPU time that is lost if it is stopped now; 0 for workspaces and services."
    )
    saved_at = serializers.DateTimeField(allow_null=True, help_text="Its last valid checkpoint.")
    ends_at = serializers.DateTimeField(allow_null=True, help_text="When its time limit ends it.")
    is_stopping = serializers.BooleanField()
    moves_until = serializers.DateTimeField(
        allow_null=True, help_text="It is requeued after its next checkpoint, at this time at the latest."
    )


class NodeDrain(ResponseSerializer):
    """What a drain of a node would stop."""

    state = serializers.ChoiceField(NODE_STATES, source="node.state")
    jobs = DrainedJob(many=True)


class NodeScript(ResponseSerializer):
    """The script that sets up a node."""

    script = serializers.CharField(help_text="POSIX shell; run it as root on the node.")


class OperationStep(ResponseSerializer):
    """One step of an operation on a node."""

    name = serializers.CharField()
    ok = serializers.BooleanField()
    message = serializers.CharField(allow_blank=True)
    seconds = serializers.FloatField()
    skipped = serializers.BooleanField(
        default=False, help_text="It was not tried, because an earlier step failed; then `ok` is false."
    )


class NodeOperation(ResponseSerializer):
    """An operation on a node, such as a test or an upgrade, with its finished steps."""

    id = serializers.CharField(source="public_id")
    kind = serializers.ChoiceField([act.value for act in OperationKind])
    ok = serializers.BooleanField(allow_null=True, help_text="null while in progress.")
    started_at = serializers.DateTimeField()
    finished_at = serializers.DateTimeField(allow_null=True)
    steps = OperationStep(many=True)


class AgentRolloutNode(ResponseSerializer):
    """One node of a rollout."""

    node = Reference()
    operation = serializers.CharField(
        source="public_id", help_text="The operation on this node, under operations/."
    )
    state = serializers.ChoiceField([turn.value for turn in RolloutStatus], source="rollout_status.value")


class AgentRollout(ResponseSerializer):
    """An upgrade of many nodes: first one node, then several in parallel, until one fails."""

    id = serializers.CharField(source="public_id")
    ok = serializers.BooleanField(allow_null=True, help_text="null while in progress.")
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
    nodes = serializers.ListField(child=serializers.CharField(), help_text="Names of the nodes.")


class Environment(Reference):
    """An approved image or virtual environment for jobs."""

    title = serializers.CharField()
    description = serializers.CharField(allow_blank=True)
    runtime = serializers.ChoiceField(RUNTIMES)
    image = serializers.CharField(allow_blank=True)
    image_digest = serializers.CharField(
        allow_blank=True,
        help_text="Image of new jobs: name@sha256:... from a registry, or sha256:... (the digest of its "
        "configuration) if it was loaded. Blank until nodes agree on it; each job runs the image that the "
        "tag names on the node of its first start.",
    )
    image_resolved_at = serializers.DateTimeField(allow_null=True)
    image_resolved_by = serializers.CharField(
        allow_blank=True,
        help_text="The nodes that agreed on image_digest, or the administrator who chose it.",
    )
    image_claims = ImageClaim(
        many=True,
        help_text="Images that nodes report for its tag. An image other than image_digest runs only after "
        "update-image/.",
    )
    min_driver = serializers.CharField(
        allow_blank=True,
        help_text="Oldest NVIDIA driver of nodes for jobs with GPUs; blank for any.",
    )
    image_cuda = serializers.CharField(
        allow_blank=True,
        help_text="CUDA version that the image requires of drivers; blank if none, or not known yet.",
    )
    min_cuda = serializers.CharField(
        allow_blank=True,
        help_text="Override of image_cuda by an administrator: a version, or none; blank if not overridden.",
    )
    tool = serializers.CharField(
        allow_blank=True, help_text="Tool of workspaces; blank if for batch jobs only."
    )
    enabled = serializers.BooleanField()
    projects = Reference(
        many=True,
        allow_null=True,
        help_text="Visible projects that may run it, with their descendants; null for all.",
    )
    present_nodes = serializers.IntegerField(help_text="Number of nodes that have the image.")
    known_nodes = serializers.IntegerField(help_text="Number of nodes that reported whether they have it.")

    @staticmethod
    def get_image_claims(row: Any, context: None) -> list[dict[str, Any]]:
        return [{"image_digest": pin, "nodes": nodes} for pin, nodes in nodes_by_pin(row.claims).items()]

    @staticmethod
    def get_projects(row: Any, context: None) -> QuerySet[ProjectRow] | None:
        return row.projects.all() if row.limited else None
