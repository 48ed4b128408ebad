"""Database tables, one module per subject."""

from portal.models.alerts import GpuAlert, InvalidRow
from portal.models.announcements import Announcement
from portal.models.checkpoints import AttemptObservation, AttemptWork, Checkpoint, RankProgress
from portal.models.credentials import ApiToken, BrowserSession, Invitation, MagicLink
from portal.models.data_sets import DataSet, DataSetVersion
from portal.models.environments import Environment, ImagePresence, SavedImage
from portal.models.failure_rules import FailureRule
from portal.models.job_requests import FileRequest, JobSignal
from portal.models.job_views import SavedJobView
from portal.models.jobs import Allocation, Attempt, Dependency, Job, JobEvent, Rendezvous, Task
from portal.models.node_incidents import NodeIncident, OrphanContainer
from portal.models.node_operations import AgentRollout, NodeOperation
from portal.models.nodes import (
    Gpu,
    GpuLink,
    HostKeyChange,
    Node,
    NodeLink,
    NodePool,
    Reservation,
    ReservationNode,
    Topology,
)
from portal.models.notices import Notice, NoticeDelivery, NoticePreferences, NoticeWebhook
from portal.models.plans import LayerProfile, PipelinePlan, ProfileRun
from portal.models.projects import Membership, Project
from portal.models.quotas import Quota, QuotaAddition, QuotaChange, QuotaReplay
from portal.models.reproduction import CodeArchive, EnvironmentRecord, JobAnnotation, Rerun
from portal.models.request_records import AuditEntry, BulkOperation, IdempotencyKey
from portal.models.scheduler import (
    ClusterSettings,
    Cycle,
    EngineQuery,
    FailedCycle,
    Forecast,
    JobVerdict,
    Lease,
    OutboxMessage,
    SchedulerCounters,
)
from portal.models.schedules import Schedule, ScheduleRun
from portal.models.secrets import RegistryLogin, Secret
from portal.models.services import Service, ServiceReplica, ServiceVersion
from portal.models.sweeps import Sweep, Trial, TrialReport
from portal.models.templates import Template, TemplateVersion
from portal.models.usage import (
    AttemptGpuDay,
    AttemptProgress,
    AttemptSeconds,
    NodeMetricsMinute,
    ReportDay,
    ReportDayRow,
    UsageInterval,
)
from portal.models.user_requests import UserRequest
from portal.models.users import User
from portal.models.volumes import Volume, VolumeUsage
from portal.models.workspaces import (
    AttemptActivity,
    IdleExemption,
    NotebookListing,
    Terminal,
    WorkspaceSession,
    WorkspaceShare,
    WorkspaceTicket,
)
