"""The access policy: which user may do what to which row.

Pages, REST, WebSockets, logs and the gateway use it.

Administrators may do everything except enter another user's workspace. A manager runs a project; a member
submits jobs and controls their own; a viewer reads. A workspace can be shared with members of its project only.
A row that a user may not see is answered with 404.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from django.contrib.auth.models import AnonymousUser
from django.db.models import Model, Q, QuerySet
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from portal.domain.jobs.template_parameters import TemplateScope
from portal.domain.projects.project_tree import path_to_root
from portal.domain.requests.user_requests import RequestKind
from portal.domain.serving.model_servers import ServiceAccess, ServiceState
from portal.domain.states import ROLE_RANK, JobKind, NodeState, Role
from portal.domain.storage.data_sets import DataSetVisibility
from portal.errors import Forbidden, NotFound, Unauthenticated
from portal.models import (
    ApiToken,
    AttemptGpuDay,
    AttemptWork,
    AuditEntry,
    DataSet,
    DataSetVersion,
    Environment,
    Gpu,
    GpuAlert,
    IdleExemption,
    InvalidRow,
    Job,
    LayerProfile,
    Membership,
    Node,
    NodePool,
    Notice,
    OrphanContainer,
    PipelinePlan,
    Project,
    Quota,
    Reservation,
    SavedJobView,
    Schedule,
    Secret,
    Service,
    Sweep,
    Template,
    Topology,
    UsageInterval,
    User,
    UserRequest,
    Volume,
    VolumeUsage,
    WorkspaceShare,
)
from portal.request_cache import cached

Requester = User | AnonymousUser | None


class Permission(StrEnum):
    """What a user can do to a row."""

    VIEW = "view"
    SUBMIT = "submit"  # submit a job to a project
    CONTROL = "control"  # cancel, hold or edit a job
    ENTER = "enter"  # open a workspace, its terminal or its secrets; send requests to a service
    VISIT = "visit"  # use the tool of a workspace: its owner, and users with a share
    READ_LOGS = "read_logs"
    READ_FILES = "read_files"  # volumes of a job; its owner's home is for its owner alone
    MANAGE = "manage"  # manage the members of a project
    CHANGE = "change"  # change quotas, nodes, environments or users


class AccessPolicy(StrEnum):
    """What a route or WebSocket requires before any row is checked.

    Every route and consumer declares exactly one.
    """

    PUBLIC = "public"
    SIGNED_IN = "signed-in"
    ADMIN = "admin"
    WORKSPACE = "workspace"  # gateway only: a workspace session for that origin
    SERVICE = "service"  # gateway only: a session for that origin, or a token with the scope services


_Row = TypeVar("_Row", bound=Model)
_View = TypeVar("_View", bound=Callable[..., Any] | type)


def access_policy(required: AccessPolicy) -> Callable[[_View], _View]:
    """Declare the access policy of a view or consumer. A test fails for any view without one."""

    def mark(route: _View) -> _View:
        route.access_policy = required  # type: ignore[union-attr]
        return route

    return mark


def require_user(requester: Requester) -> User:
    """Return the requester as an active user. Raise Unauthenticated otherwise."""
    if isinstance(requester, User) and requester.is_active:
        return requester
    raise Unauthenticated("Sign in first.")


def enforce(requester: Requester, required: AccessPolicy) -> None:
    """Raise Unauthenticated or Forbidden unless the requester satisfies the policy."""
    if required is AccessPolicy.PUBLIC:
        return
    user = require_user(requester)
    if required is AccessPolicy.ADMIN:
        require_admin(user, "can do this")


def require_admin(user: User, action: str) -> None:
    """Raise Forbidden unless the user is an administrator.

    ``action`` completes the message "Only administrators ...".
    """
    if not user.is_admin:
        raise Forbidden(f"Only administrators {action}.")


def require_own_account(writer: User, owner: User, instead: str) -> None:
    """Raise Forbidden unless ``writer`` is ``owner``: what runs under an account was written by that account.

    Every change of what runs (docs/jobs.md, *Whose account runs what*) is checked, that of managers and
    administrators too. ``instead`` is a sentence that says what is possible.
    """
    if writer.pk == owner.pk:
        return
    message = _("Only its owner can change what it runs, because it runs under the account of {name}.")
    raise Forbidden(f"{message.format(name=owner.username)} {instead}", code="other_account")


# -- roles -----------------------------------------------------------------------------------------


def role_in(user: User, project: Project) -> Role | None:
    """Return the user's strongest role in the project or its ancestors, or None if they have none."""
    line = path_to_root(project, lambda below: below.parent)
    roles = [
        Role(r) for r in Membership.objects.filter(user=user, project__in=line).values_list("role", flat=True)
    ]
    return max(roles, key=lambda role: ROLE_RANK[role], default=None)


