"""REST: workspaces, which are jobs with a tool that opens in a browser."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal import throttle
from portal.access import Policy, Verb, policy, require
from portal.api.bodies import Flag, Nothing, Text
from portal.api.job_bodies import WorkspaceBody, check_request, job_request
from portal.api.jobs import ORDERS, filter_of
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes import jobs as shapes
from portal.errors import NotThere
from portal.models import Job, User
from portal.selectors.jobs import workspaces_for
from portal.services.jobs import do_cancel_job, do_start_again, do_submit_job
from portal.services.tokens import Scope
from portal.services.workspaces import do_open_workspace, workspace_origin


class WorkspacesQuery(PageQuery):
    """Which workspaces."""

    state = serializers.ListField(
        child=serializers.ChoiceField(shapes.STATES), required=False, default=list, help_text="Repeatable."
    )
    project = Text(required=False, default="", max_length=63, help_text="Id or name.")
    owner = Text(required=False, default="", max_length=63, help_text="Id or user name.")
    pool = Text(required=False, default="", max_length=63, help_text="Id or name.")
    search = Text(required=False, default="", max_length=100)
    live = Flag(required=False, default=None)
    order = serializers.ChoiceField(list(ORDERS), required=False, default="-submitted")


def workspace_for(person: User, public_id: str) -> Job:
    """The workspace, when the person may see it; NotThere otherwise."""
    row = workspaces_for(person).filter(public_id=public_id).first()
    if row is None:
        raise NotThere("There is no such workspace.")
    return row


def shown(row: Job) -> dict[str, Any]:
    """A workspace with its address."""
    return shapes.workspace(row, workspace_origin(row))


@policy(Policy.SIGNED_IN)
class WorkspacesRoute(Route):
    """The workspaces one may see."""

    @operation(
        "workspaces_list",
        "List workspaces",
        tag="workspaces",
        scope=Scope.READ,
        query=WorkspacesQuery,
        answer=page_of(shapes.Workspace),
    )
    def get(self, request: Request) -> HttpResponse:
        """Newest first unless asked otherwise."""
        rows = workspaces_for(self.person, filter_of(self.query))
        return self.page(rows, shown, ORDERS[self.query["order"]])

    @operation(
        "workspaces_launch",
        "Launch a workspace",
        tag="workspaces",
        scope=Scope.WORKSPACES,
        body=WorkspaceBody,
        answer=shapes.Workspace,
        status=201,
        rate=throttle.SUBMIT,
        idempotent=True,
    )
    def post(self, request: Request) -> HttpResponse:
        """The workspace, waiting; it can be opened once it is ready."""

        def work() -> dict[str, Any]:
            job = do_submit_job(self.person, job_request(self.person, self.given, WorkspaceBody))
            return shown(workspace_for(self.person, job.public_id))

        return self.once(work, check=lambda: check_request(self.person, self.given, WorkspaceBody))


@policy(Policy.SIGNED_IN)
class WorkspaceRoute(Route):
    """One workspace."""

    @operation(
        "workspaces_get",
        "Get a workspace",
        tag="workspaces",
        scope=Scope.READ,
        answer=shapes.Workspace,
        refusals=[404],
    )
    def get(self, request: Request, workspace: str) -> HttpResponse:
        """Whether it is ready, and where it is."""
        return self.answer(shown(workspace_for(self.person, workspace)))


@policy(Policy.SIGNED_IN)
class WorkspaceOpenRoute(Route):
    """Getting in."""

    @operation(
        "workspaces_open",
        "Open a workspace",
        tag="workspaces",
        scope=Scope.WORKSPACES,
        body=Nothing,
        answer=shapes.Opening,
        refusals=[404, 409],
        detail="With a session: a single-use ticket for the browser to post. A ticket is bound to a session, so a "
        "token gets the address of the page that hands a signed-in browser over. Only the owner gets in.",
    )
    def post(self, request: Request, workspace: str) -> HttpResponse:
        """A ticket, or the page to go to."""
        job = workspace_for(self.person, workspace)
        require(self.person, Verb.ENTER, job)
        page = f"{settings.PORTAL_URL}/jobs/{job.public_id}/"
        if self.token is not None:
            return self.answer({"post_to": None, "ticket": None, "page": page})
        post_to, ticket = do_open_workspace(self.person, job, request.session.session_key or "")
        return self.answer({"post_to": post_to, "ticket": ticket, "page": page})


@policy(Policy.SIGNED_IN)
class WorkspaceStopRoute(Route):
    """Stopping."""

    @operation(
        "workspaces_stop",
        "Stop a workspace",
        tag="workspaces",
        scope=Scope.WORKSPACES,
        body=Nothing,
        answer=shapes.Workspace,
        refusals=[404],
        detail="Its GPUs go back; its home stays. Repeatable.",
    )
    def post(self, request: Request, workspace: str) -> HttpResponse:
        """The workspace; it may take a moment until its node lets go."""
        do_cancel_job(self.person, workspace_for(self.person, workspace))
        return self.answer(shown(workspace_for(self.person, workspace)))


@policy(Policy.SIGNED_IN)
class WorkspaceStartAgainRoute(Route):
    """The same once more."""

    @operation(
        "workspaces_start_again",
        "Start a stopped workspace again",
        tag="workspaces",
        scope=Scope.WORKSPACES,
        body=Nothing,
        answer=shapes.Workspace,
        status=201,
        rate=throttle.SUBMIT,
        idempotent=True,
        refusals=[404],
    )
    def post(self, request: Request, workspace: str) -> HttpResponse:
        """A new workspace with the same request and the same home."""

        def work() -> dict[str, Any]:
            new = do_start_again(self.person, workspace_for(self.person, workspace))
            return shown(workspace_for(self.person, new.public_id))

        return self.once(work)
