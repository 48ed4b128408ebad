"""REST: snoozes and exemptions of idle workspaces."""

from __future__ import annotations

from django.http import HttpResponse
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework.pagination import NEWEST
from portal.api.framework.views import ApiView, operation
from portal.api.serializers.idle import IdleExemption
from portal.selectors.jobs.idle import active_exemptions
from portal.services.accounts.tokens import Scope


@access_policy(AccessPolicy.SIGNED_IN)
class IdleExemptionsView(ApiView):
    @operation(
        "idle_exemptions_list",
        "List the reasons that keep idle workspaces",
        tag="workspaces",
        scope=Scope.READ,
        response=[IdleExemption],
    )
    def get(self, request: Request) -> HttpResponse:
        """Exemptions, newest first."""
        return self.paginated_response(active_exemptions(self.user), IdleExemption.represent, NEWEST)