def has_role(user: User, project: Project, min_role: Role) -> bool:
    """Return True if the user's role in the project is at least ``min_role``."""
    role = role_in(user, project)
    return role is not None and ROLE_RANK[role] >= ROLE_RANK[min_role]


def roles_by_project(requester: Requester) -> dict[int, Role]:
    """Return the user's strongest role by project id, inherited from ancestors.

    Two queries, cached for the request.
    """
    own, parents = _own_roles(require_user(requester)), project_parents()
    found: dict[int, Role] = {}
    for project in parents:
        roles = [own[row] for row in path_to_root(project, parents.get) if row in own]
        if roles:
            found[project] = max(roles, key=lambda role: ROLE_RANK[role])
    return found


def project_ids(user: User, min_role: Role = Role.VIEWER) -> set[int]:
    """Return the ids of the projects in which the user has at least ``min_role``, also if inherited."""
    roles = roles_by_project(user)
    return {row for row, role in roles.items() if ROLE_RANK[role] >= ROLE_RANK[min_role]}


def project_parents() -> Mapping[int, int | None]:
    """Return the parent id of each project by its id. One query, cached for the request."""
    return cached("parents", lambda: dict(Project.objects.values_list("id", "parent_id")))


def _own_roles(user: User) -> Mapping[int, Role]:
    def ask() -> dict[int, Role]:
        rows = Membership.objects.filter(user=user).values_list("project_id", "role")
        return {project: Role(role) for project, role in rows}

    return cached(("roles", user.pk), ask)


# -- single rows -----------------------------------------------------------------------------------


def can(requester: Requester, verb: Permission, obj: Any) -> bool:
    """Return True if the requester has this permission on the row. Anonymous and inactive users have none."""
    if not isinstance(requester, User) or not requester.is_active:
        return False
    match obj:
        case Job():
            return _can_access_job(requester, verb, obj)
        case Sweep() | Schedule():
            return _can_access_sweep(requester, verb, obj)
        case Service():
            return _can_access_service(requester, verb, obj)
        case Project():
            return _can_access_project(requester, verb, obj)
        case Quota():
            return (
                requester.is_admin
                if verb is Permission.CHANGE
                else can(requester, Permission.VIEW, obj.project)
            )
        case UserRequest():
            return _can_access_request(requester, verb, obj)
        case OrphanContainer() | GpuAlert() | InvalidRow():
            return requester.is_admin
        case Template():
            return _can_access_template(requester, verb, obj)
        case DataSet():
            return _can_access_data_set(requester, verb, obj)
        case SavedJobView():
            return _can_access_job_view(requester, verb, obj)
        case Node() | NodePool() | Gpu() | Topology() | Reservation() | Environment():
            return requester.is_admin or verb is Permission.VIEW
        case User():
            return requester.is_admin or (
                obj.pk == requester.pk and verb in {Permission.VIEW, Permission.CHANGE}
            )
        case ApiToken():
            return obj.owner_id == requester.pk
        case AuditEntry():
            return requester.is_admin and verb is Permission.VIEW
    return False


_PERSONAL = frozenset({Permission.ENTER, Permission.VISIT})
"""Rights to a workspace that administrators do not have either."""


def job_permissions(user: User, job: Job) -> set[Permission]:
    """Return what an active user may do to a job, with one read of their role."""
    role = role_in(user, job.project)
    return {verb for verb in Permission if _role_permits_job(user, role, verb, job)}


