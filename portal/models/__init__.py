"""Database tables, one module per resource."""

from portal.models.alerts import GpuAlert, InvalidRow
from portal.models.audit import AuditEntry
from portal.models.credentials import ApiToken, Invitation, MagicLink
from portal.models.environments import Environment, ImagePresence, Template
from portal.models.forecasts import Forecast
from portal.models.idempotency import IdempotencyKey
from portal.models.job_signals import JobSignal
from portal.models.jobs import Allocation, Attempt, Dependency, Job, JobEvent, Rendezvous, Task
from portal.models.node_incidents import NodeIncident
from portal.models.node_operations import AgentRollout
from portal.models.nodes import (
    Gpu,
    GpuLink,
    Node,
    NodeOperation,
    NodePool,
    Reservation,
    ReservationNode,
    Topology,
)
from portal.models.orphan_containers import OrphanContainer
from portal.models.progress import AttemptProgress
from portal.models.projects import Membership, Project, Quota, QuotaChange
from portal.models.registries import RegistryLogin
from portal.models.scheduler import (
    ClusterSettings,
    Cycle,
    EngineQuery,
    FailedCycle,
    JobVerdict,
    Lease,
    OutboxMessage,
    SchedulerCounters,
)
from portal.models.secrets import Secret
from portal.models.sessions import BrowserSession
from portal.models.terminals import Terminal
from portal.models.time_limit_extensions import TimeLimitExtension
from portal.models.usage import AttemptEnergy, NodeMetricsMinute, UsageInterval
from portal.models.users import User
from portal.models.volumes import Volume
from portal.models.workspace_activity import IdleExemption, WorkspaceActivity
from portal.models.workspaces import WorkspaceSession, WorkspaceTicket

__all__ = [
    "AgentRollout",
    "Allocation",
    "ApiToken",
    "Attempt",
    "AttemptEnergy",
    "AttemptProgress",
    "AuditEntry",
    "BrowserSession",
    "ClusterSettings",
    "Cycle",
    "Dependency",
    "EngineQuery",
    "Environment",
    "FailedCycle",
    "Forecast",
    "Gpu",
    "GpuAlert",
    "GpuLink",
    "IdempotencyKey",
    "IdleExemption",
    "ImagePresence",
    "InvalidRow",
    "Invitation",
    "Job",
    "JobEvent",
    "JobSignal",
    "JobVerdict",
    "Lease",
    "MagicLink",
    "Membership",
    "Node",
    "NodeIncident",
    "NodeMetricsMinute",
    "NodeOperation",
    "NodePool",
    "OrphanContainer",
    "OutboxMessage",
    "Project",
    "Quota",
    "QuotaChange",
    "RegistryLogin",
    "Rendezvous",
    "Reservation",
    "ReservationNode",
    "SchedulerCounters",
    "Secret",
    "Task",
    "Template",
    "Terminal",
    "TimeLimitExtension",
    "Topology",
    "UsageInterval",
    "User",
    "Volume",
    "WorkspaceActivity",
    "WorkspaceSession",
    "WorkspaceTicket",
]
