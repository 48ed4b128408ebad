"""Database tables, one module per subject."""

from portal.models.accounts.credentials import ApiToken, BrowserSession, Invitation, MagicLink
from portal.models.accounts.users import User
from portal.models.environments.environments import Environment, ImagePresence, SavedImage
from portal.models.jobs.checkpoints import AttemptObservation, AttemptWork, Checkpoint, RankProgress
from portal.models.jobs.failure_rules import FailureRule
from portal.models.jobs.job_requests import FileRequest, JobSignal
from portal.models.jobs.job_templates import Template, TemplateVersion
from portal.models.jobs.job_views import SavedJobView
from portal.models.jobs.jobs import Allocation, Attempt, Dependency, Job, JobEvent, Rendezvous, Task
from portal.models.jobs.plans import LayerProfile, PipelinePlan, ProfileRun
from portal.models.jobs.reproduction import CodeArchive, EnvironmentRecord, JobAnnotation, Rerun
from portal.models.jobs.schedules import Schedule, ScheduleRun
from portal.models.nodes.alerts import GpuAlert, InvalidRow
from portal.models.nodes.node_incidents import NodeIncident, OrphanContainer
from portal.models.nodes.node_operations import AgentRollout, NodeOperation
from portal.models.nodes.nodes import (
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
from portal.models.notices.announcements import Announcement
from portal.models.notices.notices import Notice, NoticeDelivery, NoticePreferences, NoticeWebhook
from portal.models.projects.projects import Membership, Project
from portal.models.projects.quotas import Quota, QuotaAddition, QuotaChange, QuotaReplay
from portal.models.projects.secrets import RegistryLogin, Secret
from portal.models.reports.usage import (
    AttemptGpuDay,
    AttemptProgress,
    AttemptSeconds,
    NodeMetricsMinute,
    ReportDay,
    ReportDayRow,
    UsageInterval,
)
from portal.models.request_records import AuditEntry, BulkOperation, IdempotencyKey
from portal.models.requests.user_requests import UserRequest
from portal.models.scheduling.scheduler import (
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
from portal.models.serving.model_servers import Service, ServiceReplica, ServiceVersion
from portal.models.storage.data_sets import DataSet, DataSetVersion
from portal.models.storage.volumes import Volume, VolumeUsage
from portal.models.sweeps.sweeps import Sweep, Trial, TrialReport
from portal.models.workspaces.workspaces import (
    AttemptActivity,
    IdleExemption,
    NotebookListing,
    Terminal,
    WorkspaceSession,
    WorkspaceShare,
    WorkspaceTicket,
)