def permitted_job_ids(requester: Requester, verb: Permission, jobs: Iterable[Job]) -> set[int]:
    """Return the ids of the jobs on which the requester has this permission, in at most two queries.

    Shares of workspaces are not considered.
    """
    if not isinstance(requester, User) or not requester.is_active:
        return set()
    roles = {} if requester.is_admin and verb not in _PERSONAL else roles_by_project(requester)
    return {job.pk for job in jobs if _role_permits_job(requester, roles.get(job.project_id), verb, job)}


def _can_access_job(user: User, verb: Permission, job: Job) -> bool:
    asks_role = verb in _PERSONAL or not user.is_admin
    permitted = _role_permits_job(user, role_in(user, job.project) if asks_role else None, verb, job)
    return permitted or (verb is Permission.VISIT and live_share(user, job) is not None)


def _role_permits_job(user: User, role: Role | None, verb: Permission, job: Job) -> bool:
    """Apply the permission rules of a job, given the user's role in its project."""
    if verb in _PERSONAL:
        # Administrators may not enter either: a workspace runs as its owner, with the owner's files.
        member = role is not None and ROLE_RANK[role] >= ROLE_RANK[Role.MEMBER]
        return job.owner_id == user.pk and (member or user.is_admin)
    if user.is_admin:
        return True
    if role is None:
        return False
    if verb is Permission.VIEW:
        return True
    if role is Role.MANAGER:
        reads = verb in {Permission.READ_LOGS, Permission.READ_FILES}
        shared = job.kind != JobKind.WORKSPACE.value or job.owner_id == user.pk
        return verb is Permission.CONTROL or (reads and shared)
    if verb is Permission.READ_LOGS and job.kind != JobKind.WORKSPACE.value:
        return True
    return (
        job.owner_id == user.pk
        and role is not Role.VIEWER
        and verb in {Permission.CONTROL, Permission.READ_LOGS, Permission.READ_FILES}
    )


def live_share(user: User, job: Job) -> WorkspaceShare | None:
    """Return the share by which a user may use another user's workspace now, while both may use the project."""
    rows = WorkspaceShare.objects.filter(job=job, user=user, revoked_at=None, expires_at__gt=Now())
    found = rows.first()
    if found is None or not has_role(user, job.project, Role.MEMBER):
        return None
    return found if job.owner.is_active and _can_access_job(job.owner, Permission.ENTER, job) else None


def _can_access_sweep(user: User, verb: Permission, sweep: Sweep | Schedule) -> bool:
    """Apply the rules of a job: its owner and managers control it, who sees the project views it."""
    role = None if user.is_admin else role_in(user, sweep.project)
    if user.is_admin or verb is Permission.VIEW:
        return user.is_admin or role is not None
    owner = sweep.owner_id == user.pk and role is Role.MEMBER
    return verb is Permission.CONTROL and (owner or role is Role.MANAGER)


def _can_access_service(user: User, verb: Permission, service: Service) -> bool:
    """Its owner and managers control it, members send requests to it, and who sees the project reads its details.

    A service for all signed-in users can be seen, without its details, and used by every user.
    """
    if user.is_admin:
        return True
    if verb in {Permission.VIEW, Permission.ENTER} and service.access == ServiceAccess.SIGNED_IN:
        return True
    role = role_in(user, service.project)
    if verb in {Permission.VIEW, Permission.READ_LOGS} or role is None:
        return role is not None
    if verb not in {Permission.ENTER, Permission.CONTROL} or role is Role.VIEWER:
        return False
    return verb is Permission.ENTER or role is Role.MANAGER or service.owner_id == user.pk


def _can_access_template(user: User, verb: Permission, template: Template) -> bool:
    """Its scope says who views it. Its owner changes it, and managers change those of their project."""
    if user.is_admin:
        return True
    own = template.owner_id == user.pk
    if template.project is not None:
        role = role_in(user, template.project)
        if verb is Permission.VIEW:
            return role is not None
        return verb is Permission.CHANGE and (role is Role.MANAGER or (own and role is Role.MEMBER))
    if verb is Permission.VIEW:
        return own or template.scope == TemplateScope.EVERYONE
    return verb is Permission.CHANGE and own


