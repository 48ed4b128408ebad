"""The record: every noun of Fairway as a table, a file a noun."""

from portal.models.access_tokens import ApiToken, Invitation, SignInLink
from portal.models.alarms import GpuAlarm, InvalidRow
from portal.models.audit import AuditEntry
from portal.models.cluster import Gpu, Link, Node, NodeCheck, NodePool, Reservation, ReservedNode, Topology
from portal.models.engine import (
    ClusterSettings,
    Cycle,
    FailedCycle,
    Lease,
    Outbox,
    Question,
    Standing,
    Totals,
)
from portal.models.environments import Environment, EnvironmentOnNode, Template
from portal.models.extensions import Extension
from portal.models.forecasts import Forecast
from portal.models.idempotency import IdempotencyKey
from portal.models.idle import Activity, Excuse
from portal.models.jobs import Allocation, Attempt, Dependency, Job, JobEvent, Rendezvous, Task
from portal.models.people import User
from portal.models.progress import Progress
from portal.models.projects import Membership, Project, Quota, QuotaChange
from portal.models.registries import RegistryLogin
from portal.models.restored import UnknownContainer
from portal.models.rollouts import Rollout
from portal.models.secrets import Secret
from portal.models.sent_signals import SentSignal
from portal.models.sessions import BrowserSession
from portal.models.terminals import Terminal
from portal.models.trouble import NodeTrouble
from portal.models.usage import AttemptEnergy, UsageLedger, UsageMinute
from portal.models.volumes import Volume
from portal.models.workspaces import WorkspaceSession, WorkspaceTicket

__all__ = [
    "Activity",
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
    "EnvironmentOnNode",
    "Excuse",
    "Extension",
    "FailedCycle",
    "Forecast",
    "Gpu",
    "GpuAlarm",
    "IdempotencyKey",
    "InvalidRow",
    "Invitation",
    "Job",
    "JobEvent",
    "Lease",
    "Link",
    "Membership",
    "Node",
    "NodeCheck",
    "NodePool",
    "NodeTrouble",
    "Outbox",
    "Progress",
    "Project",
    "Question",
    "Quota",
    "QuotaChange",
    "RegistryLogin",
    "Rendezvous",
    "Reservation",
    "ReservedNode",
    "Rollout",
    "Secret",
    "SentSignal",
    "SignInLink",
    "Standing",
    "Task",
    "Template",
    "Terminal",
    "Topology",
    "Totals",
    "UnknownContainer",
    "UsageLedger",
    "UsageMinute",
    "User",
    "Volume",
    "WorkspaceSession",
    "WorkspaceTicket",
]
