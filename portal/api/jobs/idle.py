"""REST: snoozes and exemptions of idle workspaces."""

from __future__ import annotations

from django.http import HttpResponse
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework.pagination import NEWEST
from portal.api.framework.request_parsing import EmptyBody, StrictCharField, StrictSerializer
from portal.api.framework.views import ApiView, ListQuery, list_schema, operation
from portal.api.jobs.jobs import JobActionView
from portal.api.serializers.idle import IdleExemption
from portal.api.serializers.jobs import JobDetail
from portal.selectors.jobs.idle import active_exemptions, get_exemption
from portal.selectors.jobs.jobs import get_job
from portal.services.accounts.tokens import Scope
from portal.services.workspaces.idle import (
    MIN_REASON_LENGTH,
    do_exempt_from_idle,
    do_revoke_exemption,
    do_snooze,
)


class IdleExemptionBody(StrictSerializer):
    """The reason for keeping a workspace."""

    reason = StrictCharField(
        min_length=MIN_REASON_LENGTH,
        max_length=500,
        help_text="Others read it, and it is kept in the audit trail.",
    )


@access_policy(AccessPolicy.SIGNED_IN)
class JobSnoozeView(JobActionView):
    @operation(
        "jobs_snooze",
        "Keep an idle workspace for a while",
        tag="workspaces",
        scope=Scope.WORKSPACES,
        body=EmptyBody,
        response=JobDetail,
        error_statuses=[404, 409],
        detail="As long and as often as the policy says, until it is used again.",
    )
    def post(self, request: Request, job: str) -> HttpResponse:
        """The workspace, whose countdown is stopped."""
        do_snooze(self.user, get_job(self.user, job))
        return self.action_response(job)


@access_policy(AccessPolicy.SIGNED_IN)
class JobIdleExemptionView(ApiView):
    @operation(
        "jobs_idle_exemption",
        "Say why a workspace is kept although nobody uses it",
        tag="workspaces",
        scope=Scope.WORKSPACES,
        body=IdleExemptionBody,
        response=IdleExemption,
        status=201,
        error_statuses=[404, 409],
        detail="It holds as long as the policy says, unless somebody who manages the project cuts it short.",
    )
    def post(self, request: Request, job: str) -> HttpResponse:
        """The exemption with its expiry."""
        row = do_exempt_from_idle(self.user, get_job(self.user, job), self.body["reason"])
        return self.json_response(IdleExemption.represent(get_exemption(self.user, row.public_id)), 201)


@access_policy(AccessPolicy.SIGNED_IN)
class IdleExemptionsView(ApiView):
    @operation(
        "idle_exemptions_list",
        "List the reasons that keep idle workspaces",
        tag="workspaces",
        scope=Scope.READ,
        query=ListQuery,
        response=list_schema(IdleExemption),
    )
    def get(self, request: Request) -> HttpResponse:
        """Exemptions, newest first."""
        return self.paginated_response(active_exemptions(self.user), IdleExemption.represent, NEWEST)


@access_policy(AccessPolicy.SIGNED_IN)
class IdleExemptionRevokeView(ApiView):
    @operation(
        "idle_exemptions_revoke",
        "Cut a reason short",
        tag="workspaces",
        scope=Scope.WORKSPACES,
        body=EmptyBody,
        response=IdleExemption,
        error_statuses=[404, 409],
        detail="For managers of the project and administrators; from then on administrators alone give another.",
    )
    def post(self, request: Request, exemption: str) -> HttpResponse:
        """The revoked exemption."""
        do_revoke_exemption(self.user, get_exemption(self.user, exemption))
        return self.json_response(IdleExemption.represent(get_exemption(self.user, exemption)))
