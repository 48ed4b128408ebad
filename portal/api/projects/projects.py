"""REST: projects and their members."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.db.models import Q
from django.http import HttpResponse
from django.utils import timezone
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import (
    Permission,
    require_permission,
    roles_by_project,
    visible_projects,
)
from portal.api.framework.pagination import Order
from portal.api.framework.request_parsing import (
    NameField,
    QueryBooleanField,
    StrictBooleanField,
    StrictCharField,
    StrictSerializer,
)
from portal.api.framework.views import ListQuery, SignedInView, operation
from portal.api.jobs.affected_jobs import AffectedJobsFields, parse_job_choice
from portal.api.serializers import projects as representations
from portal.api.serializers.users import ROLES
from portal.domain.states import Role
from portal.errors import InvalidRequest, NotFound
from portal.models import Project, User
from portal.selectors.projects.projects import (
    get_project,
    get_user,
    list_members,
    list_projects,
    project_counts,
)
from portal.services.accounts.tokens import Scope
from portal.services.projects.projects import (
    do_change_project,
    do_create_project,
    do_remove_member,
    do_set_member,
)

_write = partial(operation, tag="projects", scope=Scope.PROJECTS)
_read = partial(operation, tag="projects", scope=Scope.READ)


class ProjectsQuery(ListQuery):
    """Filters of the project list."""

    archived = QueryBooleanField(required=False, default=False)
    search = StrictCharField(required=False, max_length=100)


class ProjectBody(StrictSerializer):
    """A new project."""

    name = NameField()
    title = StrictCharField(required=False, max_length=200, allow_blank=True, default="")
    parent = StrictCharField(  # type: ignore[assignment]
        required=False, allow_null=True, default=None, max_length=63, help_text="Id or name."
    )


class ProjectChangeBody(AffectedJobsFields):
    """Changes of a project."""

    name = NameField(required=False)
    title = StrictCharField(required=False, max_length=200, allow_blank=True)
    parent = StrictCharField(  # type: ignore[assignment]
        required=False, allow_null=True, max_length=63, help_text="Id or name; null for a top-level project."
    )
    archived = StrictBooleanField(required=False)
    egress_allow = serializers.ListField(
        child=StrictCharField(max_length=60),
        required=False,
        max_length=200,
        help_text="Networks and ports that jobs may connect to if the policy `egress` is `listed`: `10.1.0.0/16`, "
        "`10.1.2.3 443`, `10.1.0.0/16 8000-8100/udp`, `dns` for the name servers of the nodes, or `tracking` for the "
        "address of the MLflow API. For administrators "
        "only; empty for the list of the parent project.",
    )


class MemberBody(AffectedJobsFields):
    """The role of a member; viewers cannot run jobs."""

    role = serializers.ChoiceField(ROLES)


def find_parent(user: User, key: str | None) -> Project | None:
    """Return the visible project that a body names as parent, or raise a field error."""
    if key is None:
        return None
    found = visible_projects(user).filter(Q(public_id=key) | Q(name=key)).first()
    if found is None:
        raise InvalidRequest(fields={"parent": "There is no such project."})
    return found


def represent_projects(user: User, rows: list[Project]) -> list[dict[str, Any]]:
    """Return the projects with the user's roles and their counts."""
    roles, counts = roles_by_project(user), project_counts(rows)
    return [
        representations.Project.represent(
            row, representations.ProjectContext(roles.get(row.pk), counts[row.pk])
        )
        for row in rows
    ]


def represent_current(user: User, key: str) -> dict[str, Any]:
    """Return the project as stored now."""
    return represent_projects(user, [get_project(user, key)])[0]


class ProjectsView(SignedInView):
    @_read("projects_list", "List projects", query=ProjectsQuery, response=[representations.Project])
    def get(self, request: Request) -> HttpResponse:
        rows = list_projects(self.user, archived=self.query["archived"])
        if "search" in self.query:
            text = self.query["search"]
            rows = rows.filter(Q(name__icontains=text) | Q(title__icontains=text))
        return self.paginated_batch(rows, partial(represent_projects, self.user), Order("name"))

    @_write(
        "projects_create",
        "Create a project",
        body=ProjectBody,
        response=representations.Project,
        status=201,
        idempotent=True,
        detail="Administrators create top-level projects; managers create projects below their own.",
    )
    def post(self, request: Request) -> HttpResponse:
        def work() -> dict[str, Any]:
            parent = find_parent(self.user, self.body["parent"])
            row = do_create_project(
                self.user, name=self.body["name"], title=self.body["title"], parent=parent
            )
            return represent_current(self.user, row.public_id)

        return self.idempotent_response(work)


class ProjectView(SignedInView):
    @_read("projects_get", "Get a project", response=representations.Project)
    def get(self, request: Request, project: str) -> HttpResponse:
        """A project by id or name."""
        return self.json_response(represent_current(self.user, project))

    @_write(
        "projects_change",
        "Change a project",
        body=ProjectChangeBody,
        partial=True,
        response=representations.Project,
        error_statuses=[409],
        detail="Managers can change the title; administrators can also rename, move and archive the project, and set "
        "`egress_allow`.",
    )
    def patch(self, request: Request, project: str) -> HttpResponse:
        row = get_project(self.user, project)
        changes = {key: value for key, value in self.body.items() if key not in AffectedJobsFields().fields}
        if "parent" in changes:
            changes["parent"] = find_parent(self.user, changes["parent"])
        if "archived" in changes:
            changes["archived_at"] = timezone.now() if changes.pop("archived") else None
        do_change_project(self.user, row, choice=parse_job_choice(self.body), **changes)
        return self.json_response(represent_current(self.user, row.public_id))


class MembersView(SignedInView):
    @_read("members_list", "List a project's members", response=[representations.Member])
    def get(self, request: Request, project: str) -> HttpResponse:
        """Direct members, by user name."""
        row = get_project(self.user, project)
        return self.paginated_response(
            list_members(row), representations.Member.represent, Order("user__username")
        )


class MemberView(SignedInView):
    @_write("members_put", "Set the role of a member", body=MemberBody, response=representations.Member)
    def put(self, request: Request, project: str, user: str) -> HttpResponse:
        """The member with this role, added if new."""
        row = get_project(self.user, project)
        require_permission(self.user, Permission.MANAGE, row)
        member = do_set_member(
            self.user, row, get_user(user), Role(self.body["role"]), choice=parse_job_choice(self.body)
        )
        return self.json_response(representations.Member.represent(member))

    @_write(
        "members_delete",
        "Remove a member",
        query=AffectedJobsFields,
        response=None,
        status=204,
        detail="By default, pending jobs of the user are held, and running jobs finish.",
    )
    def delete(self, request: Request, project: str, user: str) -> HttpResponse:
        """Empty. Jobs of the user follow the choice; their open workspaces close within seconds."""
        row = get_project(self.user, project)
        require_permission(self.user, Permission.MANAGE, row)
        found = list_members(row).filter(Q(user__public_id=user) | Q(user__username=user)).first()
        if found is None:
            raise NotFound("This user is not a member of the project.")
        do_remove_member(self.user, row, found.user, choice=parse_job_choice(self.query))
        return self.no_content()
