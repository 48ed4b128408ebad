"""REST: projects and their members."""

from __future__ import annotations

from typing import Any

from django.db.models import Q
from django.http import HttpResponse
from django.utils import timezone
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, Verb, policy, require, roles_of, visible_projects
from portal.api import cursors
from portal.api.bodies import Closed, Flag, Name, Text, YesNo
from portal.api.cursors import Order
from portal.api.job_choice import JobChoiceFields, choice_of
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes import projects as shapes
from portal.api.shapes.people import ROLES
from portal.errors import Invalid, NotThere
from portal.models import Project, User
from portal.selectors.projects import (
    counts_of,
    members_of,
    person_for,
    project_for,
    projects_for,
)
from portal.services.projects import (
    do_change_project,
    do_create_project,
    do_remove_member,
    do_set_member,
)
from portal.services.tokens import Scope
from portal.words.states import Role


class ProjectsQuery(PageQuery):
    """Which projects."""

    archived = Flag(required=False, default=False)
    search = Text(required=False, max_length=100)


class ProjectBody(Closed):
    """A new project."""

    name = Name()
    title = Text(required=False, max_length=200, allow_blank=True, default="")
    parent = Text(  # type: ignore[assignment]
        required=False, allow_null=True, default=None, max_length=63, help_text="Id or name."
    )


class ProjectPatch(JobChoiceFields):
    """Changes of a project."""

    name = Name(required=False)
    title = Text(required=False, max_length=200, allow_blank=True)
    parent = Text(  # type: ignore[assignment]
        required=False, allow_null=True, max_length=63, help_text="Id or name; null: top level."
    )
    archived = YesNo(required=False)
    egress_allow = serializers.ListField(
        child=Text(max_length=60),
        required=False,
        max_length=200,
        help_text="Where jobs may connect while the policy `egress` is listed: `10.1.0.0/16`, `10.1.2.3 443`, "
        "`10.1.0.0/16 8000-8100/udp`, or `dns` for the nodes' name servers. Administrators only; empty: the list of "
        "the project above.",
    )


class MemberBody(JobChoiceFields):
    """A role; a viewer runs no jobs."""

    role = serializers.ChoiceField(ROLES)


def parent_of(person: User, key: str | None) -> Project | None:
    """The visible project a body names as parent; a field error otherwise."""
    if key is None:
        return None
    found = visible_projects(person).filter(Q(public_id=key) | Q(name=key)).first()
    if found is None:
        raise Invalid(fields={"parent": "There is no such project."})
    return found


def shown(person: User, key: str) -> dict[str, Any]:
    """A project as it stands now, for an answer."""
    row = project_for(person, key)
    return shapes.project(row, roles_of(person).get(row.pk), counts_of([row])[row.pk])


@policy(Policy.SIGNED_IN)
class ProjectsRoute(Route):
    """The projects one may see."""

    @operation(
        "projects_list",
        "List projects",
        tag="projects",
        scope=Scope.READ,
        query=ProjectsQuery,
        answer=page_of(shapes.Project),
    )
    def get(self, request: Request) -> HttpResponse:
        """By name."""
        roles = roles_of(self.person)
        rows = projects_for(self.person, archived=self.query["archived"])
        if "search" in self.query:
            text = self.query["search"]
            rows = rows.filter(Q(name__icontains=text) | Q(title__icontains=text))
        found: list[Project] = []
        page = cursors.page(request, rows, Order("name"), self.query, found.append)
        counts = counts_of(found)
        items = [shapes.project(row, roles.get(row.pk), counts[row.pk]) for row in found]
        return self.answer({**page, "items": items})

    @operation(
        "projects_create",
        "Make a project",
        tag="projects",
        scope=Scope.PROJECTS,
        body=ProjectBody,
        answer=shapes.Project,
        status=201,
        idempotent=True,
        detail="Administrators make top-level projects; managers make projects below their own.",
    )
    def post(self, request: Request) -> HttpResponse:
        """The new project."""

        def work() -> dict[str, Any]:
            parent = parent_of(self.person, self.body["parent"])
            row = do_create_project(
                self.person, name=self.body["name"], title=self.body["title"], parent=parent
            )
            return shown(self.person, row.public_id)

        return self.once(work)


@policy(Policy.SIGNED_IN)
class ProjectRoute(Route):
    """One project."""

    @operation(
        "projects_get",
        "Get a project",
        tag="projects",
        scope=Scope.READ,
        answer=shapes.Project,
        refusals=[404],
    )
    def get(self, request: Request, project: str) -> HttpResponse:
        """By id or name."""
        return self.answer(shown(self.person, project))

    @operation(
        "projects_change",
        "Change a project",
        tag="projects",
        scope=Scope.PROJECTS,
        body=ProjectPatch,
        partial=True,
        answer=shapes.Project,
        refusals=[404, 409],
        detail="Managers change the title; administrators also rename, move and archive, and set "
        "`egress_allow`.",
    )
    def patch(self, request: Request, project: str) -> HttpResponse:
        """The project as it stands then."""
        row = project_for(self.person, project)
        changes = {key: value for key, value in self.body.items() if key not in JobChoiceFields().fields}
        if "parent" in changes:
            changes["parent"] = parent_of(self.person, changes["parent"])
        if "archived" in changes:
            changes["archived_at"] = timezone.now() if changes.pop("archived") else None
        do_change_project(self.person, row, choice=choice_of(self.body), **changes)
        return self.answer(shown(self.person, row.public_id))


@policy(Policy.SIGNED_IN)
class MembersRoute(Route):
    """Who belongs to a project."""

    @operation(
        "members_list",
        "List a project's members",
        tag="projects",
        scope=Scope.READ,
        query=PageQuery,
        answer=page_of(shapes.Member),
        refusals=[404],
    )
    def get(self, request: Request, project: str) -> HttpResponse:
        """Direct members, by user name."""
        row = project_for(self.person, project)
        return self.page(members_of(row), shapes.member, Order("user__username"))


@policy(Policy.SIGNED_IN)
class MemberRoute(Route):
    """One person's role in a project."""

    @operation(
        "members_put",
        "Set a person's role",
        tag="projects",
        scope=Scope.PROJECTS,
        body=MemberBody,
        answer=shapes.Member,
        refusals=[404],
    )
    def put(self, request: Request, project: str, person: str) -> HttpResponse:
        """Adds the person, or changes their role."""
        row = project_for(self.person, project)
        require(self.person, Verb.MANAGE, row)
        member = do_set_member(
            self.person, row, person_for(person), Role(self.body["role"]), choice=choice_of(self.body)
        )
        return self.answer(shapes.member(member))

    @operation(
        "members_delete",
        "Take a person out",
        tag="projects",
        scope=Scope.PROJECTS,
        query=JobChoiceFields,
        answer=None,
        status=204,
        refusals=[404],
        detail="By default queued jobs of this person are held and running ones finish.",
    )
    def delete(self, request: Request, project: str, person: str) -> HttpResponse:
        """Their jobs follow the choice; their open workspaces close within seconds."""
        row = project_for(self.person, project)
        require(self.person, Verb.MANAGE, row)
        found = members_of(row).filter(Q(user__public_id=person) | Q(user__username=person)).first()
        if found is None:
            raise NotThere("This person is not a member of the project.")
        do_remove_member(self.person, row, found.user, choice=choice_of(self.query))
        return self.done()
