"""REST: shares of a workspace with members of its project."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.request_parsing import StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import SignedInView, operation
from portal.api.jobs.job_requests import ID_OR_NAME
from portal.api.serializers.references import UserReference
from portal.api.serializers.workspaces import get_workspace
from portal.domain.workspaces.sharing import MAX_DURATION_S, MIN_DURATION_S, ShareAccess
from portal.errors import InvalidRequest
from portal.models import Job, User
from portal.models import WorkspaceShare as WorkspaceShareRow
from portal.selectors.lookup import matches_key
from portal.services.accounts.tokens import Scope
from portal.services.workspaces.sharing import (
    do_revoke_share,
    do_share_workspace,
    get_share,
    list_shares,
    open_port_warning,
    remaining_risk,
)


class WorkspaceShare(ResponseSerializer):
    """Lets another user use the tool of a workspace."""

    id = serializers.CharField(source="public_id")
    user = UserReference()
    access = serializers.ChoiceField(
        list(ShareAccess),
        help_text="view: only requests that read; edit: all that the owner can do in the tool.",
    )
    created_by = UserReference()
    created_at = serializers.DateTimeField()
    expires_at = serializers.DateTimeField()
    revoked_at = serializers.DateTimeField(allow_null=True)
    warning = serializers.CharField(
        help_text="What a live share cannot protect on the node where the workspace runs, and what the user of a "
        "revoked one could still use until the workspace restarts. Empty if nothing.",
    )

    @staticmethod
    def get_warning(row: WorkspaceShareRow, live_warning: str | None) -> str:
        if row.revoked_at is not None:
            return remaining_risk(row)
        return open_port_warning(row.job) if live_warning is None else live_warning


class ShareBody(StrictSerializer):
    """The user, the access and the duration of a share."""

    user = StrictCharField(max_length=150, help_text=f"{ID_OR_NAME} A member of the project.")
    access = serializers.ChoiceField(list(ShareAccess))
    duration_s = serializers.IntegerField(min_value=MIN_DURATION_S, max_value=MAX_DURATION_S)


def _share(owner: User, job: Job, /, *, user: str, access: str, duration_s: int) -> WorkspaceShareRow:
    guest = User.objects.filter(matches_key(user, name="username")).first()
    if guest is None:
        raise InvalidRequest(fields={"user": f"{user} is not a member of {job.project.name}."})
    return do_share_workspace(owner, job, guest, access, duration_s)


class WorkspaceSharesView(SignedInView):
    @operation(
        "workspace_shares_list",
        "List the live shares of a workspace",
        tag="workspaces",
        scope=Scope.READ,
        response=[WorkspaceShare],
        detail="For those who control the workspace.",
    )
    def get(self, request: Request, workspace: str) -> HttpResponse:
        job = get_workspace(self.user, workspace)
        rows, warning = list_shares(self.user, job), open_port_warning(job)
        return self.paginated_response(rows, lambda row: WorkspaceShare.represent(row, warning))


ROUTES = [
    path("workspaces/<slug:workspace>/shares/", WorkspaceSharesView.as_view()),
    action_route(
        "workspaces/<slug:workspace>/",
        get_workspace,
        "share",
        "workspaces_share",
        "Share a workspace with a member of its project",
        "Only its owner can. It replaces an earlier share with the same user.",
        _share,
        represent=lambda _user, _job, row: WorkspaceShare.represent(row),
        response=WorkspaceShare,
        base=SignedInView,
        tag="workspaces",
        scope=Scope.WORKSPACES,
        body=ShareBody,
        status=201,
        error_statuses=[409],
    ),
    action_route(
        "workspace-shares/<slug:share>/",
        get_share,
        "revoke",
        "workspace_shares_revoke",
        "Revoke a share of a workspace",
        "Open connections of the user are closed within 5 s. Idempotent.",
        do_revoke_share,
        represent=lambda _user, _share, row: WorkspaceShare.represent(row),
        response=WorkspaceShare,
        base=SignedInView,
        tag="workspaces",
        scope=Scope.WORKSPACES,
        idempotent=False,
    ),
]