def _can_access_data_set(user: User, verb: Permission, data_set: DataSet) -> bool:
    """Who submits to its project changes it and adds versions; managers delete it and its versions."""
    if verb is Permission.VIEW:
        return visible_data_sets(user).filter(pk=data_set.pk).exists()
    needed = {Permission.CHANGE: Permission.SUBMIT, Permission.MANAGE: Permission.MANAGE}.get(verb)
    return needed is not None and _can_access_project(user, needed, data_set.project)


def _can_access_job_view(user: User, verb: Permission, view: SavedJobView) -> bool:
    """Its owner changes it, and so do managers of the project whose members see it."""
    own = view.owner_id == user.pk or user.is_admin
    if verb is Permission.VIEW:
        return own or (view.project is not None and can(user, Permission.VIEW, view.project))
    shared = view.project is not None and can(user, Permission.MANAGE, view.project)
    return verb is Permission.CHANGE and (own or shared)


def has_role_or_admin(user: User, project: Project, min_role: Role) -> bool:
    return user.is_admin or has_role(user, project, min_role)


def _can_access_project(user: User, verb: Permission, project: Project) -> bool:
    if verb is Permission.SUBMIT:
        return project.archived_at is None and has_role_or_admin(user, project, Role.MEMBER)
    if user.is_admin:
        return True
    if verb is Permission.VIEW:
        return has_role(user, project, Role.VIEWER)
    if verb is Permission.MANAGE:
        return has_role(user, project, Role.MANAGER)
    return False


def _can_access_request(user: User, verb: Permission, row: UserRequest) -> bool:
    """CONTROL withdraws, CHANGE answers."""
    if verb is Permission.CONTROL:
        return row.requested_by_id == user.pk and _can_access_request(user, Permission.VIEW, row)
    if verb is Permission.CHANGE:
        return row.pk in answerable_requests(user, [row])
    if verb is not Permission.VIEW:
        return False
    if row.job is not None:
        return _can_access_job(user, Permission.VIEW, row.job)
    role = role_in(user, row.target_project)
    own = row.requested_by_id == user.pk and (role is not None or row.kind == RequestKind.PROJECT)
    return user.is_admin or own or role is Role.MANAGER


def answerable_requests(user: User, rows: Iterable[UserRequest]) -> set[int]:
    """Return the ids of the requests that the user may answer, in at most two queries.

    Administrators answer all. Managers answer who joins their project, and more time if it delays only jobs of
    their project.
    """
    if user.is_admin:
        return {row.pk for row in rows}
    roles = roles_by_project(user)
    return {
        row.pk
        for row in rows
        if roles.get(row.target_project.pk) is Role.MANAGER
        and (
            row.kind == RequestKind.PROJECT
            or (row.kind == RequestKind.TIME and not row.affects_other_projects)
        )
    }


def require_permission(requester: Requester, verb: Permission, obj: Any) -> None:
    """Raise NotFound if the requester may not see the row, Forbidden if they only lack the permission."""
    if can(requester, verb, obj):
        return
    require_user(requester)
    if can(requester, Permission.VIEW, obj):
        raise Forbidden("You may view this, but you lack the permission for this action.")
    raise NotFound


# -- sets of rows ----------------------------------------------------------------------------------


def _of_own_projects(
    requester: Requester, rows: QuerySet[_Row], project_field: str = "project_id"
) -> QuerySet[_Row]:
    """Return all rows for administrators, otherwise those of the user's projects and their descendants."""
    user = require_user(requester)
    return rows if user.is_admin else rows.filter(**{f"{project_field}__in": project_ids(user)})


def visible_projects(requester: Requester) -> QuerySet[Project]:
    """Return all projects for administrators, otherwise the user's projects and their descendants."""
    return _of_own_projects(requester, Project.objects.all(), "pk")


def nameable_projects(requester: Requester) -> QuerySet[Project]:
    """Return the visible projects and their ancestors, whose limits apply to them too."""
    user = require_user(requester)
    return (
        Project.objects.all()
        if user.is_admin
        else Project.objects.filter(pk__in=_projects_and_ancestors(user))
    )


