"""Pools, nodes, GPUs, links between GPUs, and reservations."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import DateTimeRangeField, RangeOperators
from django.db import models
from django.db.models import F, Q

from portal.domain.nodes.gang_fabric import GangFabric, InterfaceAddress, node_address
from portal.domain.nodes.node_breaker import BreakerState, accepts_another_job
from portal.domain.states import GpuHealth, NodeState, NodeTransport, RuntimeKind
from portal.models.accounts.users import optional_user
from portal.models.columns import flag, one_of, optional_number, optional_text, optional_time
from portal.models.public_id import PublicIdField, slug_validator


class NodePool(models.Model):
    """Similar nodes that share one quota."""

    public_id = PublicIdField()
    name = models.CharField(max_length=63, unique=True, validators=[slug_validator])
    engine = models.CharField(max_length=16, default="ssh", help_text="Node engine; the built-in one is ssh.")
    policy = models.JSONField(
        default=dict, help_text="Scheduler settings that override those of the cluster."
    )
    policy_version = models.PositiveIntegerField(
        default=1, help_text="Incremented by each change; used as the ETag."
    )
    allow_host_network = models.BooleanField(
        default=False, help_text="Tasks of multi-node gangs may use the host network."
    )
    fabric_interface = optional_text(
        50, "Interface or network by which its nodes reach each other; blank: detected by each agent."
    )
    fabric_network = optional_text(63, "Container network that gang tasks join instead of the host network.")
    fabric_devices = models.JSONField(
        default=list, db_default=[], help_text="Devices of gang tasks, such as /dev/infiniband/uverbs0."
    )
    fabric_adapters = optional_text(200, "Value of NCCL_IB_HCA for gang tasks.")
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.name

    @property
    def fabric(self) -> GangFabric:
        """The fabric for multi-node gangs; empty if they may not use a host network."""
        if not self.allow_host_network:
            return GangFabric()
        devices = tuple(self.fabric_devices)
        return GangFabric(self.fabric_interface, self.fabric_network, devices, self.fabric_adapters)


class Node(models.Model):
    """A machine. ``reachable`` is an overlay: an unreachable node keeps its jobs and their GPUs."""

    public_id = PublicIdField()
    name = models.CharField(
        max_length=63, validators=[slug_validator], help_text="Unique among the nodes that are not retired."
    )
    pool = models.ForeignKey(NodePool, on_delete=models.PROTECT, related_name="nodes")
    state = models.CharField(max_length=12, default=NodeState.ENROLLING.value)
    state_reason = models.CharField(max_length=500, blank=True)
    transport = models.CharField(max_length=8, default=NodeTransport.SSH.value)
    host = models.CharField(max_length=255, blank=True)
    port = models.PositiveIntegerField(default=22)
    ssh_user = models.CharField(max_length=32, default="fairway")
    host_key = models.CharField(max_length=2000, blank=True, help_text="Pinned host key: 'type base64'.")
    runtime = models.CharField(max_length=8, default=RuntimeKind.PODMAN.value)
    settings = models.JSONField(default=dict, help_text="Settings of a local agent; empty for SSH nodes.")
    labels = models.JSONField(
        default=dict, blank=True, help_text="Label keys and values, such as its position in a topology."
    )
    gang_interface = optional_text(15, "Interface for the rendezvous of gangs; blank: detected by the agent.")
    missing_requirements = optional_text(
        1000, "Requirements of its pool for multi-node gangs that it does not meet, as a message."
    )
    slow_network = flag(
        "Its measured links are much slower than those of its pool; gangs prefer other nodes."
    )
    simulated = models.BooleanField(default=False)
    reachable = models.BooleanField(default=False)
    unreachable_since = optional_time()
    status_message = models.CharField(
        max_length=1000, blank=True, help_text="The current problem as a message."
    )
    unreachable_code = optional_text(
        32, "Code of the error that keeps it unreachable, such as host_key_mismatch; blank: none is known."
    )
    last_seen_at = optional_time()
    reconciled_at = optional_time()
    boot_id = models.CharField(max_length=64, blank=True)
    addresses = models.JSONField(
        null=True,
        blank=True,
        help_text="Its addresses as reported at enrolment or return to service; null: not reported yet.",
    )
    next_hello_is_first = flag(
        "Its host key or address was changed: its next hello is accepted like that of a new node."
    )
    agent_version = models.CharField(max_length=32, blank=True)
    agent_info = models.JSONField(
        default=dict, help_text="The agent's last hello: versions, runtimes, disk, clock."
    )
    cpu_milli = models.PositiveIntegerField(default=0)
    memory_mib = models.PositiveIntegerField(default=0)
    clock_skew_s = models.FloatField(null=True, blank=True)
    breaker_state = models.CharField(
        max_length=12, default=BreakerState.HEALTHY.value, db_default=BreakerState.HEALTHY.value
    )
    breaker_cause = optional_text(16)
    breaker_message = optional_text(500, "Why it is quarantined.")
    breaker_since = optional_time()
    probe_at = optional_time("Quarantined until this time; null: until the cause is removed.")
    trip_count = models.PositiveIntegerField(
        default=0, db_default=0, help_text="Number of recent quarantines."
    )
    tripped_at = optional_time()
    probation_attempt = models.ForeignKey(
        "Attempt",
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="The attempt that probes the node.",
    )
    storage_asked_at = optional_time("When it was last asked for the usage of its folders.")
    storage_problem = optional_text(300, "Why that answer is missing or incomplete.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            one_of("breaker_state", BreakerState, "node_breaker_state"),
            one_of("state", NodeState, "node_state"),
            one_of("transport", NodeTransport, "node_link"),
            one_of("runtime", RuntimeKind, "node_runtime"),
            models.CheckConstraint(
                condition=Q(ssh_user__regex=r"^[a-z][a-z0-9-]{0,30}$"), name="node_ssh_user"
            ),
            models.UniqueConstraint(fields=["name"], name="node_name_once", condition=~Q(state="retired")),
            models.UniqueConstraint(
                fields=["host", "port"],
                name="node_address_once",
                condition=~Q(host="") & ~Q(state="retired"),
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def gang_address(self, fabric: GangFabric) -> InterfaceAddress | None:
        """Return where other nodes reach it: by its override, its pool's setting, or the agent's choice."""
        return node_address(self.agent_info.get("interfaces", ()), self.gang_interface, fabric.interface)

    @property
    def accepts_work(self) -> bool:
        """True if in service and not quarantined, whether or not the node answers."""
        return self.state == NodeState.READY.value and accepts_another_job(
            self.breaker_state, self.probation_attempt_id
        )


class HostKeyChange(models.Model):
    """A confirmation of a new host key of a node; the key before it is not accepted any more."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="host_key_changes")
    old_key = models.CharField(max_length=2000, help_text="'type base64'.")
    new_key = models.CharField(max_length=2000, help_text="'type base64'.")
    actor = optional_user(models.SET_NULL)
    reason = models.CharField(max_length=500)
    changed_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-id"]


