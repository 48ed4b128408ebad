"""The one policy door: who may do what to which row. Pages, REST, sockets, logs and the gateway ask here.

Rules in short: an admin may do everything but enter another person's workspace; a manager runs a project,
a member runs jobs in it and controls their own, a viewer sees. What one may not see does not exist (404).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from django.contrib.auth.models import AnonymousUser
from django.db.models import Q, QuerySet

from portal.errors import NotAllowed, NotThere, SignInNeeded
from portal.lineage import lineage
from portal.models import (
    ApiToken,
    AuditEntry,
    Environment,
    Excuse,
    Extension,
    Gpu,
    GpuAlarm,
    InvalidRow,
    Job,
    Membership,
    Node,
    NodePool,
    Project,
    Quota,
    Reservation,
    Secret,
    Template,
    Topology,
    UnknownContainer,
    UsageLedger,
    User,
    Volume,
)
from portal.one_look import asked_once
from portal.words.states import ROLE_RANK, JobKind, NodeState, Role

Person = User | AnonymousUser | None


class Verb(StrEnum):
    """What a person may want of a row."""

    SEE = "see"
    SUBMIT = "submit"  # a job into a project
    CONTROL = "control"  # cancel, hold, change a job
    ENTER = "enter"  # open a workspace, its terminal or its secrets
    READ_LOGS = "read_logs"
    MANAGE = "manage"  # members of a project
    CHANGE = "change"  # quotas, nodes, environments, people


class Policy(StrEnum):
    """What a route or a socket demands before it looks at any row; every one declares exactly one."""

    PUBLIC = "public"
    SIGNED_IN = "signed-in"
    ADMIN = "admin"
    WORKSPACE = "workspace"  # the gateway: a workspace session of that origin


_Route = TypeVar("_Route", bound=Callable[..., Any] | type)


def policy(demand: Policy) -> Callable[[_Route], _Route]:
    """Declares the policy of a view or a consumer. A test fails for any that declares none."""

    def mark(route: _Route) -> _Route:
        route.access_policy = demand  # type: ignore[union-attr]
        return route

    return mark


def signed_in(person: Person) -> User:
    """The person as an active user, or SignInNeeded."""
    if isinstance(person, User) and person.is_active:
        return person
    raise SignInNeeded("Sign in first.")


def demand(person: Person, wanted: Policy) -> None:
    """Raises unless the person satisfies the route's policy."""
    if wanted is Policy.PUBLIC:
        return
    user = signed_in(person)
    if wanted is Policy.ADMIN:
        require_admin(user, "can do this")


def require_admin(user: User, act: str) -> None:
    """Raises NotAllowed for anybody but an administrator. ``act`` is what only they do: "change quotas"."""
    if not user.is_admin:
        raise NotAllowed(f"Only administrators {act}.")


# -- roles -----------------------------------------------------------------------------------------


def role_in(user: User, project: Project) -> Role | None:
    """The person's strongest role in the project or one of its ancestors; None for a stranger."""
    line = lineage(project, lambda below: below.parent)
    roles = [
        Role(r) for r in Membership.objects.filter(user=user, project__in=line).values_list("role", flat=True)
    ]
    return max(roles, key=lambda role: ROLE_RANK[role], default=None)


def has_role(user: User, project: Project, least: Role) -> bool:
    """True when the person's role in the project is at least ``least``."""
    role = role_in(user, project)
    return role is not None and ROLE_RANK[role] >= ROLE_RANK[least]


def roles_of(person: Person) -> dict[int, Role]:
    """The person's strongest role by project row, inherited from ancestors: two queries, once in a look."""
    own, parents = _own_roles(signed_in(person)), parent_rows()
    found: dict[int, Role] = {}
    for project in parents:
        roles = [own[row] for row in lineage(project, parents.get) if row in own]
        if roles:
            found[project] = max(roles, key=lambda role: ROLE_RANK[role])
    return found


def project_ids(user: User, least: Role = Role.VIEWER) -> set[int]:
    """Row numbers of the projects where the person has at least this role, or above it: as ``roles_of``."""
    roles = roles_of(user)
    return {row for row, role in roles.items() if ROLE_RANK[role] >= ROLE_RANK[least]}


def parent_rows() -> Mapping[int, int | None]:
    """The tree of projects by row numbers; one query, once in a look."""
    return asked_once("parents", lambda: dict(Project.objects.values_list("id", "parent_id")))