def visible_jobs(requester: Requester) -> QuerySet[Job]:
    return _of_own_projects(requester, Job.objects.all())


def visible_profiles(requester: Requester) -> QuerySet[LayerProfile]:
    return _of_own_projects(requester, LayerProfile.objects.all())


def visible_plans(requester: Requester) -> QuerySet[PipelinePlan]:
    return _of_own_projects(requester, PipelinePlan.objects.all(), "profile__project_id")


def visible_sweeps(requester: Requester) -> QuerySet[Sweep]:
    return _of_own_projects(requester, Sweep.objects.all())


def visible_schedules(requester: Requester) -> QuerySet[Schedule]:
    return _of_own_projects(requester, Schedule.objects.all())


def visible_services(requester: Requester) -> QuerySet[Service]:
    """Return the services of the user's projects, and those that all signed-in users may use."""
    user = require_user(requester)
    if user.is_admin:
        return Service.objects.all()
    shared = Q(access=ServiceAccess.SIGNED_IN.value, state=ServiceState.ACTIVE.value)
    return Service.objects.filter(Q(project_id__in=project_ids(user)) | shared)


def visible_templates(requester: Requester) -> QuerySet[Template]:
    """Return all templates for administrators, otherwise the user's, those of their projects and shared ones."""
    user = require_user(requester)
    if user.is_admin:
        return Template.objects.all()
    own = Q(owner=user, project__isnull=True)
    return Template.objects.filter(
        own | Q(scope=TemplateScope.EVERYONE.value) | Q(project_id__in=project_ids(user))
    )


def visible_job_views(requester: Requester) -> QuerySet[SavedJobView]:
    """Return all saved views for administrators, otherwise the user's own and those of their projects."""
    user = require_user(requester)
    if user.is_admin:
        return SavedJobView.objects.all()
    return SavedJobView.objects.filter(Q(owner=user) | Q(project_id__in=project_ids(user)))


def visible_requests(requester: Requester) -> QuerySet[UserRequest]:
    """Return the user's own requests, those about projects that they manage, and more time for visible jobs.

    Of projects that they have left, users see only their requests to join.
    """
    user = require_user(requester)
    if user.is_admin:
        return UserRequest.objects.all()
    about_jobs = Q(job__project_id__in=project_ids(user))
    own = Q(Q(kind=RequestKind.PROJECT.value) | Q(project_id__in=project_ids(user)), requested_by=user)
    return UserRequest.objects.filter(about_jobs | own | Q(project_id__in=project_ids(user, Role.MANAGER)))


def visible_idle_exemptions(requester: Requester) -> QuerySet[IdleExemption]:
    return _of_own_projects(requester, IdleExemption.objects.all(), "job__project_id")


def visible_quotas(requester: Requester) -> QuerySet[Quota]:
    return _of_own_projects(requester, Quota.objects.all())


def sees_all_usage(requester: Requester) -> bool:
    """Return True if the following four leave no row out."""
    return require_user(requester).is_admin


def visible_usage(requester: Requester) -> QuerySet[UsageInterval]:
    """Return the user's own usage, and the usage of projects that they manage."""
    return _own_or_managed(requester, UsageInterval.objects.all())


def visible_work(requester: Requester) -> QuerySet[AttemptWork]:
    """Return the work of ended attempts by the rule of ``visible_usage``."""
    return _own_or_managed(requester, AttemptWork.objects.all())


def visible_gpu_days(requester: Requester) -> QuerySet[AttemptGpuDay]:
    """Return measurements of attempts by the rule of ``visible_usage``."""
    return _own_or_managed(requester, AttemptGpuDay.objects.all())


def visible_waits(requester: Requester) -> QuerySet[Job]:
    """Return jobs by the rule of ``visible_usage``."""
    return _own_or_managed(requester, Job.objects.all(), "owner")


def _own_or_managed(
    requester: Requester, rows: QuerySet[_Row], user_column: str = "user", project_column: str = "project"
) -> QuerySet[_Row]:
    if sees_all_usage(requester):
        return rows
    user = require_user(requester)
    managed = project_ids(user, Role.MANAGER)
    return rows.filter(Q(**{user_column: user}) | Q(**{f"{project_column}__in": managed}))


