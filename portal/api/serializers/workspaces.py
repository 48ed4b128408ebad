"""Serializers of workspaces."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.serializers.jobs import Job
from portal.errors import NotFound
from portal.models import Job as JobRow
from portal.models import User
from portal.selectors.jobs.jobs import list_workspaces
from portal.services.workspaces.access import workspace_origin


class Workspace(Job):
    """A workspace: a job with a tool that opens in a browser."""

    ready = serializers.BooleanField(help_text="true if its server responds, so that it can be opened.")
    ready_at = serializers.DateTimeField(allow_null=True, source="ready_since")
    suspend_at = serializers.DateTimeField(
        allow_null=True,
        source="suspends_at",
        help_text="When it will be suspended unless it is used or exempted; null if no suspension is scheduled.",
    )
    tool = serializers.CharField(allow_blank=True, source="environment.tool")
    address = serializers.CharField(help_text="Origin of the workspace; browsers get access through `open/`.")

    @staticmethod
    def get_ready(row: Any, context: None) -> bool:
        return row.ready_since is not None

    @staticmethod
    def get_address(row: JobRow, context: None) -> str:
        return workspace_origin(row)


class WorkspaceAccess(ResponseSerializer):
    """How to open a workspace."""

    post_to = serializers.CharField(
        allow_null=True,
        help_text="Address to which the browser posts the form field `ticket`; null for requests with a token.",
    )
    ticket = serializers.CharField(
        allow_null=True, help_text="Single-use ticket, valid for 30 s; null for requests with a token."
    )
    page = serializers.CharField(
        help_text="Page of the portal that opens the workspace in a signed-in browser."
    )


def get_workspace(user: User, public_id: str) -> JobRow:
    """Return the workspace if the user may see it. Raise NotFound otherwise."""
    row = list_workspaces(user).filter(public_id=public_id).first()
    if row is None:
        raise NotFound("There is no such workspace.")
    return row


def represent_workspace(user: User, row: JobRow) -> dict[str, Any]:
    """Return the workspace as stored now."""
    return Workspace.represent(get_workspace(user, row.public_id))
