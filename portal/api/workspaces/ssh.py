"""REST: SSH connections to running jobs, which the gateway serves over a WebSocket."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from agents.keys import derive_host_key
from portal.access import Permission, require_permission
from portal.api.framework.request_parsing import StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.errors import Conflict
from portal.selectors.jobs.jobs import get_job
from portal.services.accounts.tokens import Scope
from portal.services.workspaces.terminals import do_open_terminal


class SshConnection(ResponseSerializer):
    """Where a client connects, once, within a minute."""

    socket = serializers.CharField(help_text="Path of the WebSocket, for the token of this request.")
    host_key = serializers.CharField(
        help_text="Key of the SSH server: a line of a known_hosts file without the host."
    )


class SshBody(StrictSerializer):
    """What to connect to."""

    rank = serializers.IntegerField(min_value=0, max_value=1_000_000, default=0)


class JobSshView(SignedInView):
    @operation(
        "jobs_ssh",
        "Connect to a job by SSH",
        tag="jobs",
        scope=Scope.SSH,
        body=SshBody,
        response=SshConnection,
        status=201,
        error_statuses=[409],
        idempotent=True,
        detail="Only its owner, with a token. The binary messages of the WebSocket carry the SSH protocol; "
        "SSH authentication is `none`. `fairway ssh` is a client.",
    )
    def post(self, request: Request, job: str) -> HttpResponse:
        """The WebSocket of the connection."""
        row = get_job(self.user, job)
        require_permission(self.user, Permission.ENTER, row)
        if self.token is None:
            raise Conflict("SSH connections need an API token.", code="token_required")

        def work() -> dict[str, Any]:
            opened = do_open_terminal(self.user, row, self.body["rank"], "", token=self.token)
            socket = f"/terminals/{opened.public_id}/"
            host_key = derive_host_key(settings.SECRET_KEY)[1]
            return SshConnection.compose(socket=socket, host_key=host_key)

        return self.idempotent_response(work)
