"""The record: every noun of Fairway as a table, a file a noun."""

from portal.models.access_tokens import ApiToken, Invitation, MagicLink
from portal.models.alarms import GpuAlert, InvalidRow
from portal.models.audit import AuditEntry
from portal.models.cluster import Gpu, GpuLink, Node, NodeOperation, NodePool, Reservation, ReservationNode, Topology
from portal.models.engine import (
    ClusterSettings,
    Cycle,
    FailedCycle,
    Lease,
    OutboxMessage,
    EngineQuery,
    JobVerdict,
    SchedulerCounters,
)
from portal.models.environments import Environment, ImagePresence, Template
from portal.models.extensions import TimeLimitExtension
from portal.models.forecasts import Forecast
from portal.models.idempotency import IdempotencyKey
from portal.models.idle import WorkspaceActivity, IdleExemption
from portal.models.jobs import Allocation, Attempt, Dependency, Job, JobEvent, Rendezvous, Task
from portal.models.people import User
from portal.models.progress import AttemptProgress
from portal.models.projects import Membership, Project, Quota, QuotaChange
from portal.models.registries import RegistryLogin
from portal.models.restored import OrphanContainer
from portal.models.rollouts import AgentRollout
from portal.models.secrets import Secret
from portal.models.sent_signals import JobSignal
from portal.models.sessions import BrowserSession
from portal.models.terminals import Terminal
from portal.models.trouble import NodeIncident
from portal.models.usage import AttemptEnergy, UsageInterval, NodeMetricsMinute
from portal.models.volumes import Volume
from portal.models.workspaces import WorkspaceSession, WorkspaceTicket

__all__ = [
    "WorkspaceActivity",
    "Allocation",
    "ApiToken",
    "Attempt",
    "AttemptEnergy",
    "AuditEntry",
    "BrowserSession",
    "ClusterSettings",
    "Cycle",
    "Dependency",
    "Environment",
    "ImagePresence",
    "IdleExemption",
    "TimeLimitExtension",
    "FailedCycle",
    "Forecast",
    "Gpu",
    "GpuAlert",
    "IdempotencyKey",
    "InvalidRow",
    "Invitation",
    "Job",
    "JobEvent",
    "Lease",
    "GpuLink",
    "Membership",
    "Node",
    "NodeOperation",
    "NodePool",
    "NodeIncident",
    "OutboxMessage",
    "AttemptProgress",
    "Project",
    "EngineQuery",
    "Quota",
    "QuotaChange",
    "RegistryLogin",
    "Rendezvous",
    "Reservation",
    "ReservationNode",
    "AgentRollout",
    "Secret",
    "JobSignal",
    "MagicLink",
    "JobVerdict",
    "Task",
    "Template",
    "Terminal",
    "Topology",
    "SchedulerCounters",
    "OrphanContainer",
    "UsageInterval",
    "NodeMetricsMinute",
    "User",
    "Volume",
    "WorkspaceSession",
    "WorkspaceTicket",
]