def _own_roles(user: User) -> Mapping[int, Role]:
    def ask() -> dict[int, Role]:
        rows = Membership.objects.filter(user=user).values_list("project_id", "role")
        return {project: Role(role) for project, role in rows}

    return asked_once(("roles", user.pk), ask)


# -- single rows -----------------------------------------------------------------------------------


def can(person: Person, verb: Verb, thing: Any) -> bool:
    """Whether this person may do this to this row. Anonymous and inactive people may do nothing."""
    if not isinstance(person, User) or not person.is_active:
        return False
    match thing:
        case Job():
            return _can_job(person, verb, thing)
        case Project():
            return _can_project(person, verb, thing)
        case Quota():
            return person.is_admin if verb is Verb.CHANGE else can(person, Verb.SEE, thing.project)
        case Extension():
            return _can_extension(person, verb, thing)
        case UnknownContainer() | GpuAlarm() | InvalidRow():
            return person.is_admin
        case Node() | NodePool() | Gpu() | Topology() | Reservation() | Environment() | Template():
            return person.is_admin or verb is Verb.SEE
        case User():
            return person.is_admin or (thing.pk == person.pk and verb in {Verb.SEE, Verb.CHANGE})
        case ApiToken():
            return thing.owner_id == person.pk
        case AuditEntry():
            return person.is_admin and verb is Verb.SEE
    return False


def allowed(person: Person, verb: Verb, jobs: Iterable[Job]) -> set[int]:
    """Row numbers of those jobs to which the person may do this: two queries, whatever their number."""
    if not isinstance(person, User) or not person.is_active:
        return set()
    roles = {} if person.is_admin and verb is not Verb.ENTER else roles_of(person)
    return {job.pk for job in jobs if _may_job(person, roles.get(job.project_id), verb, job)}


def _can_job(user: User, verb: Verb, job: Job) -> bool:
    asks_role = verb is Verb.ENTER or not user.is_admin
    return _may_job(user, role_in(user, job.project) if asks_role else None, verb, job)


def _may_job(user: User, role: Role | None, verb: Verb, job: Job) -> bool:
    """The rule for a job, once the person's role in its project is known."""
    if verb is Verb.ENTER:
        # Not even an admin: what runs there runs as the owner, with the owner's files.
        member = role is not None and ROLE_RANK[role] >= ROLE_RANK[Role.MEMBER]
        return job.owner_id == user.pk and (member or user.is_admin)
    if user.is_admin:
        return True
    if role is None:
        return False
    if verb is Verb.SEE:
        return True
    if role is Role.MANAGER:
        return verb is Verb.CONTROL or (verb is Verb.READ_LOGS and job.kind != JobKind.WORKSPACE.value)
    if verb is Verb.READ_LOGS and job.kind != JobKind.WORKSPACE.value:
        return True
    return job.owner_id == user.pk and role is not Role.VIEWER and verb in {Verb.CONTROL, Verb.READ_LOGS}


def has_role_or_admin(user: User, project: Project, least: Role) -> bool:
    """As ``has_role``; admins pass."""
    return user.is_admin or has_role(user, project, least)


def _can_project(user: User, verb: Verb, project: Project) -> bool:
    if verb is Verb.SUBMIT:
        return project.archived_at is None and has_role_or_admin(user, project, Role.MEMBER)
    if user.is_admin:
        return True
    if verb is Verb.SEE:
        return has_role(user, project, Role.VIEWER)
    if verb is Verb.MANAGE:
        return has_role(user, project, Role.MANAGER)
    return False


def _can_extension(user: User, verb: Verb, asked: Extension) -> bool:
    """Whoever sees the job sees what was asked for it; where it delays only the project's own, managers decide."""
    if verb is Verb.SEE:
        return _can_job(user, Verb.SEE, asked.job)
    if verb is Verb.CHANGE:
        return user.is_admin or (not asked.beyond and has_role(user, asked.job.project, Role.MANAGER))
    return False


def decidable(user: User, rows: Iterable[Extension]) -> set[int]:
    """Row numbers of those requests for more time on which the person may decide: two queries at most."""
    if user.is_admin:
        return {row.pk for row in rows}
    roles = roles_of(user)
    return {row.pk for row in rows if not row.beyond and roles.get(row.job.project_id) is Role.MANAGER}


def require(person: Person, verb: Verb, thing: Any) -> None:
    """Raises NotThere when the row may not even be seen, NotAllowed when it may be seen but not this."""
    if can(person, verb, thing):
        return
    signed_in(person)
    if can(person, Verb.SEE, thing):
        raise NotAllowed("You may see this, but not do that.")
    raise NotThere


