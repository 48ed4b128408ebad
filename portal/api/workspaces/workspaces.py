"""REST: workspaces, which are jobs with a tool that opens in a browser."""

from __future__ import annotations

from functools import partial

from django.conf import settings
from django.http import HttpResponse
from rest_framework.request import Request

from portal.access import Permission, require_permission
from portal.api.framework.request_parsing import EmptyBody
from portal.api.framework.views import SignedInView, operation
from portal.api.jobs.job_requests import WorkspaceBody, submit_response
from portal.api.jobs.jobs import ORDERS, JobFilterQuery, build_filter
from portal.api.serializers import workspaces as representations
from portal.api.serializers.workspaces import get_workspace, represent_workspace
from portal.selectors.jobs.jobs import list_workspaces
from portal.services.accounts.tokens import Scope
from portal.services.workspaces.access import do_open_workspace
from portal.valkey import rate_limits

_read = partial(operation, tag="workspaces", scope=Scope.READ)
_write = partial(operation, tag="workspaces", scope=Scope.WORKSPACES)


class WorkspacesView(SignedInView):
    @_read("workspaces_list", "List workspaces", query=JobFilterQuery, response=[representations.Workspace])
    def get(self, request: Request) -> HttpResponse:
        rows = list_workspaces(self.user, build_filter(self.query))
        return self.paginated_response(rows, representations.Workspace.represent, ORDERS[self.query["order"]])

    @_write(
        "workspaces_launch",
        "Launch a workspace",
        body=WorkspaceBody,
        response=representations.Workspace,
        status=201,
        rate=rate_limits.JOB_SUBMITS,
        idempotent=True,
    )
    def post(self, request: Request) -> HttpResponse:
        """The new workspace, pending; it can be opened once it is ready."""
        return submit_response(self, WorkspaceBody, represent_workspace)


class WorkspaceView(SignedInView):
    @_read("workspaces_get", "Get a workspace", response=representations.Workspace)
    def get(self, request: Request, workspace: str) -> HttpResponse:
        return self.json_response(representations.Workspace.represent(get_workspace(self.user, workspace)))


class WorkspaceOpenView(SignedInView):
    @_write(
        "workspaces_open",
        "Open a workspace",
        body=EmptyBody,
        response=representations.WorkspaceAccess,
        error_statuses=[409],
        detail="With a session: a single-use ticket that the browser posts. Tickets are bound to a session, so "
        "requests with a token get only the portal page that opens the workspace in a signed-in browser. Only its "
        "owner and users with a share can open a workspace.",
    )
    def post(self, request: Request, workspace: str) -> HttpResponse:
        """A ticket, or the URL to open."""
        job = get_workspace(self.user, workspace)
        require_permission(self.user, Permission.VISIT, job)
        page = f"{settings.PORTAL_URL}/jobs/{job.public_id}/"
        if self.token is not None:
            return self.json_response(
                representations.WorkspaceAccess.compose(post_to=None, ticket=None, page=page)
            )
        post_to, ticket = do_open_workspace(self.user, job, request.session.session_key or "")
        return self.json_response(
            representations.WorkspaceAccess.compose(post_to=post_to, ticket=ticket, page=page)
        )