class Topology(models.Model):
    """The levels of a network fabric: keys of node labels, outermost first, such as block and rack."""

    public_id = PublicIdField()
    name = models.CharField(max_length=63, unique=True, validators=[slug_validator])
    levels = models.JSONField(default=list, help_text="Label keys, outermost first.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "topologies"

    def __str__(self) -> str:
        return self.name


class Gpu(models.Model):
    """A whole GPU or a MIG slice. ``used_milli`` changes only together with an Allocation (law 4)."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="gpus")
    uuid = models.CharField(max_length=96, unique=True)
    index = models.PositiveIntegerField()
    model = models.CharField(max_length=100)
    memory_mib = models.PositiveIntegerField()
    simulated = models.BooleanField(default=False)
    health = models.CharField(max_length=12, default=GpuHealth.OK.value)
    health_reason = models.CharField(
        max_length=500, blank=True, help_text="Reason of its health; for a healthy GPU, a warning."
    )
    present = models.BooleanField(default=True, help_text="Whether the last hello of the node listed it.")
    foreign_process_owner = optional_text(
        200, "Owner of a foreign process on the GPU; no task is placed on it meanwhile."
    )
    used_milli = models.PositiveIntegerField(default=0)
    nvlink_island = models.PositiveSmallIntegerField(
        null=True,
        blank=True,
        help_text="GPUs of a node with equal numbers are connected by NVLink; null: unknown.",
    )
    compute_capability = models.FloatField(
        null=True, blank=True, help_text="Such as 9.0; null: not reported."
    )
    mig_profile = models.CharField(
        max_length=32, blank=True, help_text="Profile of a MIG slice, such as 1g.10gb; blank: a whole GPU."
    )
    driver_reserved_mib = optional_number("Memory reserved by the driver; null: not reported.")
    bus_id = models.CharField(max_length=32, blank=True, help_text="PCIe address; blank: not reported.")
    numa_node = models.PositiveSmallIntegerField(
        null=True, blank=True, help_text="NUMA node of the GPU; null: not reported, or only one exists."
    )
    ecc_uncorrected = models.PositiveBigIntegerField(
        null=True,
        blank=True,
        help_text="Uncorrected memory errors since the driver was loaded, as of the last hello.",
    )

    class Meta:
        ordering = ["node_id", "index"]
        constraints = [
            models.CheckConstraint(
                condition=Q(used_milli__gte=0, used_milli__lte=1000), name="gpu_used_milli"
            ),
            one_of("health", GpuHealth, "gpu_health"),
        ]
        indexes = [
            models.Index(fields=["mig_profile"], name="gpu_by_mig_profile", condition=~Q(mig_profile=""))
        ]


class GpuLink(models.Model):
    """A connection of two GPUs of a node: a row for PCIe and, if they are connected by NVLink, another one."""

    kind = models.CharField(max_length=8)
    gpu_a = models.ForeignKey(Gpu, null=True, on_delete=models.CASCADE, related_name="+")
    gpu_b = models.ForeignKey(Gpu, null=True, on_delete=models.CASCADE, related_name="+")
    nvlink_count = models.PositiveSmallIntegerField(
        null=True, help_text="Number of NVLinks; null: not reported."
    )
    level = models.CharField(
        max_length=12,
        blank=True,
        help_text="Topology level of the PCIe connection, as reported by the driver.",
    )

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(kind__in=["nvlink", "pcie"]), name="gpu_link_kind"),
            models.UniqueConstraint(fields=["kind", "gpu_a", "gpu_b"], name="gpu_link_once"),
        ]


class NodeLink(models.Model):
    """The network between two nodes, as last measured before a gang started on both; ``node_a`` has the lower id."""

    node_a = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="+")
    node_b = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="+")
    mib_per_s = models.FloatField(help_text="Bandwidth of one TCP stream.")
    connect_ms = models.FloatField(null=True, help_text="Time to connect and be greeted.")
    measured_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(node_a__lt=F("node_b")), name="node_link_order"),
            models.UniqueConstraint(fields=["node_a", "node_b"], name="node_link_once"),
        ]


class Reservation(models.Model):
    """Nodes of a pool reserved for projects and their descendants; without projects, for maintenance."""

    public_id = PublicIdField()
    name = models.CharField(max_length=100)
    pool = models.ForeignKey(NodePool, on_delete=models.PROTECT, related_name="reservations")
    projects: models.ManyToManyField[Any, Any] = models.ManyToManyField(
        "Project", blank=True, related_name="reservations"
    )
    period = DateTimeRangeField(help_text="Half-open interval: the end is excluded.")
    reason = models.CharField(max_length=500, blank=True)
    drain_at_start = flag("Jobs that still run on its nodes when it starts are preempted.")
    drained_at = optional_time()
    version = models.PositiveIntegerField(
        default=1, help_text="Incremented by each change; used as the ETag."
    )
    created_by = optional_user(models.SET_NULL)
    created_at = models.DateTimeField(auto_now_add=True)
    cancelled_at = optional_time()

    def __str__(self) -> str:
        return self.name

    @property
    def starts_at(self) -> dt.datetime:
        begin: dt.datetime = self.period.lower
        return begin

    @property
    def ends_at(self) -> dt.datetime:
        end: dt.datetime = self.period.upper
        return end


class ReservationNode(models.Model):
    """A node of a reservation; the database prevents overlapping live reservations of a node (law 4)."""

    reservation = models.ForeignKey(Reservation, on_delete=models.CASCADE, related_name="reservation_nodes")
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="reservation_nodes")
    period = DateTimeRangeField(help_text="Period of its reservation.")
    live = models.BooleanField(default=True, help_text="False: the reservation is cancelled.")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["reservation", "node"], name="reservation_node_once"),
            ExclusionConstraint(
                name="reservation_node_no_overlap",
                expressions=[("node", RangeOperators.EQUAL), ("period", RangeOperators.OVERLAPS)],
                condition=Q(live=True),
            ),
        ]