# -- sets of rows ----------------------------------------------------------------------------------


def visible_projects(person: Person) -> QuerySet[Project]:
    """The projects a person may see: all for admins, else those of their memberships and below."""
    user = signed_in(person)
    return Project.objects.all() if user.is_admin else Project.objects.filter(pk__in=project_ids(user))


def namable_projects(person: Person) -> QuerySet[Project]:
    """The projects whose names a person may read: the visible ones and those above, whose limits bind them."""
    user = signed_in(person)
    return Project.objects.all() if user.is_admin else Project.objects.filter(pk__in=_lines(user))


def visible_jobs(person: Person) -> QuerySet[Job]:
    """The jobs a person may see: those of visible projects."""
    user = signed_in(person)
    return Job.objects.all() if user.is_admin else Job.objects.filter(project_id__in=project_ids(user))


def visible_extensions(person: Person) -> QuerySet[Extension]:
    """The requests for more time that a person may see: those of visible projects' jobs."""
    user = signed_in(person)
    rows = Extension.objects.all()
    return rows if user.is_admin else rows.filter(job__project_id__in=project_ids(user))


def visible_excuses(person: Person) -> QuerySet[Excuse]:
    """The reasons to keep idle workspaces that a person may see: those of visible projects' jobs."""
    user = signed_in(person)
    rows = Excuse.objects.all()
    return rows if user.is_admin else rows.filter(job__project_id__in=project_ids(user))


def visible_quotas(person: Person) -> QuerySet[Quota]:
    """The quotas a person may see: those of visible projects."""
    user = signed_in(person)
    return Quota.objects.all() if user.is_admin else Quota.objects.filter(project_id__in=project_ids(user))


def visible_usage(person: Person) -> QuerySet[UsageLedger]:
    """The usage a person may see: their own, and that of projects they manage."""
    user = signed_in(person)
    if user.is_admin:
        return UsageLedger.objects.all()
    return UsageLedger.objects.filter(Q(user=user) | Q(project_id__in=project_ids(user, Role.MANAGER)))


def visible_nodes(person: Person) -> QuerySet[Node]:
    """The nodes a person may see: everybody sees the cluster, nobody needs the retired."""
    signed_in(person)
    return Node.objects.exclude(state=NodeState.RETIRED.value)


def visible_people(person: Person) -> QuerySet[User]:
    """The people a person may see by name: those who share a project with them; all for admins."""
    user = signed_in(person)
    if user.is_admin:
        return User.objects.all()
    shared = Membership.objects.filter(project_id__in=project_ids(user)).values("user_id")
    return User.objects.filter(Q(pk=user.pk) | Q(pk__in=shared))


def visible_volumes(person: Person) -> QuerySet[Volume]:
    """The declared volumes a person may see: all for admins, else those that some project of theirs may use."""
    user = signed_in(person)
    rows = Volume.objects.filter(owner__isnull=True)
    if user.is_admin:
        return rows
    return rows.filter(Q(projects__isnull=True) | Q(projects__in=_lines(user))).distinct()


def visible_secrets(person: Person) -> QuerySet[Secret]:
    """The secrets a person may know of: their own, and those of projects where they may run jobs."""
    user = signed_in(person)
    shared = {"project__isnull": False} if user.is_admin else {"project__in": project_ids(user, Role.MEMBER)}
    return Secret.objects.filter(Q(owner=user) | Q(**shared)).select_related("project")


def usable_secrets(owner: User, project: Project) -> QuerySet[Secret]:
    """Those that a job of this person in this project may name: the person's own, and the project's."""
    return Secret.objects.filter(Q(owner=owner) | Q(project=project)).select_related("project")


def visible_environments(person: Person) -> QuerySet[Environment]:
    """The environments a person may launch: those offered to some project of theirs; all for admins."""
    user = signed_in(person)
    if user.is_admin:
        return Environment.objects.all()
    limits = Environment.projects.through.objects.values(
        "environment_id"
    )  # no join: callers count other rows
    theirs = Q(pk__in=limits.filter(project_id__in=_lines(user))) | ~Q(pk__in=limits)
    return Environment.objects.filter(theirs, enabled=True)


def _lines(user: User) -> set[int]:
    """Row numbers of the projects a person is in, and of all above these: what is lent to one is lent below it."""
    own, parents = _own_roles(user).keys(), parent_rows()
    lines = [lineage(row, parents.get) for row in parents]
    return {above for line in lines if not own.isdisjoint(line) for above in line}