def visible_nodes(requester: Requester) -> QuerySet[Node]:
    """Return all nodes except retired ones; every signed-in user sees the cluster."""
    require_user(requester)
    return Node.objects.exclude(state=NodeState.RETIRED.value)


def visible_users(requester: Requester) -> QuerySet[User]:
    """Return all users for administrators, otherwise the users who share a project with the requester."""
    user = require_user(requester)
    if user.is_admin:
        return User.objects.all()
    shared = Membership.objects.filter(project_id__in=project_ids(user)).values("user_id")
    return User.objects.filter(Q(pk=user.pk) | Q(pk__in=shared))


def visible_volumes(requester: Requester) -> QuerySet[Volume]:
    """Return all declared volumes for administrators, otherwise those that the user's projects may use."""
    user = require_user(requester)
    rows = Volume.objects.filter(owner__isnull=True)
    if user.is_admin:
        return rows
    return rows.filter(Q(projects__isnull=True) | Q(projects__in=_projects_and_ancestors(user))).distinct()


def visible_data_set_versions(requester: Requester) -> QuerySet[DataSetVersion]:
    """Return the versions of the data sets of the user's projects, and shared ones on volumes that these may use."""
    user = require_user(requester)
    if user.is_admin:
        return DataSetVersion.objects.all()
    shared = Q(
        data_set__visibility=DataSetVisibility.EVERYONE.value,
        volume__in=visible_volumes(user).order_by().values("pk"),
    )
    return DataSetVersion.objects.filter(Q(data_set__project_id__in=project_ids(user)) | shared)


def visible_data_sets(requester: Requester) -> QuerySet[DataSet]:
    """Return the data sets of the user's projects, and those of which another version is visible."""
    user = require_user(requester)
    if user.is_admin:
        return DataSet.objects.all()
    shared = visible_data_set_versions(user).order_by().values("data_set_id")
    return DataSet.objects.filter(Q(project_id__in=project_ids(user)) | Q(pk__in=shared))


def visible_volume_usage(requester: Requester) -> QuerySet[VolumeUsage]:
    """Return all folders for administrators, otherwise the user's homes and the folders of their projects."""
    user = require_user(requester)
    rows = VolumeUsage.objects.all()
    return rows if user.is_admin else rows.filter(Q(owner=user) | Q(project__in=project_ids(user)))


def visible_secrets(requester: Requester) -> QuerySet[Secret]:
    """Return the user's own secrets, and those of projects in which they may submit jobs."""
    user = require_user(requester)
    shared = {"project__isnull": False} if user.is_admin else {"project__in": project_ids(user, Role.MEMBER)}
    return Secret.objects.filter(Q(owner=user) | Q(**shared)).select_related("project")


def own_notices(requester: Requester) -> QuerySet[Notice]:
    """Return the notices to the user; administrators do not read those of others."""
    return Notice.objects.filter(recipient=require_user(requester))


def usable_secrets(owner: User, project: Project) -> QuerySet[Secret]:
    """Return the secrets that a job of this owner in this project may reference."""
    return Secret.objects.filter(Q(owner=owner) | Q(project=project)).select_related("project")


def visible_environments(requester: Requester) -> QuerySet[Environment]:
    """Return all environments for administrators, otherwise those available to one of the user's projects.

    A private one is visible to its owner only.
    """
    user = require_user(requester)
    if user.is_admin:
        return Environment.objects.all()
    limits = Environment.projects.through.objects.values(
        "environment_id"
    )  # no join: callers count other rows
    theirs = Q(pk__in=limits.filter(project_id__in=_projects_and_ancestors(user))) | ~Q(pk__in=limits)
    return Environment.objects.filter(theirs, Q(owner=None) | Q(owner=user), enabled=True)


def _projects_and_ancestors(user: User) -> set[int]:
    """Return the ids of the user's projects and their ancestors: a grant to a project covers descendants."""
    own, parents = _own_roles(user).keys(), project_parents()
    lines = [path_to_root(row, parents.get) for row in parents]
    return {above for line in lines if not own.isdisjoint(line) for above in line}
